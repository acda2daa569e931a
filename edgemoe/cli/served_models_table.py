"""Shows the models of a daemon that serves several, by its /health."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from edgemoe.config.sizes import format_size
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import loading_text

COLOURS = {"ready": "green", "failed": "red", "unloaded": "dim"}


def served_table(models: list[Json]) -> Table:
    """Returns a table of the models: their state, boxes, memory and requests, and when idle ones are unloaded."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Model", overflow="fold")
    table.add_column("State")
    in_cluster = any(model.get("boxes") for model in models)
    if in_cluster:
        table.add_column("Boxes", overflow="fold")
    for heading in ("Memory", "Requests", "Idle", "Unloaded in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        table.add_row(
            Text(model["name"]),
            _state(model),
            *([", ".join(model["boxes"])] if in_cluster else []),
            format_size(model["memory_bytes"]) if model["memory_bytes"] else "",
            f"{model['requests']}" if model["state"] == "ready" else "",
            f"{model['idle_s']:.0f} s" if model["idle_s"] else "",
            "" if model["expires_s"] is None or model["state"] != "ready" else f"{model['expires_s']:.0f} s",
        )
    return table


def _state(model: Json) -> Text:
    state = Text(model["state"], COLOURS.get(model["state"], "yellow"))
    if model["is_pinned"]:
        state.append(", pinned")
    if loading := model.get("loading"):
        state.append(f" ({loading_text(loading)})")
    if model.get("reason"):
        state.append(f": {model['reason']}")
    return state

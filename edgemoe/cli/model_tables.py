"""Shows the packed models of this box, and the models of a daemon that serves several, by its /health."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgemoe.config.sizes import format_size
from edgemoe.store.catalog import describe, find_stores
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import loading_text

MOST_COLUMNS = 10_000
COLOURS = {"ready": "green", "failed": "red", "unloaded": "dim"}


def packed_listing(store_dir: str | Path, width: int) -> Table | str:
    """Returns the `packed_table`, or two lines a store where that is wider than `width`; a line if there is none."""
    if not find_stores(store_dir):
        return f"No packed models in {store_dir}. `edgemoe pull OWNER/NAME` and `edgemoe pack FOLDER` make some."
    found = packed_table(store_dir)
    if Console(width=MOST_COLUMNS).measure(found).maximum <= width:
        return found
    lines = [f"Packed models in {store_dir}"]
    for path in find_stores(store_dir):
        card = describe(path)
        known = [card.family, f"{card.layers} layers", f"experts {card.experts}", card.precision] if card.bytes else []
        known += [format_size(card.bytes)] if card.bytes else []
        known += [f"last use {card.last_use}"] if card.last_use else []
        lines += [path.name, f"  {'; '.join([*known, card.state])}"]
    return "\n".join(lines)


def packed_table(store_dir: str | Path) -> Table:
    """Returns a table of the stores in `store_dir`, one row each."""
    found = Table(title=f"Packed models in {store_dir}")
    found.add_column("store", no_wrap=True)  # a whole name, for `verify` and `remove`
    for heading in ("family", "layers", "experts", "precision"):
        found.add_column(heading)
    found.add_column("size", justify="right")
    found.add_column("last use")
    found.add_column("state", overflow="fold")
    for path in find_stores(store_dir):
        card = describe(path)
        size, layers = (format_size(card.bytes), str(card.layers)) if card.bytes else ("", "")
        row = (card.family, layers, card.experts, card.precision, size, card.last_use, card.state)
        found.add_row(path.name, *row)
    return found


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

"""Runs `edgemoe status`: shows the running daemon by its /health and /metrics."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgemoe.cli.boxes import boxes
from edgemoe.cli.client import Client, socket_of
from edgemoe.cli.output import console
from edgemoe.config.sizes import format_size
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import select
from edgemoe.types.arrays import Json
from edgemoe.types.model_info import encodings_text, loading_text

WATCH_S = 2.0
RATES_S = 1.0  # between two readings of counters
TIERS = ("vram", "ram", "nvme")


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """The daemon's /health and /metrics at one moment."""

    socket: str
    health: Json
    metrics: dict[str, float]


def run(args: argparse.Namespace) -> int:
    """Prints the status once, or until Ctrl-C. Returns 0 only if the daemon is ready."""
    socket = socket_of(args)
    with Client(socket) as client:
        picture = _cluster if args.cluster else _daemon
        if args.watch:
            _watch(client, socket, picture)
        snapshot = take(client, socket)
        if not args.json:
            console().print(picture(client, socket))
    if args.json:
        shown = {
            "socket": snapshot.socket,
            "health": snapshot.health,
            "figures": snapshot.metrics,
        }  # scripts know it so
        print(json.dumps(shown, indent=2))
    return 0 if snapshot.health.get("status") == "ready" else 1


def take(client: Client, socket: Path) -> StatusSnapshot:
    """Reads the daemon's /health and /metrics."""
    health = json.loads(client.text("/health", accept_unavailable=True))
    return StatusSnapshot(str(socket), health, names.parse(client.text("/metrics")))


def render(snapshot: StatusSnapshot) -> RenderableType:
    """Returns the tables that show a snapshot."""
    return Group(_heading(snapshot), tier_table(snapshot.metrics), _request_table(snapshot.metrics))


def _daemon(client: Client, socket: Path) -> RenderableType:
    return render(take(client, socket))


def _cluster(client: Client, socket: Path) -> RenderableType:
    before, began_s = take(client, socket).metrics, time.monotonic()
    time.sleep(RATES_S)
    now = take(client, socket)
    return boxes(now.health, before, now.metrics, time.monotonic() - began_s)


def _watch(client: Client, socket: Path, picture: Callable[[Client, Path], RenderableType]) -> None:
    """Redraws the status on a terminal; elsewhere prints one after the other."""
    out = console()
    if not out.is_terminal:
        while True:
            out.print(picture(client, socket))
            out.file.flush()
            time.sleep(WATCH_S)
    with Live(picture(client, socket), console=out, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(picture(client, socket), refresh=True)


def _heading(snapshot: StatusSnapshot) -> RenderableType:
    health = snapshot.health
    state, model, engine = str(health["status"]), health.get("model") or {}, health.get("engine") or {}
    colour = {"ready": "green", "failed": "red"}.get(state, "yellow")
    if loading := health.get("loading"):
        state += f" ({loading_text(loading)})"
    name = model.get("id", "edgemoe")
    heading = Text.assemble((name, "bold"), " is ", (state, colour), f" at {snapshot.socket}\n")
    if model:
        heading.append(
            f"{model['family']}, {model['layers']} layers of {model['experts']} experts, {model['top_k']} a token, "
            f"{format_size(model['expert_bytes'])} an expert; {_precision(model)}\n"
        )
    if failure := health.get("cannot_start"):
        heading.append(f"{failure['reason']}\n", "red")
    elif engine.get("starts", 1) > 1:
        why = f"The engine has been started {engine['starts']} times; it last ended: {engine['last_end']}\n"
        heading.append(why, "yellow")
    return heading


def _precision(model: Json) -> str:
    """Returns the encodings of weights, and what keys and values are kept in where that is another type."""
    dtype, kv = model["dtype"], model.get("kv_dtype")
    weights = encodings_text(model.get("encodings", ()), model.get("dense_encoding", ""), dtype)
    return f"{weights}; KV {kv}" if kv and kv != dtype else weights


def tier_table(metrics: Mapping[str, float]) -> Table:
    """Returns a table with a row per tier: what it holds, its share of expert calls, bytes copied into it, stalls."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("Tier", "Experts", "Slab", "Calls served", "Share", "Bytes in", "Stalls"):
        table.add_column(column, justify="left" if column == "Tier" else "right")
    calls = select(metrics, names.TIER_HITS)
    for tier in TIERS:
        served = select(metrics, names.TIER_HITS, tier=tier)
        slots = select(metrics, names.TIER_SLOTS, tier=tier)
        if tier == "nvme" or slots:
            held = select(metrics, names.TIER_EXPERTS, tier=tier)
            table.add_row(
                tier.upper(),
                f"{held:.0f} of {slots:.0f}" if slots else "all",
                format_size(select(metrics, names.TIER_BYTES, tier=tier)) if slots else "",
                f"{served:,.0f}",
                f"{served / calls:.1%}" if calls else "",
                format_size(select(metrics, names.BYTES_MOVED, to=tier)) if slots else "",
                f"{select(metrics, names.STALL_SECONDS, tier=tier):.1f} s",
            )
    return table


def _request_table(metrics: Mapping[str, float]) -> Table:
    blocks = select(metrics, names.KV_BLOCKS)
    used = select(metrics, names.KV_BLOCKS_REFERENCED)
    rows = {
        "Requests": f"{select(metrics, names.REQUESTS_RUNNING):.0f} running, "
        f"{select(metrics, names.QUEUE_DEPTH):.0f} waiting",
        "KV cache": f"{used / blocks:.0%} of {blocks:.0f} blocks" if blocks else "",
        "Tokens": f"{select(metrics, 'edgemoe_generation_tokens_total'):,.0f} generated, "
        f"{select(metrics, 'edgemoe_prompt_tokens_total'):,.0f} of prompts, "
        f"{select(metrics, names.PREFIX_HIT_TOKENS):,.0f} from the prefix cache",
        "First token": _mean(metrics, "edgemoe_time_to_first_token_seconds"),
        "Next tokens": _mean(metrics, "edgemoe_request_time_per_output_token_seconds"),
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in rows.items():
        table.add_row(Text(name, "bold"), text)
    return table


def _mean(metrics: Mapping[str, float], family: str) -> str:
    count = select(metrics, f"{family}_count")
    return f"{1000 * select(metrics, f'{family}_sum') / count:,.1f} ms on average" if count else "none yet"

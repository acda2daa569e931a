"""Runs `edgemoe bench`: how fast the running daemon answers at 1, 4 and 16 streams, through its API.

Beside the measured times stand the times that this machine allows, from the model of `edgemoe plan`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.console import Group
from rich.table import Table

import edgemoe
from edgemoe.cli.client import Client, socket_of
from edgemoe.cli.output import console
from edgemoe.cli.status_command import StatusSnapshot, take_snapshot
from edgemoe.config.loading import load
from edgemoe.errors import ConfigError, EdgemoeError
from edgemoe.jit.env import WORKER_ENV
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import select
from edgemoe.types.json_object import Json

if TYPE_CHECKING:
    from edgemoe.cli.plan.speed_bounds import SpeedBound

STREAMS = (1, 4, 16)
ROUNDS = 3  # of as many requests as there are streams
SILENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Holds the times of one request, in seconds."""

    first_s: float
    per_token_s: float
    tokens: int
    total_s: float


@dataclass(frozen=True, slots=True)
class StreamRow:
    """Medians over the requests of one number of streams; tokens a second of all of them together."""

    streams: int
    first_token_s: float
    per_output_token_s: float
    tokens_per_s: float


def run(args: argparse.Namespace) -> int:
    """Prints the figures. Raises EdgemoeError where a request fails."""
    if min(args.prompt, args.tokens - 1) < 1:
        raise ConfigError("--prompt is 1 at least, --tokens 2")
    socket = socket_of(args)
    with Client(socket) as client:
        before = take_snapshot(client, socket)
        if before.health.get("status") != "ready":
            raise EdgemoeError(f"the daemon at {socket} is {before.health.get('status')}; wait until it is ready")
        vocab = int(json.loads(client.text("/tokenizer_info"))["vocab_size"])
        rows = [asyncio.run(measure(socket, streams, args.prompt, args.tokens, vocab)) for streams in STREAMS]
        after = take_snapshot(client, socket)
    allowed, why = _allowed(after, args)
    if args.json:
        print(
            json.dumps(_report(before, after, rows, args) | {"allowed": [asdict(each) for each in allowed]}, indent=2)
        )
    else:
        console().print(_picture(before, after, rows, args, allowed), *([why] if why else []))
    return 0


async def measure(socket: Path, streams: int, prompt_tokens: int, tokens: int, vocab: int) -> StreamRow:
    """Returns the figures of `streams` concurrent streams with random prompts, which no cache holds."""
    transport = httpx.AsyncHTTPTransport(uds=str(socket), verify=False, limits=httpx.Limits(max_connections=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=SILENCE_S) as client:
        await _one(client, 8, 2, vocab)  # the first request pays for caches and compilation
        began_s, seen = time.perf_counter(), list[StreamTimes]()
        for _ in range(ROUNDS):
            asked = (_one(client, prompt_tokens, tokens, vocab) for _ in range(streams))
            seen += await asyncio.gather(*asked)
        taken_s = time.perf_counter() - began_s
    return StreamRow(
        streams,
        statistics.median(each.first_s for each in seen),
        statistics.median(each.per_token_s for each in seen),
        sum(each.tokens for each in seen) / taken_s,
    )


async def _one(client: httpx.AsyncClient, prompt_tokens: int, tokens: int, vocab: int) -> StreamTimes:
    """Sends a request and reads its stream. Sampling keeps the model from repeating itself, which caches like."""
    body = {
        "prompt": [random.randrange(vocab) for _ in range(prompt_tokens)],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, came_s, counted = time.perf_counter(), list[float](), 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise EdgemoeError(f"the daemon refused: {(await response.aread()).decode(errors='replace')[:400]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise EdgemoeError(str(event["error"].get("message", "the daemon reported an error")))
            if any(choice.get("text") for choice in event.get("choices", [])):
                came_s.append(time.perf_counter() - began_s)
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
    total_s = time.perf_counter() - began_s
    first_s = came_s[0] if came_s else total_s
    return StreamTimes(first_s, (total_s - first_s) / max(1, counted - 1), counted, total_s)


def _allowed(now: StatusSnapshot, args: argparse.Namespace) -> tuple[list[SpeedBound], str]:
    """Returns the bounds of this machine, or the reason they are unknown; measured while the daemon is idle."""
    os.environ.update(WORKER_ENV)  # threads wait as an engine's do; torch reads this when it is loaded
    from edgemoe.cli.plan.speed_bounds import bounds

    settings = load(Path(args.config) if args.config else None, args.set).settings
    try:
        return bounds(settings, now.health["model"], now.metrics, STREAMS, args.prompt + args.tokens), ""
    except (EdgemoeError, OSError) as error:  # such as a folder of the daemon's that only it may look at
        return [], f"What this machine allows: edgemoe plan MODEL, with the settings of the daemon ({error})."


def tiers(before: StatusSnapshot, after: StatusSnapshot) -> dict[str, float]:
    """Returns the share of expert calls that each tier served between two snapshots."""
    served = {
        tier: select(after.metrics, names.TIER_HITS, tier=tier) - select(before.metrics, names.TIER_HITS, tier=tier)
        for tier in ("vram", "ram", "nvme")
    }
    calls = sum(served.values())
    return {tier: round(count / calls, 4) for tier, count in served.items() if calls}


def _report(before: StatusSnapshot, after: StatusSnapshot, rows: Sequence[StreamRow], args: argparse.Namespace) -> Json:
    return {
        "edgemoe": edgemoe.__version__,
        "model": after.health.get("model"),
        "prompt_tokens": args.prompt,
        "output_tokens": args.tokens,
        "streams": [asdict(row) for row in rows],
        "served_by": tiers(before, after),
    }


def _picture(
    before: StatusSnapshot,
    after: StatusSnapshot,
    rows: Sequence[StreamRow],
    args: argparse.Namespace,
    allowed: Sequence[SpeedBound],
) -> Group:
    model = after.health.get("model") or {}
    table = Table(title=f"{model.get('id')}: prompts of {args.prompt} tokens, answers of {args.tokens}")
    for column in ("streams", "first token (TTFT)", "each token (TPOT)", "tokens/s"):
        table.add_column(column, justify="right")
    for column in ("allowed (TPOT)", "limit") if allowed else ():
        table.add_column(column, justify="right")
    limits = {each.streams: (f"{1000 * each.per_output_token_s:,.1f} ms", each.limit) for each in allowed}
    for row in rows:
        first, each = f"{1000 * row.first_token_s:,.0f} ms", f"{1000 * row.per_output_token_s:,.1f} ms"
        table.add_row(str(row.streams), first, each, f"{row.tokens_per_s:,.1f}", *limits.get(row.streams, ()))
    served = ", ".join(f"{share:.1%} {tier.upper()}" for tier, share in tiers(before, after).items())
    return Group(table, f"edgemoe {edgemoe.__version__}; experts served from {served}.")

"""Runs `edgemoe top`: redraws the daemon's state each second, from the same events as the page."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Sparkline, Static

from edgemoe.cli.client import Client, refusal, socket_of
from edgemoe.cli.status_command import offers, planned, routes
from edgemoe.config.sizes import format_rate
from edgemoe.errors import EdgemoeError, ServiceError
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import encodings_text

KEPT_S = 62.0
BUCKET = 'le="'


@dataclass(frozen=True, slots=True)
class FigureReading:
    """All figures at one moment."""

    t: float
    figures: Mapping[str, float]


@dataclass(slots=True)
class LiveFigures:
    """Holds the daemon's figures over the last minute, its /health and its boxes, from events."""

    health: Json = field(default_factory=dict)
    boxes: dict[tuple[str, str], Json] = field(default_factory=dict)  # by box and further model
    readings: deque[FigureReading] = field(default_factory=deque)

    def add_event(self, name: str, data: Json) -> None:
        """Updates the figures from one event."""
        if name == "hello":
            self.readings.clear()
            self.boxes.clear()
        elif name == "state":
            self.health = data.get("health", self.health)
            self.readings.append(FigureReading(data["t"], {**self.figures, **data["figures"]}))
            while self.readings[0].t < data["t"] - KEPT_S:
                self.readings.popleft()
        elif name == "box":
            key = (data["box"], data.get("model", ""))
            self.boxes[key] = {**self.boxes.get(key, {}), **data}

    @property
    def figures(self) -> Mapping[str, float]:
        """Returns the latest figures."""
        return self.readings[-1].figures if self.readings else {}

    @property
    def requests(self) -> list[tuple[str, Json]]:
        """Returns the requests of all engines that show themselves, each with its box and further model."""
        cluster = self.health.get("cluster")
        here = {member["node"] for member in cluster["members"]} if cluster else {""}
        return [
            (" ".join(filter(None, key)), one)
            for key, shown in self.boxes.items()
            if key[0] in here
            for one in shown["requests"]
        ]

    def get(self, family: str, **labels: str) -> float:
        """Returns a figure; 0 where there is none."""
        return self.figures.get(named(family, **labels), 0.0)

    def rate(self, family: str, seconds: float, /, **labels: str) -> float:
        """Returns by how much a counter grows in a second; 0 across a restart."""
        name = named(family, **labels)
        before, after = self._span(seconds)
        if before is None or after is None:
            return 0.0
        return max(0.0, after.figures.get(name, 0.0) - before.figures.get(name, 0.0)) / (after.t - before.t)

    def quantile(self, family: str, share: float) -> float | None:
        """Returns a quantile of a histogram's observations in the last minute; None for none."""
        before, after = self._span(60.0)
        if before is None or after is None:
            return None
        buckets = sorted(
            (float(name.partition(BUCKET)[2].partition('"')[0]), value - before.figures.get(name, 0.0))
            for name, value in after.figures.items()
            if name.startswith(f"{family}_bucket{{")
        )
        if not buckets or buckets[-1][1] <= 0:
            return None
        low, below, wanted = 0.0, 0.0, share * buckets[-1][1]
        for bound, count in buckets:
            if count >= wanted:
                return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return low

    def _span(self, seconds: float) -> tuple[FigureReading | None, FigureReading | None]:
        if len(self.readings) < 2:
            return None, None
        after = self.readings[-1]
        before = next(one for one in self.readings if one.t >= after.t - seconds - 0.1)
        return (before, after) if before is not after else (self.readings[-2], after)


def model_of(health: Json) -> dict[str, Any]:
    """Returns /health's description of the served model; {} while it is unknown."""
    return health.get("model") or {}


TTFT, TPOT = "edgemoe_time_to_first_token_seconds", "edgemoe_request_time_per_output_token_seconds"
TIERS = {
    "vram": ("VRAM", "yellow", "ram"),
    "ram": ("RAM", "dodger_blue2", "nvme"),
    "nvme": ("disk", "grey58", ""),
}
PHASES = {"prefill": "reads", "decode": "answers", "waiting": "waits", "paused": "paused"}
STATES = {"here": "green", "ready": "green", "leaving": "yellow", "gone": "red", "refused": "red", "failed": "red"}
BAR = 12  # columns
MOST_REQUESTS = 12


def heading_panel(live: LiveFigures, trouble: str = "") -> RenderableType:
    """Returns a line with the served model and the daemon's state."""
    if trouble:
        return Text(trouble, "bold red")
    health = live.health
    model, status = model_of(health), str(health.get("status", "connecting"))
    if loading := health.get("loading"):
        status += f" ({loading['phase']}, {loading['fraction']:.0%})"
    line = Text.assemble(
        (model.get("id", "edgemoe"), "bold"), "  ", (status, STATES.get(status, "yellow")), overflow="ellipsis"
    )
    if model:
        weights = encodings_text(model.get("encodings", ()), model.get("dense_encoding", ""), model["dtype"])
        line.append(f"  {model['layers']} layers of {model['experts']} experts, {weights}", "grey58")
    line.no_wrap = True
    return line


def tokens_per_s(live: LiveFigures) -> float:
    """Returns how many tokens are answered in a second."""
    return live.rate(names.STEP_TOKENS, 3.0, phase="decode")


def summary_panel(live: LiveFigures) -> RenderableType:
    """Returns speeds, latencies, the queue and the KV cache."""
    blocks = live.get(names.KV_BLOCKS)
    used = live.get(names.KV_BLOCKS_REFERENCED) / blocks if blocks else 0.0
    prompts = live.rate(names.STEP_TOKENS, 3.0, phase="prefill")
    table = Table.grid(padding=(0, 2), expand=True)
    for width in (9, None, 12, None):
        table.add_column(no_wrap=True, width=width, ratio=None if width else 1)
    for left, right in (
        (("Tokens/s", f"{tokens_per_s(live):,.1f}"), ("First token", _quantiles(live, TTFT))),
        (("Prompts", f"{prompts:,.1f} tokens/s"), ("Each next", _quantiles(live, TPOT))),
        (("Requests", _queue(live)), ("KV cache", f"{used:.0%} of {blocks * 16:,.0f} tokens" if blocks else "")),
    ):
        table.add_row(Text(left[0], "bold"), left[1], Text(right[0], "bold"), right[1])
    return table


def tiers_panel(live: LiveFigures) -> RenderableType:
    """Returns a panel of the experts in each tier, its share of calls, and its transfers."""
    calls = sum(live.rate(names.TIER_HITS, 10.0, tier=tier) for tier in TIERS)
    table = _table("Tier", "Experts", "Calls, 10 s", "Bytes in", "Link busy", "Stalls")
    for tier, (name, colour, source) in TIERS.items():
        slots = live.get(names.TIER_SLOTS, tier=tier)
        if tier != "nvme" and not slots:
            continue
        share = live.rate(names.TIER_HITS, 10.0, tier=tier) / calls if calls else 0.0
        link = {"vram": "0", "ram": "nvme"}.get(tier, "")
        table.add_row(
            Text(name, colour),
            f"{live.get(names.TIER_EXPERTS, tier=tier):,.0f} of {slots:,.0f}" if slots else "the rest",
            bar(share, colour) + Text(f" {share:6.1%}"),
            format_rate(_moved(live, source, tier)) if source else "",
            f"{1 - live.get(names.LINK_IDLE, link=link):.0%}" if link else "",
            f"{live.rate(names.STALL_SECONDS, 10.0, tier=tier):.1%}",
        )
    return table


def requests_panel(live: LiveFigures) -> RenderableType:
    """Returns a line for each request, with its phase."""
    found = live.requests
    if not found:
        return Text("Nobody asks anything just now.", "grey58")
    several = len(live.boxes) > 1
    table = _table("Request", *(["On"] if several else []), "", "Prompt", "Answer", "Since")
    for box, one in found[:MOST_REQUESTS]:
        done = 1.0 if one["phase"] == "decode" else one["computed"] / max(1, one["prompt_tokens"] + one["emitted"])
        table.add_row(
            PHASES.get(one["phase"], one["phase"]),
            *([escape(box)] if several else []),
            bar(min(1.0, done), "green"),
            f"{one['prompt_tokens']:,}",
            f"{one['emitted']:,}",
            f"{one['age_s']:.1f} s",
        )
    if len(found) > MOST_REQUESTS:
        table.add_row(f"and {len(found) - MOST_REQUESTS} more")
    return table


def boxes_panel(live: LiveFigures, cluster: Json) -> RenderableType:
    """Returns a panel of boxes, links, the leader, moving experts, and the routes of requests."""
    table = _table("Box", "State", "At home", "Moving", "Requests", "Trip", "Link")
    for member in cluster["members"]:
        node, state = member["node"], member["state"]
        marks = ["this box" if node == cluster["node"] else state, "leads" if node == cluster["leader"] else ""]
        latency_s, rate = member.get("latency_s"), member.get("bytes_per_s")
        table.add_row(
            escape(node),
            Text(", ".join(filter(None, marks)), STATES.get(state, "")),
            f"{member['homes']}" if member["engine"] else "",
            " ".join(f"{sign}{member[key]}" for sign, key in (("+", "to_come"), ("-", "to_go")) if member[key]),
            f"{member['requests']}",
            f"{1e3 * latency_s:.1f} ms" if latency_s is not None else "",
            format_rate(rate) if rate else "",
        )
    lines = {"Plan": planned(cluster), "Went": routes(live.figures), "Offers": offers(live.figures)}
    if trouble := cluster.get("trouble"):
        lines["No plan"] = trouble
    said = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        said.add_row(Text(name, "bold"), Text(text))
    return Group(table, "", said)


def bar(share: float, colour: str) -> Text:
    """Returns a bar of BAR columns."""
    full = round(BAR * share)
    return Text.assemble(("━" * full, colour), ("━" * (BAR - full), "grey23"))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, expand=True, header_style="grey58")
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="left" if column == "State" else "right", no_wrap=True)
    return table


def _quantiles(live: LiveFigures, family: str) -> str:
    half, most = live.quantile(family, 0.5), live.quantile(family, 0.95)
    return f"{_time(half)}, 95 % in {_time(most)}" if half is not None and most is not None else "none in a minute"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _queue(live: LiveFigures) -> str:
    return f"{live.get(names.REQUESTS_RUNNING):.0f} running, {live.get(names.QUEUE_DEPTH):.0f} waiting"


def _moved(live: LiveFigures, source: str, tier: str) -> float:
    return live.rate(names.BYTES_MOVED, 5.0, **{"from": source, "to": tier})


AGAIN_S = 1.0  # after which a daemon that has gone is looked for again
SILENCE_S = 10.0  # of events that come each second
KEPT = 240  # points of the curve


def run(args: argparse.Namespace) -> int:
    """Shows the daemon until `q`. Returns 0. Raises ServiceError where there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ServiceError("this needs a terminal; `edgemoe status --json` is for programs")
    path = socket_of(args)
    with Client(path) as client:
        client.text("/version")  # raises an error with advice if no daemon answers
    TopScreen(path).run()
    return 0


class TopScreen(App[None]):
    """The screen of `edgemoe top`: a heading, panels, and a curve of the speed."""

    CSS = """
    Screen { background: $background; }
    VerticalScroll { padding: 0 1; scrollbar-size-vertical: 1; }
    #heading { height: 1; padding: 0 1; background: $panel; }
    Sparkline { height: 2; margin: 1 0; }
    Sparkline > .sparkline--max-color, Sparkline > .sparkline--min-color { color: $primary; }
    .panel { height: auto; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit")]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "edgemoe top"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self.live = path, LiveFigures()
        self._speeds: deque[float] = deque([0.0], KEPT)

    def compose(self) -> ComposeResult:
        """Yields the widgets from top to bottom."""
        yield Static(id="heading")
        with VerticalScroll():
            yield Static(id="summary")
            yield Sparkline(id="speed")
            yield Static(id="tiers", classes="panel")
            yield Static(id="boxes", classes="panel")
            yield Static(id="requests", classes="panel")
        yield Footer()

    def on_mount(self) -> None:
        """Starts to read the daemon's events."""
        self.show()
        self.run_worker(self.listen())

    async def listen(self) -> None:
        """Takes events, and connects again where they end. Until cancelled."""
        while True:
            try:
                async for name, data in events(self._path):
                    self.live.add_event(name, data)
                    if name == "state":
                        self._speeds.append(tokens_per_s(self.live))
                        self.show()
            except (EdgemoeError, httpx.HTTPError, OSError, ValueError) as error:
                self.show(f"The daemon does not answer; trying again ({error or type(error).__name__})")
            await asyncio.sleep(AGAIN_S)

    def show(self, trouble: str = "") -> None:
        """Redraws all panels; the heading shows `trouble` if there is any."""
        live = self.live
        self.query_one("#heading", Static).update(heading_panel(live, trouble))
        self.query_one("#summary", Static).update(summary_panel(live))
        self.query_one("#tiers", Static).update(tiers_panel(live))
        self.query_one("#requests", Static).update(requests_panel(live))
        self.query_one("#speed", Sparkline).data = list(self._speeds)
        cluster, boxes = live.health.get("cluster"), self.query_one("#boxes", Static)
        boxes.display = cluster is not None
        if cluster is not None:
            boxes.update(boxes_panel(live, cluster))


async def events(path: Path) -> AsyncIterator[tuple[str, Json]]:
    """Yields a daemon's events until it ends them. Raises EdgemoeError, httpx.HTTPError."""
    transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=SILENCE_S) as client,
        client.stream("GET", "/events") as answer,
    ):
        if answer.is_error:
            await answer.aread()
            raise refusal(answer)
        name = ""
        async for line in answer.aiter_lines():
            kind, _, rest = line.partition(": ")
            if kind == "event":
                name = rest
            elif kind == "data":
                yield name, json.loads(rest)

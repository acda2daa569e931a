"""Runs `edgemoe top`: what the daemon does, redrawn each second, from the same events as the page."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import httpx
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Sparkline, Static

from edgemoe.cli.client import Client, refusal, socket_of
from edgemoe.cli.look import panels
from edgemoe.cli.look.live import Live
from edgemoe.errors import EdgemoeError, ServiceError
from edgemoe.types.arrays import Json

AGAIN_S = 1.0  # after which a daemon that has gone is looked for again
SILENCE_S = 10.0  # of events that come each second
KEPT = 240  # points of the curve


def run(args: argparse.Namespace) -> int:
    """Shows the daemon until `q`. Returns 0. Raises ServiceError where there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ServiceError("this needs a terminal; `edgemoe status --json` is for programs")
    path = socket_of(args)
    with Client(path) as client:
        client.text("/version")  # says what to do where no daemon answers
    Top(path).run()
    return 0


class Top(App[None]):
    """The screen."""

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
        self._path, self.live = path, Live()
        self._speeds: deque[float] = deque([0.0], KEPT)

    def compose(self) -> ComposeResult:
        """Yields the panels."""
        yield Static(id="heading")
        with VerticalScroll():
            yield Static(id="summary")
            yield Sparkline(id="speed")
            yield Static(id="tiers", classes="panel")
            yield Static(id="boxes", classes="panel")
            yield Static(id="requests", classes="panel")
        yield Footer()

    def on_mount(self) -> None:
        """Begins to listen."""
        self.show()
        self.run_worker(self.listen())

    async def listen(self) -> None:
        """Takes events, and connects again where they end. Until cancelled."""
        while True:
            try:
                async for name, data in events(self._path):
                    self.live.take(name, data)
                    if name == "state":
                        self._speeds.append(panels.tokens_per_s(self.live))
                        self.show()
            except (EdgemoeError, httpx.HTTPError, OSError, ValueError) as error:
                self.show(f"The daemon does not answer; trying again ({error or type(error).__name__})")
            await asyncio.sleep(AGAIN_S)

    def show(self, trouble: str = "") -> None:
        """Draws what is known."""
        live = self.live
        self.query_one("#heading", Static).update(panels.heading(live, trouble))
        self.query_one("#summary", Static).update(panels.summary(live))
        self.query_one("#tiers", Static).update(panels.tiers(live))
        self.query_one("#requests", Static).update(panels.requests(live))
        self.query_one("#speed", Sparkline).data = list(self._speeds)
        cluster, boxes = live.health.get("cluster"), self.query_one("#boxes", Static)
        boxes.display = cluster is not None
        if cluster is not None:
            boxes.update(panels.boxes(live, cluster))


async def events(path: Path) -> AsyncIterator[tuple[str, Json]]:
    """Yields a daemon's events until it ends them. Raises EdgemoeError, httpx.HTTPError."""
    transport = httpx.AsyncHTTPTransport(uds=str(path))
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

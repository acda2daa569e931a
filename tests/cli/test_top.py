"""`edgemoe top`: the screen, by textual's own pilot, of a daemon that answers and of one that has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.front_kit import http_client, running, settings_for, write_model
from support.waiting import until

from edgemoe.cli.top import LiveFigures, TopScreen
from edgemoe.front.main import Front
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named

pytestmark = pytest.mark.asyncio(loop_scope="module")
WIDTH, HEIGHT = 80, 24
MEMBER: dict[str, Any] = {"role": "box", "homes": 12, "to_come": 3, "to_go": 1, "requests": 2, "engine": "boot"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("t")
    async with running(settings_for(folder, write_model(folder / "model"))) as front:
        yield front


def screen(top: TopScreen) -> str:
    """Returns the lines that the terminal shows."""
    lines = top.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in lines)


async def shows(top: TopScreen, *words: str) -> None:
    await until(lambda: all(word in screen(top) for word in words))


async def test_the_screen_shows_a_daemon_that_works(front: Front) -> None:
    top = TopScreen(Path(front.settings.api.socket))
    async with top.run_test(size=(WIDTH, HEIGHT)) as pilot, http_client(front.settings) as http:
        await shows(top, "tiny", "ready", "Nobody asks anything just now.", "2 layers of 8 experts, float32")
        body = {"prompt": "xylophone", "max_tokens": 4000}
        talking = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await shows(top, "answers", "1 running")
        talking.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
            await talking
        assert "xylophone" not in screen(top)
        assert max(map(len, screen(top).splitlines())) <= WIDTH
        await pilot.press("q")
    assert top.return_code == 0


async def test_a_daemon_that_has_gone_is_looked_for_again(tmp_path: Path) -> None:
    folder = tmp_path
    settings = settings_for(folder, write_model(folder / "model"))
    top = TopScreen(Path(settings.api.socket))
    async with top.run_test(size=(WIDTH, HEIGHT)):
        await shows(top, "does not answer")
        async with running(settings):
            await shows(top, "tiny", "ready")
        await shows(top, "does not answer")


async def test_boxes_and_tiers_fit_into_80_columns() -> None:
    top = TopScreen(Path("/nowhere"))
    async with top.run_test(size=(WIDTH, HEIGHT)):
        for name, data in cluster_events():
            top.live.add_event(name, data)
        top.show()
        await shows(top, "kitchen", "this box, leads", "cellar", "gone", "+3 -1", "4.0 ms", "VRAM", "56 of 56", "62.5%")
        await shows(
            top, "plan 7 (rendezvous)", "6 experts on the way", "5 here (room), 2 elsewhere (granted)", "4 of 6 got it"
        )
        assert "…" not in screen(top)


def cluster_events() -> list[tuple[str, dict[str, Any]]]:
    members = [
        MEMBER | {"node": "kitchen", "state": "here", "latency_s": None, "bytes_per_s": None},
        MEMBER | {"node": "cellar", "state": "gone", "latency_s": 0.004, "bytes_per_s": 117e6},
    ]
    health = {"status": "ready", "model": None, "cluster": {"node": "kitchen", "leader": "kitchen", "members": members}}
    health["cluster"]["plan"] = {"version": 7, "epoch": 1, "policy": "rendezvous", "digest": "ab" * 16}
    slots = {f'edgemoe_tier_{what}{{tier="vram"}}': 56.0 for what in ("slots", "experts")}
    went = {named(names.ROUTED, to="here", why="room"): 5.0, named(names.ROUTED, to="elsewhere", why="granted"): 2.0}
    went |= {names.OFFERED: 6.0, names.GRANTED: 4.0}
    hits = ('edgemoe_tier_hits_total{tier="vram"}', 'edgemoe_tier_hits_total{tier="nvme"}')
    request = {"phase": "prefill", "age_s": 3.0, "prompt_tokens": 12_000, "computed": 6000, "emitted": 0}
    return [
        ("hello", {"release": "0"}),
        ("state", {"t": 0.0, "figures": slots | went | dict.fromkeys(hits, 0.0), "health": health}),
        ("state", {"t": 1.0, "figures": dict(zip(hits, (50.0, 30.0), strict=True))}),
        ("box", {"box": "kitchen", "requests": [request]}),
    ]


async def test_rates_and_quantiles_cover_the_time_between_two_states() -> None:
    live = LiveFigures()
    buckets = {f'wait_bucket{{le="{bound}"}}': 5.0 for bound in ("0.1", "1.0", "+Inf")}
    live.add_event("state", {"t": 0.0, "figures": {"x": 10.0, **buckets}, "health": {}})
    assert (live.rate("x", 5.0), live.quantile("wait", 0.5)) == (0.0, None)
    later = {'wait_bucket{le="0.1"}': 6.0, 'wait_bucket{le="1.0"}': 9.0, 'wait_bucket{le="+Inf"}': 9.0}
    live.add_event("state", {"t": 2.0, "figures": {"x": 16.0, **later}})
    assert live.rate("x", 5.0) == 3.0
    assert live.quantile("wait", 0.25) == pytest.approx(0.1)
    assert live.quantile("wait", 1.0) == pytest.approx(1.0)
    live.add_event("hello", {})
    live.add_event("state", {"t": 0.0, "figures": {"x": 1.0}})
    assert (live.rate("x", 5.0), live.get("x")) == (0.0, 1.0)

"""One box prefills requests and another decodes them: real fronts, scripted engines, relays between the boxes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.front_kit import http_client, listed_boxes, running
from support.ports import free_ports
from support.relays import Relays, relays
from support.waiting import until

from edgemoe.cluster.control import control_plane as plane
from edgemoe.cluster.control.messages import ForwardedEmissions
from edgemoe.cluster.control.requests import parcels
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.cluster.rpc.transport import ChannelSettings
from edgemoe.errors import PeerUnavailable
from edgemoe.front import request_state
from edgemoe.front.main import Front
from edgemoe.ipc.messages import PrefixKVFetched, decode_from_engine

pytestmark = [pytest.mark.early, pytest.mark.asyncio(loop_scope="module")]
ROLES = {"p": "prefill", "d": "decode", "e": "decode"}
LONG = "REST@3 " + "go on " * 5_000  # six tokens each
TOKENS = 12
LIMIT = 30_000  # bytes


class Boxes:
    """Box p prefills, d and e decode."""

    def __init__(self, fronts: dict[str, Front], between: Relays) -> None:
        self.fronts, self.between = fronts, between

    def __getitem__(self, node: str) -> Any:
        return self.fronts[node].cluster

    @property
    def moved(self) -> int:
        """Returns the number of requests that were handed over."""
        return sum(self[node]._router.machine.moved for node in ROLES)

    @property
    def left(self) -> list[int]:
        """The numbers of requests, fetches and parcels that have not ended."""
        hosts = [self[node].hosted_requests for node in ROLES]
        held = [self[node].plane.parcels for node in ROLES] + [self[node]._router.machine for node in ROLES]
        return [len(one) for one in hosts] + [len(one._fetches) for one in hosts] + [len(one) for one in held]

    def decoded(self, node: str) -> int:
        """Returns the number of other boxes' requests that ran there."""
        return int(self[node].hosted_requests.served)

    def idle(self, node: str) -> bool:
        """Whether no other box has work to do, as far as that one knows."""
        machine = self[node]._router.machine
        return not any(load.requests for load in machine._loads(machine.surroundings.others()))

    def heard(self) -> list[float]:
        """Returns the last times at which boxes heard each other."""
        return [member.heard_s for node in ROLES for member in self[node].plane.state.members]

    async def ask(self, node: str, prompt: str, seed: int = 1) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "seed": seed}
        async with http_client(self.fronts[node].settings) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Boxes]:
    folder = tmp_path_factory.mktemp("apart")
    pairs = list(itertools.permutations(ROLES, 2))
    ways = dict(zip(pairs, free_ports(len(pairs)), strict=True))
    made = listed_boxes(folder, model_dir, tuple(ROLES), ways, leader="p", route="least")
    async with AsyncExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setenv("SCRIPTED_CONTEXT", "65536")
        still = ChannelSettings(aside=True)  # no heartbeats: a silent connection is not lost
        monkeypatch.setattr(plane, "ChannelSettings", lambda **_: still)
        ends = {one.cluster.node: int(one.cluster.listen.rpartition(":")[2]) for one in made}
        between = await stack.enter_async_context(relays([(port, ends[to]) for (_, to), port in ways.items()]))
        fronts = {}
        for one in made:
            node = one.cluster.node
            cluster = msgspec.structs.replace(one.cluster, role=ROLES[node])
            engine = msgspec.structs.replace(one.engine, prefix_cache=True)
            front = running(msgspec.structs.replace(one, cluster=cluster, engine=engine))
            fronts[node] = await stack.enter_async_context(front)
        all_ = Boxes(fronts, between)
        await until(lambda: all(len(all_[node].requests.others()) == 2 for node in ROLES))
        yield all_
        await until(lambda: not any(all_.left))


async def test_a_prompt_of_thirty_thousand_tokens_is_overtaken_by_beats_and_other_requests(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests p hands over one; d forwards the other and gets it back. Connections stop on the way."""
    for name in ("ASK_S", "PART_S"):
        monkeypatch.setattr(parcels, name, 60.0)
    for node in ("p", "d"):
        said = await boxes.ask(node, LONG)
        fetched, moved = sum(boxes[one].plane.parcels.fetched_bytes for one in ROLES), boxes.moved
        boxes.between.limit(LIMIT)
        long = asyncio.ensure_future(boxes.ask(node, LONG))
        await until(lambda: boxes.between.stopped)
        for _ in range(2):
            before = boxes.heard()
            await until(lambda: all(now > then for now, then in zip(boxes.heard(), before, strict=True)))  # noqa: B023
            await boxes.ask(node, "REST@3 something short")
        assert not long.done()
        assert boxes.moved == moved + 2
        boxes.between.release()
        assert await long == said
        assert boxes.moved == moved + 3
        assert sum(boxes[one].plane.parcels.fetched_bytes for one in ROLES) > fetched + len(LONG)


@pytest.mark.parametrize("fault", ["MISS", "LOSE"])
async def test_blocks_that_one_box_does_not_get_come_to_the_other_one(
    boxes: Boxes, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine of d, the first idle one, reports that the blocks are missing, or does not answer."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(request_state, "FETCH_S", 1.0)
    monkeypatch.setattr(request_state, "ANSWER_S", 1.0)
    await until(lambda: boxes.idle("p"))
    before, moved = boxes.decoded("e"), boxes.moved
    assert len(await boxes.ask("p", f"{fault}{{d}}END REST@3")) == TOKENS
    assert (boxes.moved, boxes.decoded("e")) == (moved + 1, before + 1)
    assert "KV blocks were not fetched" in caplog.text


async def test_an_engine_s_report_of_a_request_is_repeated_until_it_arrives(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unheard(channel: Any, delivers: bool) -> None:
        ask, failed = channel.ask, list[bool]()

        async def lossy(node: str, body: msgspec.Struct, tensors: Any = (), **options: Any) -> Answer[Any]:
            news = isinstance(body, ForwardedEmissions) and isinstance(decode_from_engine(tensors[0]), PrefixKVFetched)
            if not news or failed:
                return await ask(node, body, tensors, **options)  # type: ignore[no-any-return]
            failed.append(True)
            if delivers:
                await ask(node, body, tensors, **options)
            raise PeerUnavailable("no answer came in time")

        monkeypatch.setattr(channel, "ask", lossy)

    for delivers in (False, True):
        moved = boxes.moved
        for node in ("d", "e"):
            unheard(boxes[node].plane.channel, delivers)
        await boxes.ask("p", "REST@3 told again")
        assert boxes.moved == moved + 1
        monkeypatch.undo()


async def test_a_hung_up_client_s_fetches_are_cancelled(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, before its front's next beat."""
    monkeypatch.setattr(request_state.RequestStateMachine, "_on_time", lambda _self: None)
    body = {"model": "tiny", "prompt": "LOSE{de}END REST@3", "max_tokens": 50}
    hosts = [boxes[node].hosted_requests for node in "de"]
    async with http_client(boxes.fronts["p"].settings) as client:
        asked = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(4)]
        await until(lambda: sum(len(host._fetches) for host in hosts) == 4)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: not any(boxes.left))


async def test_an_aborted_forward_leaves_nothing_behind(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client hangs up while its prompt is on its way to the prefilling box."""
    boxes.between.limit(LIMIT)
    served = boxes.decoded("p")
    async with http_client(boxes.fronts["d"].settings) as client:
        body = {"model": "tiny", "prompt": LONG, "max_tokens": 50}
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: boxes.between.stopped)
        asked.cancel()
        await asyncio.wait([asked])
    boxes.between.release()
    await until(lambda: not any(boxes.left))
    assert boxes.decoded("p") - served <= 1
    assert len(await boxes.ask("d", LONG)) == TOKENS

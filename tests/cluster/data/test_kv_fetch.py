"""Two engines with a bulk channel between them: fetching a prompt's KV blocks, and its failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.boxes import Box, running, secret
from support.engine_kit import Drive, Model, plain_model, prompt
from support.states_kit import stateful_model
from support.waiting import until

from edgemoe.cluster.data import kv_fetch, messages
from edgemoe.cluster.data.kv_fetch import CopiedPrefix, KVFetcher, KVFetchServer
from edgemoe.cluster.data.messages import BULK, FetchKV, KVPart
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.errors import PeerRefused
from edgemoe.ipc.messages import FetchPrefixKV, PrefixKVFetched
from edgemoe.types.step import EntryKind
from edgemoe.worker import prefill_decode_transfer as hand_over
from edgemoe.worker.prefill_decode_transfer import PrefixFetches, SharedPrefixes

LENGTH, TOKENS, BLOCKS = 70, 20, 4
PROMPT = prompt(LENGTH, 1)
ALONE = b"for this request"
Spoil = Callable[[FetchKV, Answer[Any]], Answer[Any]]


class EngineBox:
    """An engine on its compute thread, and its end of the bulk channel."""

    def __init__(self, node: str, model: Model, key: Any, keys: dict[str, Any], blocks: int = 64) -> None:
        self.drive = Drive(model=model, blocks=blocks)
        self.prefixes = SharedPrefixes(self.drive.engine, "model")
        self.server = KVFetchServer(self.prefixes)
        self.spoil: Spoil = lambda _asked, answer: answer
        self.box = Box(node, key, keys, self.serve, BULK)
        self.fetcher = KVFetcher(self.box.channel, self.prefixes, 2.0)
        self.said: list[Any] = []
        self.pulls = PrefixFetches(self.drive.engine, self.fetcher, self.said.append)

    async def serve(self, question: Question[Any]) -> Answer[Any]:
        if not isinstance(question.message, FetchKV):
            raise PeerRefused("there are no experts here")
        return self.spoil(question.message, await self.server.serve(question, question.message))

    async def pull(self, node: str, seconds: float = 20.0) -> PrefixKVFetched:
        """Fetches PROMPT's blocks from the node, and returns the engine's message about the result."""
        before = len(self.said)
        message = FetchPrefixKV(
            request="r",
            attempt=1,
            node=node,
            prompt=tuple(PROMPT),
            private_salt=ALONE,
            remaining_ms=seconds * 1e3,
        )
        self.pulls.start(message)
        await until(lambda: len(self.said) > before)
        return self.said[-1]  # type: ignore[no-any-return]

    async def say(self, emitted: list[int], name: str = "r", private_salt: bytes = ALONE) -> list[int]:
        """Generates after PROMPT and these tokens; returns all tokens, once the engine holds no block any more."""
        self.drive.submit(PROMPT, name, emitted=emitted, private_salt=private_salt, max_tokens=TOKENS)
        await until(lambda: any(one.request == name and one.finish for one in list(self.drive.emitted)))
        blocks = self.drive.engine.blocks
        await until(lambda: blocks.free == blocks.count)
        return self.drive.tokens(name)


@asynccontextmanager
async def pair(make: Callable[[], Model] = plain_model, blocks: int = 64) -> AsyncIterator[tuple[EngineBox, EngineBox]]:
    """Runs a prefilling and a decoding box, connected, and checks at the end that no engine has failed."""
    keys = {"p": secret(), "d": secret()}
    p = EngineBox("p", make(), keys["p"], keys)
    d = EngineBox("d", make(), keys["d"], keys, blocks)
    threads = [each.drive.engine.start(1, lambda error: ended.append(error)) for each in (p, d)]
    ended: list[BaseException | None] = []
    async with running(p.box, d.box):
        d.box.channel.connect(p.box.peer)
        await until(lambda: d.box.channel.is_up("p"))
        work = asyncio.create_task(d.pulls.run())
        yield p, d
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        for each in (p, d):
            each.drive.engine.loop.stop()
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
        assert ended == [None, None]
        for each in (p, d):
            each.drive.engine.check_integrity()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("make", [plain_model, stateful_model])
async def test_a_request_prefilled_there_continues_here_with_the_same_tokens(
    make: Callable[[], Model], trusted: bool
) -> None:
    """The blocks serve other requests where the box is trusted."""
    async with pair(make) as (p, d):
        d.pulls.trusted = frozenset("p" if trusted else "")
        whole = await p.say([])
        pulled = await d.pull("p")
        assert (pulled.request, pulled.attempt, pulled.blocks, pulled.why) == ("r", 1, BLOCKS, "")
        assert await d.say(whole[:3]) == whole[3:]
        assert d.drive.engine.scheduler.prefix_tokens["hit"] == 16 * BLOCKS
        assert d.fetcher.blocks == BLOCKS
        assert d.fetcher.bytes == p.server.sent_bytes > 0
        assert (await d.pull("p")).why == ""
        assert d.fetcher.blocks == BLOCKS, "what is here is not fetched again"
        before = d.drive.engine.scheduler.prefix_tokens["hit"]
        assert await d.say([], "another", b"") == whole
        assert (d.drive.engine.scheduler.prefix_tokens["hit"] > before) == trusted


async def test_whole_blocks_come_while_the_rest_is_computed() -> None:
    async with pair() as (p, d):
        gate = threading.Event()
        decoder, steps = p.drive.model.decoder, p.drive.model.decoder.steps
        forward = decoder.forward

        def halting(batch: Any, *others: Any) -> Any:
            if steps:  # the end of the prompt, after a first step of 48 tokens
                gate.wait(60)
            return forward(batch, *others)

        decoder.forward = halting
        p.drive.submit(PROMPT, "r", max_tokens=TOKENS)
        d.pulls.start(FetchPrefixKV(request="r", attempt=1, node="p", prompt=tuple(PROMPT)))
        await until(
            lambda: d.fetcher.blocks == 0 and p.server.sent_bytes >= 3 * p.prefixes.entry_bytes[EntryKind.BLOCK]
        )
        assert not d.said
        gate.set()
        await until(lambda: d.said)
        assert d.said[0].why == ""
        assert d.fetcher.blocks == BLOCKS


def flipped(asked: FetchKV, answer: Answer[Any]) -> Answer[Any]:
    """Answers with one bit flipped in the middle of the blocks, under their old checksum."""
    changed = bytearray(answer.tensors[0])
    changed[len(changed) // 2] ^= 4
    return Answer(answer.message, [memoryview(changed)])


def of_another_key(asked: FetchKV, answer: Answer[Any]) -> Answer[Any]:
    """Answers with the right bytes under another block's key."""
    part = answer.message
    return Answer(KVPart.of(replace_key(asked), part.generation, answer.tensors[0]), answer.tensors)


def replace_key(asked: FetchKV) -> FetchKV:
    return FetchKV(asked.encoding, bytes(16), asked.state, asked.offset, asked.bytes)


def short(asked: FetchKV, answer: Answer[Any]) -> Answer[Any]:
    return Answer(answer.message, [answer.tensors[0][:-1]])


def of_another_generation(asked: FetchKV, answer: Answer[Any]) -> Answer[Any]:
    generation = answer.message.generation + asked.offset
    return Answer(KVPart.of(asked, generation, answer.tensors[0]), answer.tensors)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(flipped, "corrupt"), (of_another_key, "corrupt"), (short, "refused"), (of_another_generation, "stale")],
)
async def test_damaged_blocks_are_found_and_change_no_token(
    spoil: Spoil, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_fetch, "PART_BYTES", 1000)
    monkeypatch.setattr(kv_fetch, "AT_ONCE", 1)
    async with pair() as (p, d):
        whole = await p.say([])
        keys = d.drive.engine.prefixes.keys(PROMPT, b"")
        p.spoil = lambda asked, answer: spoil(asked, answer) if asked.key == keys[1] else answer
        pulled = await d.pull("p")
        assert (pulled.why, pulled.blocks) == (why, 1)
        assert d.fetcher.failures == {why: 1}
        assert await d.say(whole[:2]) == whole[2:]


async def test_missing_blocks_and_missing_room_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_fetch, "STALLED_S", 0.2)
    monkeypatch.setattr(kv_fetch, "WAIT_S", 0.1)
    async with pair(blocks=3) as (p, d):
        d.drive.engine.limits = replace(d.drive.engine.limits, context_tokens=LENGTH)  # more than its blocks hold
        assert (await d.pull("p")).why == "missing"
        await p.say([])
        pulled = await d.pull("p")
        assert (pulled.why, pulled.blocks) == ("full", 3)
        assert d.drive.engine.blocks.free == 3
        assert d.fetcher.failures == {"missing": 1, "full": 1}


async def test_a_pull_that_is_called_off_ends_at_once_and_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "AT_ONCE", 1)
    async with pair() as (p, d):
        for name in ("ends", "waits", "again"):
            d.pulls.start(FetchPrefixKV(request=name, attempt=1, node="p", prompt=tuple(PROMPT)))
        await until(lambda: d.box.channel.waiting() > 0)  # for blocks that are not there yet
        d.pulls.cancel("ends", 2)
        for name in ("waits", "ends"):
            d.pulls.cancel(name, 1)
        whole = await p.say([])
        await until(lambda: d.said)
        assert [(one.request, one.why, one.blocks) for one in d.said] == [("again", "", BLOCKS)]
        assert (d.fetcher.blocks, d.fetcher.failures) == (BLOCKS, {})
        assert await d.say(whole[:3]) == whole[3:]
        assert len(d.said) == 1


async def test_another_encoding_a_late_box_and_a_lost_one_are_told_apart() -> None:
    async with pair() as (p, d):
        whole = await p.say([])
        p.prefixes.encoding = "another"
        assert (await d.pull("p")).why == "refused"
        p.prefixes.encoding = d.prefixes.encoding
        assert (await d.pull("p", 0.0)).why == "late"
        assert (await d.pull("nobody")).why == "lost"
        p.prefixes.has = lambda _key, _state: False  # type: ignore[method-assign]
        p.prefixes.read = lambda _key, _state: None  # type: ignore[method-assign]
        pulling = asyncio.create_task(d.pull("p"))
        await until(lambda: d.box.channel.waiting() > 0)
        d.box.channel.disconnect("p")
        assert (await pulling).why == "lost"
        assert await d.say(whole[:5]) == whole[5:]
        assert d.fetcher.failures == {"refused": 1, "late": 1, "lost": 2}


async def test_parts_outside_of_an_entry_are_refused() -> None:
    async with pair() as (p, d):
        await p.say([])
        await d.pull("p")
        key = d.drive.engine.prefixes.keys(PROMPT, b"")[0]
        size = p.prefixes.entry_bytes[EntryKind.BLOCK]
        for state, offset, count in ((False, size, 1), (False, 0, size + 1), (True, 0, 1), (False, 1 << 59, 4)):
            with pytest.raises(PeerRefused, match="no such part"):
                await d.box.channel.ask("p", FetchKV(p.prefixes.encoding, key, state, offset, count), timeout_s=5)
        asked = FetchKV(p.prefixes.encoding, key, False, 0, size)
        answer = await d.box.channel.ask("p", asked, timeout_s=5)
        entry = p.prefixes.read(key, EntryKind.BLOCK)
        assert isinstance(entry, CopiedPrefix)
        np.testing.assert_array_equal(np.frombuffer(answer.tensors[0], np.uint8), entry.data)
        assert size <= messages.PART_BYTES

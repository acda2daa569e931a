"""Experts as bytes between boxes: the limits of a fetch, and the rejection of damaged bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from edgemoe.cluster.data import expert_fetch as bulk
from edgemoe.cluster.data.expert_client import PeerEstimate
from edgemoe.cluster.data.expert_fetch import ExpertFetchServer, PeerStore
from edgemoe.cluster.data.messages import CHUNK_BYTES, ExpertChunk, ExpertResult, FetchExpert
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import CorruptExpert, MissingExpert, PeerRefused
from edgemoe.types.experts import ExpertGeometry

SEVENS = b"\7" * CHUNK_BYTES
SIZES = ExpertGeometry(layers=2, experts=3, top_k=1, hidden=4, width=4, dtype="bfloat16")


def checksum(view: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(view)


class BulkChannel:
    """The channel to peers. Each needs its stated time for a chunk of an expert, whose bytes are all 7."""

    def __init__(self, **chunk_s: float) -> None:
        self.chunk_s = chunk_s
        self.answered = dict.fromkeys(chunk_s, 0)
        self.size_bytes = 0  # of an expert
        self.checksum = ""  # of it
        self.lies: dict[str, Callable[[FetchExpert, ExpertChunk, bytes], Answer[Any]]] = {}
        self.under_way = self.most_under_way = 0  # bytes

    async def ask(self, node: str, fetch: FetchExpert, *, timeout_s: float) -> Answer[Any]:
        self.under_way += fetch.bytes
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self.chunk_s[node])
        self.under_way -= fetch.bytes
        self.answered[node] += 1
        chunk, part = ExpertChunk(self.checksum), b"\7" * fetch.bytes
        if node in self.lies:
            return self.lies[node](fetch, chunk, part)
        return Answer(chunk, [memoryview(part)])


class EmptyShelf:
    """The store of a box without experts; its manifest may know the expert's checksum."""

    def __init__(self, known: str | None = None) -> None:
        self.known = known
        self.learned: list[str] = []

    def checksum(self, layer: int, expert: int) -> str | None:
        return self.known

    def learn(self, layer: int, expert: int, checksum: str) -> None:
        self.learned.append(checksum)

    def has(self, layer: int, expert: int) -> bool:
        return False


def store_of(channel: BulkChannel, chunks: float, timeout_s: float, shelf: EmptyShelf | None = None) -> PeerStore:
    """Builds a store that fetches experts of this size from the channel's peers, over links that seem fast."""
    peers = {node: PeerEstimate(node, "boot", SIZES) for node in channel.chunk_s}
    for peer in peers.values():
        peer.ready, peer.s_per_byte = True, 1e-12
        peer.ram[:] = True
    channel.size_bytes = int(chunks * CHUNK_BYTES)
    channel.checksum = checksum(b"\7" * channel.size_bytes)
    own: Any = None
    sizes = replace(SIZES, layer_bytes=(channel.size_bytes,) * 2)
    store = PeerStore(own, shelf or EmptyShelf(), checksum, sizes)  # type: ignore[arg-type]
    store.join(channel, lambda: peers, timeout_s)  # type: ignore[arg-type]
    return store


async def test_a_responsive_peer_with_the_expert_in_memory_is_asked_first() -> None:
    channel = BulkChannel(a=0.0, b=0.0, c=0.0, d=0.0, e=0.0)
    store = store_of(channel, 1, 5.0)
    peers = store._peers()
    for silent in ("a", "b"):
        peers[silent].silent = True
    peers["c"].ram[:], peers["c"].disk[:] = False, True
    peers["d"].ready = False
    peers["b"].latency_s = 9.0
    assert [peer.node for peer in store._sources(0, 0)] == ["e", "c", "a", "b"]
    peers["a"].ram[:] = peers["a"].disk[:] = False
    assert [peer.node for peer in store._sources(0, 0)] == ["e", "c", "b"]


async def test_a_source_that_crawls_is_left_for_another_however_many_chunks_an_expert_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk, "LATE_S", 2.0)  # enough for a source that is not stalled, however busy the machine is
    channel, chunks = BulkChannel(b=0.5, c=0.0), 32
    into = memoryview(bytearray(chunks * CHUNK_BYTES))
    await store_of(channel, chunks, timeout_s=10.0).read(0, 0, into)
    assert 0 < channel.answered["b"] < chunks
    assert channel.answered["c"] == chunks
    assert bytes(into) == b"\7" * len(into)


async def test_calls_wait_no_longer_than_milliseconds_for_an_expert_that_yields_to_them() -> None:
    channel, chunks = BulkChannel(b=0.0), 3
    store, into = store_of(channel, chunks, timeout_s=5.0), memoryview(bytearray(chunks * CHUNK_BYTES))
    store._peers()["b"].s_per_byte = 1 / 62.5e6
    await store.read(0, 0, into)
    assert channel.most_under_way == chunks * CHUNK_BYTES
    channel.most_under_way = 0
    store.yields = lambda expert: expert == (0, 1)
    into[:] = bytes(len(into))
    await store.read(0, 1, into)
    assert bytes(into) == b"\7" * len(into)
    assert channel.most_under_way / 62.5e6 == pytest.approx(0.004, rel=0.01)


async def test_a_peer_that_hangs_holds_up_no_fetch_from_another() -> None:
    channel = BulkChannel(b=60.0, c=0.0)
    store = store_of(channel, 1, timeout_s=60.0)
    store._peers()["b"].ram[0], store._peers()["c"].ram[0] = True, False
    store._peers()["b"].ram[1], store._peers()["c"].ram[1] = False, True
    store._peers()["b"].latency_s = 60.0  # so that none is late
    hanging = [
        asyncio.create_task(store.read(0, n % 3, memoryview(bytearray(channel.size_bytes))))
        for n in range(bulk.FETCHES + 1)
    ]
    into = memoryview(bytearray(channel.size_bytes))
    async with asyncio.timeout(10.0):
        while channel.under_way < bulk.FETCHES * channel.size_bytes:
            await asyncio.sleep(0)
        await store.read(1, 0, into)
    assert bytes(into) == b"\7" * len(into)
    assert not any(task.done() for task in hanging)
    for task in hanging:
        task.cancel()
    await asyncio.wait(hanging, timeout=60)


async def test_a_slow_link_brings_all_that_is_under_way_within_a_chunks_time_out() -> None:
    channel, chunks, timeout_s = BulkChannel(b=0.0), 4, 5.0
    store = store_of(channel, chunks, timeout_s)
    store._peers()["b"].s_per_byte = 1 / 1.25e6
    into = [memoryview(bytearray(channel.size_bytes)) for _ in range(2 * bulk.FETCHES)]
    await asyncio.gather(*(store.read(n % 2, n // 3, each) for n, each in enumerate(into)))
    assert all(bytes(each) == b"\7" * len(each) for each in into)
    assert channel.most_under_way / 1.25e6 < timeout_s / 2


async def test_the_only_source_may_take_longer_than_a_time_out_for_all_of_an_expert() -> None:
    channel, chunks = BulkChannel(b=0.1), 32
    await store_of(channel, chunks, timeout_s=0.5).read(0, 0, memoryview(bytearray(chunks * CHUNK_BYTES)))
    assert channel.answered["b"] == chunks


async def test_the_only_source_is_given_up_where_it_crawls_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LEAST_BYTES_PER_S", 1e12)
    channel, chunks = BulkChannel(b=0.2), 64
    with pytest.raises(MissingExpert, match="b did not"):
        await store_of(channel, chunks, timeout_s=0.5).read(0, 0, memoryview(bytearray(chunks * CHUNK_BYTES)))
    assert 0 < channel.answered["b"] < chunks


def damaged(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    """Answers with bytes that do not match the checksum."""
    return Answer(chunk, [memoryview(b"\0" + part[1:])])


def agreeing(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    """Answers with zeros and their checksum."""
    return Answer(ExpertChunk(checksum(bytes(CHUNK_BYTES * 5 // 2))), [memoryview(bytes(fetch.bytes))])


def changing(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    return Answer(ExpertChunk(f"{fetch.offset:032x}"), [memoryview(part)])


def short(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    return Answer(chunk, [memoryview(part[:-1])])


def long(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    return Answer(chunk, [memoryview(part + b"\7")])


def none(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    return Answer(chunk, [])


def two(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    return Answer(chunk, [memoryview(part), memoryview(part)])


def another(fetch: FetchExpert, chunk: ExpertChunk, part: bytes) -> Answer[Any]:
    return Answer(ExpertResult(1.0), [memoryview(part)])


@pytest.mark.parametrize("lie", [damaged, agreeing, changing, short, long, none, two, another])
async def test_a_peer_that_lies_costs_its_own_fetch_and_another_is_asked(lie: Any) -> None:
    channel = BulkChannel(b=0.0, c=0.0)
    channel.lies["b"] = lie
    shelf = EmptyShelf(checksum(b"\7" * (CHUNK_BYTES * 5 // 2)))
    store = store_of(channel, 2.5, 5.0, shelf)
    into = bytearray(channel.size_bytes + 512)  # a slot is padded
    await store.read(0, 0, memoryview(into))
    assert into == b"\7" * channel.size_bytes + bytes(512)
    assert channel.answered["b"] > 0
    assert store.fetched == 1
    assert set(shelf.learned) <= {shelf.known}


@pytest.mark.parametrize("lie", [damaged, agreeing])
async def test_our_own_manifest_decides_an_expert_s_checksum(lie: Any) -> None:
    channel = BulkChannel(b=0.0)
    channel.lies["b"] = lie
    shelf = EmptyShelf(checksum(b"\7" * (CHUNK_BYTES * 5 // 2)))
    store = store_of(channel, 2.5, 5.0, shelf)
    with pytest.raises(MissingExpert, match="its checksum is"):
        await store.read(0, 0, memoryview(bytearray(channel.size_bytes)))
    assert store.refused > 0
    assert store.fetched == 0
    assert shelf.learned == []


@pytest.mark.parametrize("lie", [damaged, changing])
async def test_without_a_known_checksum_all_chunks_must_match_one(lie: Any) -> None:
    channel = BulkChannel(b=0.0, c=0.0)
    channel.lies["b"] = lie
    shelf = EmptyShelf()
    store = store_of(channel, 2.5, 5.0, shelf)
    await store.read(0, 0, memoryview(bytearray(channel.size_bytes)))
    assert store.refused > 0
    assert shelf.learned == [checksum(b"\7" * channel.size_bytes)]


class FullShelf(EmptyShelf):
    """Serves parts of one expert, which lies in a padded slot beside another's."""

    def __init__(self, expert: bytes) -> None:
        super().__init__(checksum(expert))
        self.slab = expert + b"of another"
        self.asked: list[Sequence[int]] = []

    def checksum(self, layer: int, expert: int) -> str | None:
        return self.known if (layer, expert) == (0, 0) else None

    async def part(self, layer: int, expert: int, offset: int, size_bytes: int) -> bytes:
        self.asked.append((offset, size_bytes))
        return self.slab[offset : offset + size_bytes]


def asked(message: object) -> Any:
    return type("Question", (), {"message": message})()


async def test_parts_of_an_expert_are_handed_out_up_to_its_last_byte_and_no_further() -> None:
    assert SIZES.expert_bytes(0) == 96
    shelf = FullShelf(bytes(range(96)))
    server = ExpertFetchServer(shelf, SIZES)
    answer = await server.serve(asked(FetchExpert(0, 0, 86, 10)))
    assert answer.message == ExpertChunk(checksum(bytes(range(96))))
    assert [bytes(part) for part in answer.tensors] == [bytes(range(86, 96))]
    assert server.sent_bytes == 10
    wrong = [
        FetchExpert(0, 0, 86, 11),
        FetchExpert(0, 0, 96, 1),
        FetchExpert(0, 0, 1 << 40, 1),
        FetchExpert(2, 0, 0, 1),
        FetchExpert(0, 3, 0, 1),
    ]
    for fetch in wrong:
        with pytest.raises(PeerRefused, match="no such part"):
            await server.serve(asked(fetch))
    with pytest.raises(PeerRefused, match="not here"):
        await server.serve(asked(FetchExpert(1, 2, 0, 1)))
    with pytest.raises(PeerRefused, match="not a question"):
        await server.serve(asked(ExpertChunk("0" * 32)))
    assert shelf.asked == [(86, 10)]
    assert server.sent_bytes == 10


async def test_a_damaged_expert_of_our_own_disk_comes_from_a_peer_or_is_named_as_damaged() -> None:
    channel = BulkChannel(b=0.0)
    shelf = EmptyShelf(checksum(SEVENS))
    shelf.has = lambda layer, expert: True  # type: ignore[method-assign]
    store = store_of(channel, 1, 5.0, shelf)

    class Damaged:
        async def read(self, layer: int, expert: int, into: memoryview) -> None:
            into[:3] = b"bad"
            raise CorruptExpert("ours", layer, expert, "its checksum is wrong")

    store._own = Damaged()  # type: ignore[assignment]
    into = bytearray(CHUNK_BYTES)
    await store.read(0, 0, memoryview(into))
    assert into == SEVENS
    channel.lies["b"] = damaged
    with pytest.raises(CorruptExpert, match="ours"):
        await store.read(0, 0, memoryview(into))

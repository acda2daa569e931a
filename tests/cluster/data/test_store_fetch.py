"""Pieces of stores over links of all speeds: slow links get small parts, and each arrives in time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from support.virtual import VirtualLoop

from edgemoe.cluster.data.messages import CHUNK_BYTES, FetchPiece, PiecePart
from edgemoe.cluster.data.store_fetch import FIRST_BYTES, PieceChannel, TransferPace
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import PeerUnavailable

LANES, TIMEOUT_S = 2, 10.0
PIECE = bytes(range(256)) * (5 * CHUNK_BYTES // 256) + b"end"


class SharedLink:
    """A channel whose answers come one after the other, at `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.asked: list[int] = []  # bytes
        self.free_s = 0.0  # when all that was asked for has come

    async def ask(self, node: str, asked: FetchPiece, *, timeout_s: float) -> Answer[Any]:
        now = asyncio.get_running_loop().time()
        self.asked.append(asked.bytes)
        self.free_s = max(self.free_s, now) + asked.bytes / self.bytes_per_s
        takes_s = self.free_s - now
        await asyncio.sleep(min(timeout_s, takes_s))
        if takes_s > timeout_s:
            raise PeerUnavailable("b did not answer in time")
        return Answer(PiecePart(len(PIECE)), [memoryview(PIECE)[asked.offset : asked.offset + asked.bytes]])


def channel_over(link: SharedLink, rate: float = 0.0) -> PieceChannel:
    return PieceChannel(link, TransferPace(rate), TIMEOUT_S)  # type: ignore[arg-type]


async def fetch(pieces: PieceChannel) -> None:
    whole = bytearray()
    await pieces.large("b", "0" * 32, len(PIECE), lambda _, part: whole.extend(part))
    assert whole == PIECE


async def lanes(pieces: PieceChannel) -> None:
    """Fetches two pieces one after the other in each of the lanes that a box uses."""

    async def lane() -> None:
        for _ in range(2):
            await fetch(pieces)

    await asyncio.gather(*(lane() for _ in range(LANES)))


def run(work: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    loop.run_until_complete(work)
    loop.close()


@pytest.mark.parametrize("bytes_per_s", [3e4, 1e5, 5e5, 5e6])
@pytest.mark.parametrize("paced", [False, True])
def test_pieces_come_over_a_slow_link_each_part_in_time(bytes_per_s: float, paced: bool) -> None:
    link = SharedLink(bytes_per_s)
    run(lanes(channel_over(link, bytes_per_s / 2 if paced else 0.0)))
    assert sum(link.asked) == 2 * LANES * len(PIECE), "nothing is asked for twice"


def test_parts_over_a_fast_link_are_soon_as_large_as_a_message_may_carry() -> None:
    link = SharedLink(100e6)
    run(lanes(channel_over(link)))
    assert link.asked[0] == FIRST_BYTES
    assert link.asked.count(CHUNK_BYTES) > LANES * (len(PIECE) // CHUNK_BYTES)


def test_a_box_whose_link_has_become_slow_is_asked_for_small_parts_again() -> None:
    link = SharedLink(100e6)
    pieces = channel_over(link)

    async def work() -> None:
        await fetch(pieces)
        link.bytes_per_s = 5e4
        with pytest.raises(PeerUnavailable):
            await fetch(pieces)
        await asyncio.sleep(link.free_s - asyncio.get_running_loop().time())
        link.asked.clear()
        await fetch(pieces)

    run(work())
    assert link.asked[0] == FIRST_BYTES

"""Forwards frames to other boxes' fronts and receives theirs: short ones in the message, long ones as parcels.

A front fetches a long frame in parts over a second connection, so that no beat waits behind a long prompt. Parts come
one after the other, each within PART_S, and must match the checksum in the ForwardedFrame. If anything fails, the
forward fails and both sides forget the frame. MOST_PARCELS bounds the unanswered questions to one box.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from edgemoe.cluster.control.messages import (
    KEY_BYTES,
    PARCEL_PART_BYTES,
    ControlMessage,
    FetchParcel,
    ForwardedFrame,
    ForwardedHttp,
    Parcel,
    ParcelPart,
)
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.errors import PeerBusy, PeerRefused, PeerUnavailable

SHORT_BYTES = 16 << 10  # longest frame that travels in its message: some four thousand tokens
ASK_S = 2.0
SLOWEST_BYTES_PER_S = 500_000  # slowest link on which a parcel arrives in time
PART_S = 2.0
MOST_PARCELS = 16  # under way to one box; further ones wait
MOST_BYTES = 128 << 20  # of parcels that are fetched at once


@dataclass(frozen=True, slots=True)
class WaitingFrame:
    """A frame that waits to be fetched by `node` as long as `wanted` returns true."""

    node: str
    frame: bytes
    wanted: Callable[[], bool]


class RequestParcels:
    """Owns the frames on their way, in both directions."""

    def __init__(self, channel: Channel[ControlMessage], check_room: Callable[[], None]) -> None:
        """Takes `check_room`, which raises PeerBusy if no request is accepted now."""
        self.fetched_bytes = 0
        self._channel, self._check_room = channel, check_room
        self._waiting: dict[bytes, WaitingFrame] = {}
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MOST_PARCELS))  # by box
        self._coming = Counter[str]()  # bytes, by the box that they come from

    def __len__(self) -> int:
        return len(self._waiting)

    async def forward(
        self, node: str, asked: ForwardedFrame | ForwardedHttp, frame: bytes, wanted: Callable[[], bool]
    ) -> None:
        """Forwards a frame; returns once that box's front has accepted it. Raises PeerError."""
        channel = self._channel
        if len(frame) <= SHORT_BYTES:
            await channel.ask(node, asked, [frame], timeout_s=ASK_S)
            return
        loop, turns = asyncio.get_running_loop(), self._turns[node]
        ends_s = loop.time() + ASK_S + len(frame) / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout_at(ends_s):
                await turns.acquire()
        except TimeoutError:
            raise PeerBusy(f"too many long requests are on their way to {node}") from None
        parcel = Parcel.of(secrets.token_bytes(KEY_BYTES), frame)
        self._waiting[parcel.key] = WaitingFrame(node, frame, wanted)
        try:
            await channel.ask(node, structs.replace(asked, parcel=parcel), timeout_s=ends_s - loop.time())
        finally:
            del self._waiting[parcel.key]
            turns.release()

    def serve(self, node: str, asked: FetchParcel) -> Answer[ControlMessage]:
        """Returns a part of a frame for that box. Raises PeerRefused."""
        waiting = self._waiting.get(asked.key)
        if waiting is None or waiting.node != node:
            raise PeerRefused("there is no such parcel for this box, or not any more")
        if not waiting.wanted():
            raise PeerRefused("nobody waits for that request any more")
        if asked.offset + asked.bytes > len(waiting.frame):
            raise PeerRefused("there is no such part of a parcel")
        return Answer(ParcelPart(), [memoryview(waiting.frame)[asked.offset : asked.offset + asked.bytes]])

    async def fetch(self, question: Question[ControlMessage], parcel: Parcel) -> Question[ControlMessage]:
        """Returns the question with the frame that it names as its tensor. Raises PeerError."""
        if isinstance(question.message, ForwardedFrame):
            self._check_room()
        held, free = self._coming[question.peer], MOST_BYTES - self._coming.total()
        if parcel.bytes > free or (held and held + parcel.bytes > free):  # there is always some room for the next box
            raise PeerBusy("too many long requests are on their way here")
        self._coming[question.peer] += parcel.bytes
        try:
            async with asyncio.timeout_at(question.deadline):
                frame = await self._frame(question.peer, parcel)
        except TimeoutError:
            raise PeerUnavailable(f"a parcel of {parcel.bytes} bytes did not come in time") from None
        finally:
            self._coming[question.peer] -= parcel.bytes
        return replace(question, tensors=[memoryview(frame)])

    async def _frame(self, node: str, parcel: Parcel) -> bytearray:
        frame = bytearray(parcel.bytes)
        for offset in range(0, parcel.bytes, PARCEL_PART_BYTES):
            asked = FetchParcel(parcel.key, offset, min(PARCEL_PART_BYTES, parcel.bytes - offset))
            answer = await self._channel.ask(node, asked, timeout_s=PART_S, aside=True)
            if not isinstance(answer.message, ParcelPart) or [part.nbytes for part in answer.tensors] != [asked.bytes]:
                raise PeerRefused(f"{node} answered with something else")
            frame[offset : offset + asked.bytes] = answer.tensors[0]
            self.fetched_bytes += asked.bytes
        if not parcel.is_intact(frame):
            raise PeerRefused(f"a parcel from {node} has another checksum than it should")
        return frame

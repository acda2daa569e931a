"""What the lanes of one process share, and what passes over them: questions, answers, credits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import zmq.asyncio

from edgemoe.cluster.wire.envelope import Envelope
from edgemoe.cluster.wire.keys import Secret
from edgemoe.cluster.wire.zap import AllowList, Authenticator

M = TypeVar("M")


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The answer to a question that was not served: `kind` is "busy" or "refused". Part of every lane's language."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Question(Generic[M]):
    """What a peer asked (or, with envelope.id 0, told) us."""

    peer: str
    boot: str
    envelope: Envelope
    message: M
    tensors: Sequence[memoryview]
    deadline: float  # by the loop's clock


@dataclass(frozen=True, slots=True)
class Answer(Generic[M]):
    message: M
    tensors: Sequence[memoryview] = ()


class Credits:
    """Bytes under way to one peer. A question larger than all credits goes alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._free = limit_bytes
        self._changed = asyncio.Condition()

    async def take(self, size_bytes: int) -> int:
        """Waits until `size_bytes` may be sent; returns what to give back."""
        size_bytes = min(size_bytes, self._limit)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= size_bytes)
            self._free -= size_bytes
        return size_bytes

    async def give(self, size_bytes: int) -> None:
        async with self._changed:
            self._free += size_bytes
            self._changed.notify_all()


class Net:
    """What the lanes of one process share: ZeroMQ's context, our keys, who may speak, our name and incarnation."""

    def __init__(self, node: str, boot: str, secret: Secret, allowed: AllowList) -> None:
        self.node, self.boot, self.secret, self.allowed = node, boot, secret, allowed
        self.context = zmq.asyncio.Context()
        self.authenticator = Authenticator(self.context, allowed)

    async def run(self) -> None:
        """Answers who may connect, until cancelled. Without it no peer gets in."""
        await self.authenticator.run()

    def close(self) -> None:
        """After every lane is closed."""
        self.authenticator.close()
        self.context.term()

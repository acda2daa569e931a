"""What a process and its helper say to each other: frames of a length, four bytes, and so many of msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from edgemoe.types.bounds import Count

MAX_FRAME_BYTES = 64 << 20
LENGTH_BYTES = 4


class Numbered(msgspec.Struct, frozen=True):
    """Carries the number of a question, which its answer repeats."""

    number: Count


Asked = TypeVar("Asked", bound=Numbered)
Answered = TypeVar("Answered", bound=Numbered)


def frame(message: Numbered) -> bytes:
    """Returns the message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body

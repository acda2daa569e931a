"""The helper's side: questions from standard input, answers on standard output."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from edgemoe.helper.frames import LENGTH_BYTES, MAX_FRAME_BYTES, Answered, Asked, frame

IDLE_S = 3600.0


def serve(asked: BinaryIO, answers: BinaryIO, kind: type[Asked], answer: Callable[[Asked], Answered]) -> None:
    """Answers until there is no more to read, or nobody has asked for long.

    Between a question and its answer nothing else comes.
    """
    while select.select([asked], [], [], IDLE_S)[0]:
        length = asked.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return
        size = int.from_bytes(length, "big")
        assert size <= MAX_FRAME_BYTES, "its parent sends no more"
        answers.write(frame(answer(msgspec.msgpack.decode(asked.read(size), type=kind))))
        answers.flush()

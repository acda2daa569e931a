"""The solver's process: reads what is asked from standard input, answers on standard output, ends with its parent.

Its argument is how nice it is, so that it takes what requests leave of the processor. Where nobody has asked for long,
as this box no longer leads, it ends.
"""

from __future__ import annotations

import os
import select
import sys
from typing import BinaryIO

import msgspec
import numpy as np

from edgemoe.cluster.control.planning.fitting import fit
from edgemoe.cluster.control.planning.messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    ClusterAnswer,
    ClusterQuestion,
    PlacementAnswer,
    PlacementQuestion,
    Question,
    QuestionedBox,
    frame,
)
from edgemoe.cluster.control.planning.solving import solve
from edgemoe.cluster.rpc.control_messages import Report
from edgemoe.guard import refuse_pickle
from edgemoe.types.placement import ACTIVITY_UNIT, pack_bits

IDLE_S = 3600.0


def serve(asked: BinaryIO, answers: BinaryIO) -> None:
    """Answers until there is no more to read. Between a question and its answer nothing else comes."""
    while select.select([asked], [], [], IDLE_S)[0]:
        length = asked.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return
        size = int.from_bytes(length, "big")
        assert size <= MAX_FRAME_BYTES, "its parent sends no more"
        answers.write(frame(_answer(msgspec.msgpack.decode(asked.read(size), type=Question))))
        answers.flush()


def _answer(question: Question) -> PlacementAnswer | ClusterAnswer:
    return fit(question) if isinstance(question, ClusterQuestion) else solve(question)


def compile_all() -> None:
    """Has everything compiled, by a small question: Numba unpickles what it keeps of its own while it compiles."""
    layers, experts = 2, 4
    chosen = np.full((layers, experts), ACTIVITY_UNIT // 2, "<u2").tobytes()
    pairs = np.array([[layer, 0, 1, ACTIVITY_UNIT // 4] for layer in range(layers)], "<u2").tobytes()
    everything = pack_bits(np.ones((layers, experts), np.bool_))
    box = QuestionedBox((layers * experts,), everything, everything, everything, Report("", 1.0, chosen, pairs=pairs))
    counts, sizes = (experts,) * layers, (1,) * layers
    solve(PlacementQuestion(0, "rendezvous", layers, experts, counts, sizes, 1, 0.0, (box, box)))


if __name__ == "__main__":
    os.nice(int(sys.argv[1]))
    compile_all()
    refuse_pickle()
    serve(sys.stdin.buffer, sys.stdout.buffer)

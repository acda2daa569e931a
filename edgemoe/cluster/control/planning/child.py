"""The process that solves placements. Its argument is how nice it is, so that it takes what requests leave."""

from __future__ import annotations

import os
import sys

import numpy as np

from edgemoe.cluster.control.planning.messages import PlacementQuestion, QuestionedBox
from edgemoe.cluster.control.planning.solving import solve
from edgemoe.cluster.rpc.control_messages import Report
from edgemoe.guard import refuse_pickle
from edgemoe.helper.serving import serve
from edgemoe.types.placement import ACTIVITY_UNIT, pack_bits


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
    serve(sys.stdin.buffer, sys.stdout.buffer, PlacementQuestion, solve)

"""The process that fits expert clusters. Its argument is how nice it is, so that it takes what requests leave."""

from __future__ import annotations

import os
import sys

from edgemoe.cluster.control.planning.fitting import fit
from edgemoe.cluster.control.planning.messages import ClusterQuestion
from edgemoe.guard import refuse_pickle
from edgemoe.helper.serving import serve

if __name__ == "__main__":
    os.nice(int(sys.argv[1]))
    refuse_pickle()
    serve(sys.stdin.buffer, sys.stdout.buffer, ClusterQuestion, fit)

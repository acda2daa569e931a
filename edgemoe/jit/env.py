"""Names the environment variables of the process that computes.

torch reads them when it is loaded, so the parent process sets them when it spawns that process.
"""

from __future__ import annotations

import os

PROCESSOR = "EDGEMOE_PROCESSOR"  # for development only: names a lesser processor to compile code for


def read_processor() -> str:
    """Returns the name of the processor to compile for; "" for this machine's. Read once, like torch's variables."""
    return os.environ.get(PROCESSOR, "")


# torch's OpenMP threads spin after each parallel region, by default for 300,000 pauses or some 15 ms. That takes the
# cores from the kernels' threads in the next decode step. On a busy box it also makes every region of torch wait for
# the scheduler (measured: 6.8 ms each). With 20,000 pauses the threads spin on between two products of a prompt, and
# sleep soon after the last one. With 2,000 they sleep in between, and a prompt's experts take twice as long.
#
# oneDNN keeps the code and scratch memory of the last 1,024 shapes that it multiplied, about a megabyte each. Prompts
# come in every length, so a busy engine would grow by a gigabyte. Both caches keep 32 shapes instead.
#
# Kernels are compiled also where a user's environment has Numba run Python in place of machine code.
WORKER_ENV = {
    "GOMP_SPINCOUNT": "20000",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
    "NUMBA_DISABLE_JIT": "0",
}

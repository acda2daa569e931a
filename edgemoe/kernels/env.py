"""Environment for the process that computes. Must be set before torch is loaded, so whoever spawns it passes it."""

from __future__ import annotations

# torch's OpenMP threads spin after each region, 300,000 pauses or some 15 ms by default. That takes the core from
# the kernels' threads in the next decode step, and on a busy box it makes every region of torch's wait for the
# scheduler (measured: 6.8 ms each). With 20,000 they outlast the pause between two products of a prompt (2,000 do
# not: its experts take twice as long), and are asleep soon after the last.
#
# oneDNN keeps the code and scratch memory of the last 1,024 shapes that it multiplied, about a megabyte each. Prompts
# come in every length, so that a busy engine would grow by a gigabyte; 32 shapes are kept instead, in either cache.
WORKER_ENV = {"GOMP_SPINCOUNT": "20000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}

"""Environment for the process that computes. Must be set before torch is loaded, so whoever spawns it passes it."""

from __future__ import annotations

# torch's OpenMP threads spin after each region, 300,000 pauses or some 15 ms by default. That takes the core from
# the kernels' threads in the next decode step; on a busy box it also makes every region of torch's wait for the
# scheduler (measured: 6.8 ms a region, against 0.1 with this).
WORKER_ENV = {"GOMP_SPINCOUNT": "2000"}

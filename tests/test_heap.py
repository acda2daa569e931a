"""Freed memory between used blocks, on the C library's own heap."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from edgemoe.heap import give_back

COUNT, BYTES = 1000, 64 << 10


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_free_pages_between_used_ones_return_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [libc.malloc(BYTES) for _ in range(2 * COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BYTES)
    for block in blocks[::2]:
        libc.free(block)
    kept = rss_bytes()
    give_back()
    assert kept - rss_bytes() > COUNT * BYTES / 2
    for block in blocks[1::2]:
        libc.free(block)


COLLECTED = """
import gc
from edgemoe.heap import freeze_objects
rings = [[] for _ in range(100)]
for ring in rings:
    ring.append(ring)
freeze_objects()
rings.clear()
assert gc.collect() < 90
assert gc.get_freeze_count() > 100
gc.unfreeze()
assert gc.collect() > 90
"""


def test_a_collection_skips_objects_from_before_the_freeze() -> None:
    subprocess.run([sys.executable, "-c", COLLECTED], check=True)  # alone: other tests leave objects behind


def test_frozen_objects_end_with_their_process() -> None:
    last = "class Last:\n def __del__(self): print('gone')\nlast = Last()\nlast.own = last\n"
    code = f"from edgemoe.heap import freeze_objects\n{last}freeze_objects()\ndel last"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"gone\n"

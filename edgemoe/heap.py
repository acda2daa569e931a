"""Tunes malloc's retention of freed memory, and the garbage collection. Does nothing to malloc without glibc."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc

from edgemoe.ticking import until_tick

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
GIVE_BACK_S = 30.0  # between two times


def keep_freed(mmap_bytes: int, trim_bytes: int) -> None:
    """Uses one heap for all threads and keeps `trim_bytes` at its end. Blocks of `mmap_bytes` and more lie outside."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(M_TRIM_THRESHOLD, trim_bytes)
        mallopt(M_ARENA_MAX, 1)


def used_bytes() -> int:
    """Returns the bytes in use of malloc's main heap; 0 without glibc."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    ask.restype = MallInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2, mallinfo(3)."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


def freeze_objects() -> None:
    """Excludes all present objects from garbage collections, of which one over an engine takes 0.12 s."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries complain that it outlives them


def give_back() -> None:
    """Returns whole unused pages of malloc's heap to the system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


async def give_back_often() -> None:
    """Calls `give_back` on a thread every GIVE_BACK_S, until cancelled: fragmentation grows over hours."""
    while True:
        await asyncio.sleep(until_tick(GIVE_BACK_S))
        await asyncio.to_thread(give_back)

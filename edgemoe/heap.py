"""What malloc keeps of what was freed, and what the garbage collection passes over.

What is done to malloc does nothing where there is no glibc.
"""

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
    """Has one heap for all threads, which keeps so much at its end; what is as large as `mmap_bytes` is not in it."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(M_TRIM_THRESHOLD, trim_bytes)
        mallopt(M_ARENA_MAX, 1)


def used_bytes() -> int:
    """Returns how many bytes of malloc's main heap are in use; 0 where there is no glibc that can say so."""
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


def settle() -> None:
    """Has garbage collections pass over all that is there: one that looks through an engine stops it for .12 s."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries complain that it outlives them


def give_back() -> None:
    """Returns the whole pages between what is in use to the system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


async def give_back_often() -> None:
    """Gives back again and again, on a thread, until cancelled: fragments of what comes and goes add up over hours."""
    while True:
        await asyncio.sleep(until_tick(GIVE_BACK_S))
        await asyncio.to_thread(give_back)

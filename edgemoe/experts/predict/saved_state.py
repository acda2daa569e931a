"""What the predictor has learned, as a safetensors file. Whatever is in the file, reading it is safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from edgemoe.durable import replace_file
from edgemoe.experts.predict.routing_memory import NONE, RoutingMemory

Arrays = Mapping[str, Any]


def write_state(path: Path, arrays: Arrays) -> None:
    """Whole or not at all, and for the owner only. Raises OSError."""
    replace_file(path, save(dict(arrays)))


def read_state(path: Path) -> Arrays | None:
    """The arrays; None where it is no such file."""
    try:
        arrays: Arrays = load_file(path)
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError):  # of types that NumPy lacks
        return None
    return arrays


def has_memory_for(saved: Arrays, shape: Sequence[int], words: int, slots: int) -> bool:
    """Whether a state has a sound memory of this model's tokens."""
    if any(name not in saved for name in ("shape", "chosen", "before", "written")):
        return False
    before, chosen = saved["before"], saved["chosen"]
    filled = before.size
    return (
        saved["shape"].tolist() == list(shape)
        and before.dtype == chosen.dtype == np.int64
        and chosen.shape == (shape[0], words, filled)
        and filled <= slots
        and (filled == 0 or (before.min() >= NONE and before.max() < filled))
        and saved["written"].shape == (1,)
        and not _beyond(chosen, shape[1])
    )


def has_weights_like(saved: Arrays, learned: Arrays) -> bool:
    """Whether the rest of it is whole and sound: `learned` are arrays like those that it should have."""
    return all(
        name in saved
        and saved[name].shape == ours.shape
        and saved[name].dtype == ours.dtype
        and np.isfinite(saved[name]).all()
        for name, ours in learned.items()
    ) and bool((saved["visits"] > 0).all())


def refill_memory(saved: Arrays, memory: RoutingMemory) -> None:
    """Fills the memory, token by token from the oldest on; that of the file may have been smaller."""
    chosen, before = saved["chosen"].view(np.uint64), saved["before"]
    start = int(saved["written"][0]) % max(1, len(before))
    memory.clear()
    moved = {NONE: NONE}
    for old in [*range(start, len(before)), *range(start)]:
        moved[old] = memory.append(np.ascontiguousarray(chosen[:, :, old]), moved.get(int(before[old]), NONE))


def _beyond(chosen: Any, experts: int) -> bool:
    """Whether bits are set of experts that there are not."""
    used = experts % 64
    return bool(used) and bool((chosen.view(np.uint64)[:, -1] >> np.uint64(used)).any())

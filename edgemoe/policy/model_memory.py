"""Divides the memory of a box among models: chooses the idle models that make room for a requested one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ModelMemory(NamedTuple):
    """Memory that a model takes, or that all models may take."""

    ram_bytes: int
    vram_bytes: int = 0  # of each GPU

    def plus(self, other: ModelMemory) -> ModelMemory:
        """Returns the memory of both."""
        return ModelMemory(self.ram_bytes + other.ram_bytes, self.vram_bytes + other.vram_bytes)

    def holds(self, other: ModelMemory) -> bool:
        """Returns whether `other` fits into this memory."""
        return other.ram_bytes <= self.ram_bytes and other.vram_bytes <= self.vram_bytes


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A model that holds memory. A pinned model holds it also while its engine is started again."""

    name: str
    memory: ModelMemory
    used_s: float  # when a request last used it
    is_unloadable: bool  # it is idle, and not pinned
    is_pinned: bool = False


def total_of(holders: Sequence[MemoryHolder]) -> ModelMemory:
    """Returns the memory that these models hold together."""
    total = ModelMemory(0)
    for holder in holders:
        total = total.plus(holder.memory)
    return total


def models_to_unload(wanted: ModelMemory, room: ModelMemory, holders: Sequence[MemoryHolder]) -> list[str] | None:
    """Returns the models to unload so that `wanted` fits into `room`, the least recently used first.

    Returns None where it does not fit even without all models that can go.
    """
    kept, gone = list(holders), list[MemoryHolder]()
    for holder in sorted((holder for holder in holders if holder.is_unloadable), key=lambda holder: holder.used_s):
        if room.holds(total_of(kept).plus(wanted)):
            break
        kept.remove(holder)
        gone.append(holder)
    if not room.holds(total_of(kept).plus(wanted)):
        return None
    for holder in reversed(list(gone)):  # the more recently used ones stay where the others' memory is enough
        if room.holds(total_of(kept).plus(wanted).plus(holder.memory)):
            kept.append(holder)
            gone.remove(holder)
    return [holder.name for holder in gone]

"""A model's layers divided over boxes: which box holds which, and the work of one step in a stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgemoe.types.step import BLOCK_TOKENS, StateUse

STAGE = re.compile(r"([a-z0-9][a-z0-9-]{0,62}):([0-9]{1,4})-([0-9]{1,4})")


class Stage(NamedTuple):
    """Consecutive layers first:after, and the box that holds their dense weights, keys and values."""

    node: str
    first: int
    after: int

    @property
    def layers(self) -> range:
        return range(self.first, self.after)

    def __str__(self) -> str:
        """Returns the layers in words: "layers 24 to 47"."""
        if self.after == self.first + 1:
            return f"layer {self.first}"
        return f"layers {self.first} to {self.after - 1}"


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Returns the stages in a text like "a:0-23 b:24-47". Raises ValueError where it names no such division."""
    stages: list[Stage] = []
    for part in text.split():
        if (found := STAGE.fullmatch(part)) is None:
            raise ValueError(f"{part!r} is no BOX:FIRST-LAST")
        node, first, after = found[1], int(found[2]), int(found[3]) + 1
        expected = stages[-1].after if stages else 0
        if first != expected:
            raise ValueError(f"{part!r} begins with layer {first}, not {expected}: the ranges follow each other from 0")
        if after <= first:
            raise ValueError(f"{part!r} ends before it begins")
        if node in [stage.node for stage in stages]:
            raise ValueError(f"{node} is named twice: a box holds one range")
        stages.append(Stage(node, first, after))
    if len(stages) == 1:
        raise ValueError("there is one range only: it takes two boxes to divide a model")
    return tuple(stages)


class CacheRoom(NamedTuple):
    """A box's places for keys, values and states. 0: it has no such layers, so that any number does."""

    blocks: int = 0  # of layers that see all tokens
    window_blocks: int = 0  # of layers with windows
    state_slots: int = 0

    @classmethod
    def least(cls, rooms: Iterable[CacheRoom]) -> CacheRoom:
        """Returns the places that all of several boxes have."""
        return cls(*(min(filter(None, counts), default=0) for counts in zip(*rooms, strict=True)))


@dataclass(frozen=True, slots=True)
class StageWork:
    """One step's tokens in a stage: S sequences, T tokens in all, as in `Batch`."""

    hidden: npt.NDArray[np.float32]  # [T, H] the residual before the stage
    query_lens: Sequence[int]  # [S]
    context_lens: Sequence[int]  # [S]
    block_tables: Sequence[Sequence[int]]  # [S][blocks of the context]
    window_tables: Sequence[Sequence[int]]  # [S] likewise; empty where these blocks have the same ids
    states: Sequence[StateUse] = ()  # [S], empty where the model has no states


def blocks_of(context_tokens: int) -> int:
    """Returns the number of blocks that hold a context."""
    return -(-context_tokens // BLOCK_TOKENS)


class StageCaller(Protocol):
    """Computes a stage's layers on the box that holds them. Used on the compute thread."""

    def check(self) -> None:
        """Raises StageUnavailable where the box cannot be asked."""

    def compute(self, work: StageWork) -> npt.NDArray[np.float32]:
        """Returns the residual [T, H] behind the stage. Waits for it. Raises StageUnavailable."""

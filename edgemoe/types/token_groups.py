"""The tokens of a layer-step, grouped by the experts that their gates chose."""

from __future__ import annotations

import functools
from typing import NamedTuple, Self

import numpy as np

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray


class TokenGroups(NamedTuple):
    """The calls of T tokens for k experts each, grouped by expert: expert i has calls `offsets[i]:offsets[i + 1]`."""

    experts: IntArray  # [n]
    offsets: IntArray  # [n + 1]
    calls: IntArray  # [m] the call's place among all, token * k + j
    tokens: IntArray  # [m] its token
    weights: FloatArray  # [m] its routing weight

    @classmethod
    def of(cls, ids: IntArray, weights: FloatArray) -> Self:
        """Returns the group of T tokens' calls for k experts each: `ids` and `weights` [T, k]."""
        tokens, k = ids.shape
        flat = ids.ravel()
        if tokens == 1:  # a token's experts are distinct
            return cls(flat, *_of_one_token(k), weights.ravel())
        order = np.argsort(flat.astype(np.int16), kind="stable")  # by radix, as of int64 it is not
        ordered = flat[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        offsets = np.concatenate((starts, [len(flat)]))
        return cls(ordered[starts], offsets, order, order // k, weights.ravel()[order])

    def only(self, chosen: BoolArray) -> Self:
        """Returns the group of the chosen [n] experts."""
        if len(self.experts) == len(self.calls):  # one call each
            experts, calls = self.experts[chosen], self.calls[chosen]
            return type(self)(
                experts, self.offsets[: len(experts) + 1], calls, self.tokens[chosen], self.weights[chosen]
            )
        counts = np.diff(self.offsets)
        kept = np.repeat(chosen, counts)
        offsets = np.concatenate(([0], np.cumsum(counts[chosen])))
        return type(self)(self.experts[chosen], offsets, self.calls[kept], self.tokens[kept], self.weights[kept])

    def within(self, rows: IntArray) -> Self:
        """Returns the group of some tokens: `rows`, sorted, must be consecutive among the group's tokens."""
        kept = np.flatnonzero((self.tokens >= rows[0]) & (self.tokens <= rows[-1]))
        ends = np.searchsorted(kept, self.offsets)
        used = np.flatnonzero(np.diff(ends))
        offsets = np.append(ends[used], len(kept))
        return type(self)(self.experts[used], offsets, self.calls[kept], self.tokens[kept], self.weights[kept])


@functools.cache
def _of_one_token(k: int) -> tuple[IntArray, IntArray, IntArray]:
    return np.arange(k + 1), np.arange(k), np.zeros(k, np.int64)

"""Divides a tier among size classes: decides which class should give an extent of its slots to which other one.

Source: memcached's slab automover, which gives pages to the class that evicts the youngest items; here ages are ranks.
An expert is worth b = p C / S a byte [Two-Tier, 4.3], and the cost C of a miss grows with its bytes S. So memory is
divided best where all classes evict at one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgemoe.types.arrays import FloatArray

MARGIN = 8  # an exchange must pay for an eighth of a class's slots, and for an extent at least


class ClassShare(NamedTuple):
    """The extents and ranks of one size class in a tier."""

    ranks: FloatArray  # [n] of all its experts
    extents: int
    per_extent: int  # slots
    least: int  # extents that it keeps in any case, or gets before all others
    most: int  # extents that it has a use for


class ExtentExchange(NamedTuple):
    """An extent that should go from one class to another."""

    giver: int
    taker: int
    rank: float  # from which on the giver's experts are worth keeping
    due: bool = False  # the taker has not its least


def exchange(shares: Sequence[ClassShare]) -> ExtentExchange | None:
    """Returns the exchange between classes that gains most; None where none gains.

    A class below its least gets an extent from the class that loses least. The experts that the taker gains must rank
    above those experts that the giver loses, by a margin of their slots. So an exchange is not undone at once.
    """
    givers = [i for i, share in enumerate(shares) if share.extents > share.least]
    takers = [i for i, share in enumerate(shares) if share.extents < share.most]
    if not givers or not takers:
        return None
    ordered = [np.sort(np.nan_to_num(share.ranks, nan=-np.inf))[::-1] for share in shares]
    lost = {i: _most_lost(ordered[i], shares[i]) for i in givers}
    gained = {i: _least_gained(ordered[i], shares[i]) for i in takers}
    giver, taker = min(lost, key=lambda i: lost[i]), max(gained, key=lambda i: gained[i])
    if gained[taker] <= lost[giver]:
        return None
    return ExtentExchange(giver, taker, lost[giver], shares[taker].extents < shares[taker].least)


def _margin(share: ClassShare) -> int:
    return max(share.per_extent, share.extents * share.per_extent // MARGIN)


def _most_lost(ordered: FloatArray, share: ClassShare) -> float:
    """Returns the highest rank that is held by the margin."""
    place = share.extents * share.per_extent - _margin(share)
    return float(ordered[place]) if place < len(ordered) else -np.inf


def _least_gained(ordered: FloatArray, share: ClassShare) -> float:
    """Returns the lowest rank that the margin would hold beyond; the last extent may be partly of use."""
    first = share.extents * share.per_extent
    if share.extents < share.least:
        return np.inf
    return float(ordered[min(first + _margin(share), len(ordered)) - 1]) if first < len(ordered) else -np.inf

"""Extents move to the class with the best use for them, and stay there."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.policy.class_shares import MARGIN, ClassShare, ExtentExchange, exchange
from edgemoe.types.arrays import FloatArray


def ranks(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def share(values: FloatArray, extents: int, per_extent: int = 1, least: int = 1, most: int = 1000) -> ClassShare:
    return ClassShare(values, extents, per_extent, least, min(most, -(-len(values) // per_extent)))


def test_an_extent_goes_to_the_class_whose_next_experts_rank_higher_than_the_others_last() -> None:
    assert exchange([share(ranks(1, 2, 3, 4), 2), share(ranks(5, 6, 7, 8), 2)]) == ExtentExchange(0, 1, 3.0)
    assert exchange([share(ranks(1, 2, 5, 6), 2), share(ranks(3, 4, 7, 8), 2)]) is None


def test_all_of_an_extent_must_rank_above_all_that_makes_room_for_it() -> None:
    many = ranks(10, 9, 4, 2)  # four slots an extent; one class has 10, 9, 4 and 2
    assert exchange([share(ranks(8, 3), 2), share(many, 0, per_extent=4, least=0)]) is None
    assert exchange([share(ranks(8, 1), 2), share(many, 0, per_extent=4, least=0)]) == ExtentExchange(0, 1, 1.0)


def test_a_class_keeps_its_least_and_takes_no_more_than_it_has_a_use_for() -> None:
    low, high = ranks(1, 1, 1), ranks(9, 9, 9)
    assert exchange([share(low, 1), share(high, 1)]) is None
    assert exchange([share(low, 2, least=2), share(high, 1)]) is None
    assert exchange([share(low, 3), share(high, 1, most=1)]) is None
    assert exchange([share(low, 3), share(high, 3)]) is None
    assert exchange([share(low, 3), share(high, 2)]) == ExtentExchange(0, 1, 1.0)


def test_a_class_below_its_minimum_takes_an_extent_from_the_class_that_loses_least() -> None:
    few = share(ranks(1, 1, 1), 1, least=2)
    assert exchange([few, share(ranks(9, 8, 7), 3), share(ranks(9, 9, 8), 3)]) == ExtentExchange(1, 0, 7.0, due=True)
    assert exchange([few, share(ranks(9, 8, 7), 3, least=3)]) is None


def test_experts_without_a_rank_go_first() -> None:
    assert exchange([share(ranks(5, np.nan), 2), share(ranks(3, 2), 1)]) == ExtentExchange(0, 1, float("-inf"))


@pytest.mark.parametrize("seed", range(60))
def test_exchanges_end_where_density_says_and_are_never_undone(seed: int) -> None:
    """Equal densities are equal ranks: in the end no class holds many experts that rank below another's missing
    ones.
    """
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 5))
    per = rng.integers(1, 9, classes).tolist()
    values = [rng.normal(rng.normal(), 1, int(rng.integers(40, 200))).astype(np.float32) for _ in range(classes)]
    extents = rng.integers(1, 12, classes).tolist()
    total, moves = sum(extents), set[tuple[int, int]]()
    while True:
        shares = [share(each, n, p) for each, n, p in zip(values, extents, per, strict=True)]
        if (found := exchange(shares)) is None:
            break
        assert (found.taker, found.giver) not in moves
        moves.add((found.giver, found.taker))
        extents[found.giver] -= 1
        extents[found.taker] += 1
        assert sum(extents) == total
    for i, j in ((i, j) for i in range(classes) for j in range(classes) if i != j and extents[i] > 1):
        mine, theirs = np.sort(values[i])[::-1], np.sort(values[j])[::-1]
        lost = mine[extents[i] * per[i] - max(per[i], extents[i] * per[i] // MARGIN) :][:1]
        first = extents[j] * per[j]
        gained = theirs[first : first + max(per[j], first // MARGIN)]
        assert not len(gained) or (len(lost) and lost[0] >= gained[-1])

"""A ledger tells whether prefetches are right, from what is needed first, carried out or not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from edgemoe.policy.movement import GOOD_SHARE, TRIAL, WATCHED, Ledger

N = 200


def settle(ledger: Ledger, outcomes: list[str]) -> None:
    """Each prefetch (even keys) and its rival (odd keys), one of which is needed in the step after."""
    last: npt.NDArray[np.int64] = np.full(N, -1)
    for step, outcome in enumerate(outcomes):
        prefetch_request = 2 * (step % (N // 2))
        ledger.watch(prefetch_request, prefetch_request + 1, step)
        if outcome in ("good", "both"):
            last[prefetch_request] = step + 1
        if outcome in ("bad", "both"):
            last[prefetch_request + 1] = step + 1
        ledger.settle(last)


def test_prefetches_are_not_trusted_before_they_have_been_tried() -> None:
    ledger = Ledger()
    settle(ledger, ["good"] * (int(TRIAL) - 1))
    assert not ledger.trusted
    settle(ledger, ["good"] * 20)
    assert ledger.trusted
    assert ledger.share == pytest.approx(1.0)


@pytest.mark.parametrize(("pattern", "trusted"), [("good good bad", True), ("good bad bad", False), ("both", False)])
def test_it_takes_more_good_ones_than_bad_ones(pattern: str, trusted: bool) -> None:
    ledger = Ledger()
    settle(ledger, pattern.split() * 60)
    assert ledger.trusted is trusted
    assert (ledger.share >= GOOD_SHARE) is trusted


def test_trust_is_lost_and_found_again() -> None:
    ledger = Ledger()
    for good, trusted in ((True, True), (False, False), (True, True)):
        settle(ledger, ["good" if good else "bad"] * 300)
        assert ledger.trusted is trusted


def test_a_need_in_the_step_of_the_prefetch_does_not_count_and_nothing_is_counted_twice() -> None:
    ledger, last = Ledger(), np.full(N, -1)
    last[0] = 7
    ledger.watch(0, 1, 7)
    ledger.settle(last)
    assert ledger.outcomes == 0
    last[0] = 9
    ledger.settle(last)
    ledger.settle(last)
    assert (ledger.outcomes, ledger.good) == (1, 1)


def test_what_is_watched_is_bounded_and_watched_once() -> None:
    ledger, last = Ledger(), np.full(N, -1)
    for _ in range(3):
        ledger.watch(0, 1, 0)
    last[0] = 5
    ledger.settle(last)
    assert ledger.outcomes == 1
    for prefetch_request in range(0, 2 * WATCHED + 40, 2):  # the first twenty are pushed out
        ledger.watch(prefetch_request % N, prefetch_request % N + 1, 10)
    last[:] = 11
    ledger.settle(last)
    assert ledger.outcomes == pytest.approx(sum(0.99**i for i in range(WATCHED + 1)), rel=1e-6)

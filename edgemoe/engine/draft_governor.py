"""Decides how many drafted tokens a step checks: as many as are worth the experts that they add.

A drafted token costs a further row and the distinct experts that it adds to the step, at their measured price on this
box's tiers. It gains a token if it is accepted. docs/design/drafts.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MEMORY = 0.98  # weight of the past at each new step
MARGIN = 1.02  # least gain in tokens per second for which a step drafts
LOSS = 0.004  # share of the decoding time that drafts may have lost in all
FIRST_LOSS_STEPS = 2.0  # mean steps that they may lose before that
MOST_GAIN = 0.01  # share of the decoding time that past gains count for: later losses are noticed soon
TRIAL_STEPS = 32  # drafts that are turned down between two trials
FIRST_DRAFTS, LIKELY, MOST_TRIED = 12, 0.4, 4  # steps that try likely tokens at first, their least chance, their number
RARELY = 4  # steps without drafts, of which one is fitted
PAUSES = (8, 1), (64, 4)  # steps since the latest draft up to which each step looks for another, or each fourth
LONGEST_PAUSE = 8  # steps between two looks later
KNOWN_STEPS = 32  # before which all steps are fitted
MATCHES = (2, 3, 4, 6, 9, 17)  # least tokens of each class of matches
FIRST_CHANCES = (0.3, 0.45, 0.55, 0.65, 0.75, 0.85)  # of acceptance by class of match, until measured
PLACES = 4  # of tokens in a draft that are told apart: the first ones, and all others
PRIOR_TOKENS, REQUEST_TOKENS = 4.0, 3.0  # drafted tokens for which the first guess, and all requests' mean, count
ADDED = 0.8  # share of a token's experts that a drafted one adds, until measured
REFIT_STEPS = 8  # between two fits
FIT_STEPS = 2.0  # steps for which the guess counts of how a step's duration splits


class AcceptanceCounts:
    """Counts drafted tokens and accepted ones by the class of match and the place in the draft."""

    def __init__(self, overall: AcceptanceCounts | None = None) -> None:
        """Counts one request's tokens, and adds them to `overall`, the counts of all requests, if given."""
        self._overall = overall
        shape, prior = (len(MATCHES), PLACES), 0.0 if overall else PRIOR_TOKENS
        self._tried: Floats = np.full(shape, prior)
        self._accepted: Floats = self._tried * np.array(FIRST_CHANCES)[:, None]

    def chances(self, match: int, count: int) -> Floats:
        """Returns the chance that each of `count` drafted tokens is accepted with all before it, [count]."""
        chances = self._chances(match)
        return np.asarray(np.cumprod(chances[np.minimum(np.arange(count), PLACES - 1)]))

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Adds a draft of which the first `accepted` tokens were right; the first wrong one ended it."""
        at = _match_class(match)
        self._tried[at] *= MEMORY
        self._accepted[at] *= MEMORY
        for place in range(min(drafted, accepted + 1)):
            self._tried[at, min(place, PLACES - 1)] += 1.0
            self._accepted[at, min(place, PLACES - 1)] += place < accepted
        if self._overall is not None:
            self._overall.observe(match, drafted, accepted)

    def _chances(self, match: int) -> Floats:
        at = _match_class(match)
        if self._overall is None:
            return np.asarray(self._accepted[at] / np.maximum(self._tried[at], 1e-9))
        mean = self._overall._chances(match)
        return np.asarray((self._accepted[at] + REQUEST_TOKENS * mean) / (self._tried[at] + REQUEST_TOKENS))


def _match_class(match: int) -> int:
    return max(0, int(np.searchsorted(MATCHES, match, side="right")) - 1)


class DraftedStep(NamedTuple):
    """A step that only decoded: its size, duration and distinct experts, summed over layers."""

    rows: int  # with drafted tokens
    drafted: int
    accepted: int
    experts: int
    sure_experts: int  # of the rows that were not drafted
    step_s: float
    stall_s: float  # part of step_s that was spent waiting for experts


class StepCosts:
    """Fits the duration of decoding steps to rows and distinct experts: t = a + b rows + c experts."""

    def __init__(self) -> None:
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._sums = np.zeros(6)  # of 1, rows, experts, seconds, seconds of stall, experts of sure rows
        self._added = np.array([0.0, 0.0])  # experts that drafted rows added, and those rows' share
        self._fit: Floats | None = None
        self._unfitted = 0  # steps since the last fit

    def observe(self, step: DraftedStep, sure: int) -> None:
        """Adds a step with `sure` rows that were not drafted."""
        row = np.array([1.0, step.rows, step.experts])
        self._squares = MEMORY * self._squares + np.outer(row, row)
        self._products = MEMORY * self._products + row * step.step_s
        per_row = step.sure_experts / sure
        self._sums = MEMORY * self._sums + np.array([*row, step.step_s, step.stall_s, per_row])
        if step.drafted and per_row:
            added = (step.experts - step.sure_experts) / per_row
            self._added = MEMORY * self._added + np.array([added, step.drafted])
        self._unfitted += 1
        if self._unfitted >= REFIT_STEPS or self._sums[0] < REFIT_STEPS:
            self._fit = None

    @property
    def coefficients(self) -> Floats:
        """Returns a, b and c, none below 0. Where steps do not tell them apart, a guess from the stall does."""
        if self._fit is None:
            self._unfitted = 0
            count, rows, experts, seconds, stall_s, _ = self._sums
            busy_s = max(0.0, seconds - stall_s)
            guess = np.array([0.35 * busy_s, 0.15 * busy_s, 0.5 * busy_s + stall_s]) / (count, rows, experts)
            scale = np.square(np.array([count, rows, experts]) / count) * FIT_STEPS
            free = np.ones(3, np.bool_)
            fit: Floats = np.zeros(3)
            while free.any():  # a negative coefficient becomes 0
                squares = self._squares[np.ix_(free, free)] + np.diag(scale[free])
                fit[free] = np.linalg.solve(squares, self._products[free] + scale[free] * guess[free])
                if (fit >= 0.0).all():
                    break
                free &= fit > 0.0
                fit[~free] = 0.0
            self._fit = fit
        return self._fit

    @property
    def expert_s(self) -> float:
        """Returns the seconds of one more distinct expert, as the tiers that had to supply them took on average."""
        return float(self.coefficients[2])

    def added_experts(self, drafted: int) -> float:
        """Returns how many distinct experts, summed over layers, as many drafted tokens add to a step."""
        count, *_, per_row = self._sums
        added, rows = self._added
        share = (added + FIT_STEPS * ADDED) / (rows + FIT_STEPS)
        return float(share * drafted * per_row / count)

    def step_s(self, rows: int, experts: float) -> float:
        """Returns the expected duration of a step."""
        a, b, c = map(float, self.coefficients)
        return a + b * rows + c * experts

    def sure_step_s(self, sure: int) -> float:
        """Returns the expected duration of a step of `sure` rows without drafts."""
        count, *_, per_row = self._sums
        return self.step_s(sure, per_row / count * sure)

    @property
    def is_known(self) -> bool:
        return bool(self._sums[0] > 0.0)


class DraftGovernor:
    """Chooses lengths of drafts. Past losses are bounded by a share of the decoding time."""

    def __init__(self) -> None:
        self.costs, self.acceptance = StepCosts(), AcceptanceCounts()
        self.balance_s = 0.0  # that drafts have saved, or lost where negative
        self.decode_s = 0.0  # of steps that only decoded
        self.expert_s = 0.0  # of one more distinct expert, as of the last draft that was considered
        self._steps = self._drafted = self._turned_down = self._asked = 0
        self._quiet = 0  # steps since the latest one with drafts

    def is_asked(self) -> bool:
        """Returns whether the next step should look for drafts. Looking takes time even where it finds none."""
        self._asked += 1
        self._quiet += 1
        pause = next((pause for steps, pause in PAUSES if self._quiet <= steps), LONGEST_PAUSE)
        return self._asked % pause == 0

    def lengths(self, chances: Row[Floats], sure: int, room: int) -> list[int]:
        """Returns how many tokens of each draft a step checks, that has `sure` other rows and room for `room` drafted.

        `chances` has the chance of each token of a draft to be accepted with all before it.
        """
        nothing = [0] * len(chances)
        offers = sorted(
            ((-float(chance), at) for at, each in enumerate(chances) for chance in each),
        )[:room]  # chances fall within a draft, so that each prefix of these holds prefixes of drafts
        if not offers or not self.costs.is_known or not self._may_lose(1.0):
            return nothing
        plain_s, gain, best, taken = self.costs.sure_step_s(sure), 0.0, sure * MARGIN, 0
        row_s, self.expert_s = float(self.costs.coefficients[1]), self.costs.expert_s
        for count, (chance, _) in enumerate(offers, start=1):
            gain -= chance
            longer = 1.0 + (row_s * count + self.expert_s * self.costs.added_experts(count)) / max(plain_s, 1e-9)
            if (sure + gain) / longer > best:
                best, taken = (sure + gain) / longer, count
        if not taken:
            self._turned_down += 1
            likely = sum(-chance >= LIKELY for chance, _ in offers)
            is_new = self._drafted < FIRST_DRAFTS and likely > 0
            if not (is_new or self._turned_down >= TRIAL_STEPS) or not self._may_lose(0.5):
                return nothing
            taken = max(1, min(likely, MOST_TRIED))
        self._turned_down = self._quiet = 0
        self._drafted += 1
        for _, at in offers[:taken]:
            nothing[at] += 1
        return nothing

    def observe(self, step: DraftedStep) -> None:
        """Adds a step that only decoded."""
        sure = step.rows - step.drafted
        self.decode_s += step.step_s
        self._steps += 1
        if not step.drafted and self._steps > KNOWN_STEPS and self._steps % RARELY:
            return  # steps without drafts are much alike
        if step.drafted and self.costs.is_known:
            plain_s = self.costs.step_s(sure, step.sure_experts)
            self.balance_s += step.accepted * plain_s / sure - (step.step_s - plain_s)
            self.balance_s = min(self.balance_s, MOST_GAIN * self.decode_s)
        self.costs.observe(step, sure)

    def _may_lose(self, share: float) -> bool:
        first_s = FIRST_LOSS_STEPS * self.decode_s / max(1, self._steps)
        return self.balance_s > -share * max(LOSS * self.decode_s, first_s)

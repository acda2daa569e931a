"""Decides whether a layer-step asks other boxes, by the times of layer-steps with and without their help.

Predictions leave out how boxes slow each other down. So the predicted seconds of each kind of plan are multiplied by

    ratio = seconds taken / seconds predicted,  both as decayed means of plans of that kind.               (1)
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.resolve import CostMatrix

TRY_SHARE = 0.01
RECENT = 1 / 16  # weight of a layer-step directly after another one of its kind
FADE_S = 10.0  # of layer-steps of the other kind, in which knowledge of a kind loses half its weight
MOST_SAVED_S = 1.0
MOST_RATIO = 32.0  # that one layer-step counts as: a peer that does not answer says nothing about the others
ALONE, HELPED = range(2)


class HelpChoice:
    """Chooses between a plan of this box alone and one with peers. One thread.

    The plan with fewer corrected seconds is used. The other one is tried when the expected loss is at most TRY_SHARE of
    the time of all layer-steps, less the losses of earlier tries. So the ratios stay fresh.
    """

    def __init__(self) -> None:
        self.used = [0, 0]  # plans of each kind
        self._seconds: CostMatrix = np.ones((2, 2))  # [kind, predicted or taken]
        self._ended_s = [0.0, 0.0]  # the last layer-step of each kind, by the time of all
        self._all_s = self._saved_s = 0.0
        self._tried: float | None = None  # expected seconds of the plan that was not used, to try the other
        self._alone_s = self._taken_s = 0.0  # of layer-steps with help, expected alone and taken

    @property
    def ratios(self) -> CostMatrix:
        """Returns (1) for each kind [2]."""
        return self._seconds[:, 1] / self._seconds[:, 0]

    @property
    def gain(self) -> float:
        """Returns how many times as long recent layer-steps with help would have taken alone; 1 if there is none."""
        return self._alone_s / self._taken_s if self._taken_s else 1.0

    def choose(self, alone_s: float, helped_s: float) -> int:
        """Returns the kind to use, by the predicted seconds of both."""
        expected = self.ratios * (alone_s, helped_s)
        best = int(expected.argmin())
        tries = float(expected[1 - best] - expected[best]) <= self._saved_s
        self._tried = float(expected[best]) if tries else None
        return 1 - best if tries else best

    def observe(self, kind: int, alone_s: float | None, predicted_s: float, taken_s: float) -> None:
        """Adds a layer-step of one kind; `alone_s` is the prediction for this box alone, if it could have done it."""
        if not self.used[kind]:
            self._seconds[kind] = predicted_s
        self.used[kind] += 1
        counted_s = min(taken_s, MOST_RATIO * predicted_s)
        known = (1 - RECENT) * 0.5 ** ((self._all_s - self._ended_s[kind]) / FADE_S)
        self._seconds[kind] += max(1 - known, 1 / (1 + self.used[kind])) * (
            (predicted_s, counted_s) - self._seconds[kind]
        )
        self._all_s += taken_s
        self._ended_s[kind] = self._all_s
        self._saved_s = min(MOST_SAVED_S, self._saved_s + TRY_SHARE * taken_s)
        if self._tried is not None:
            self._saved_s -= max(0.0, taken_s - self._tried)
            self._tried = None
        if kind == HELPED and alone_s is not None:
            self._alone_s += RECENT * (alone_s * float(self.ratios[ALONE]) - self._alone_s)
            self._taken_s += RECENT * (taken_s - self._taken_s)

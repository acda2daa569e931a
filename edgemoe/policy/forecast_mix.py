"""Fuses several forecasts of the chosen experts into one, each with the weight that its record has earned.

Source: [Two-Tier, 4.1], p = (1 - eta) EWMA + eta SG. The source sets eta by hand; here each horizon has the eta with
the least log-loss on recent outcomes. A third forecast, the next layer's own gate, is mixed in the same way. Scores
that are no probabilities become probabilities by calibration.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import BoolArray, FloatArray

ETAS = np.linspace(0, 1, 21)
DECAY = 0.995  # of the record, per outcome
FLOOR = 1e-4  # no forecast counts as more certain than this
BINS = 10  # of the reliability curve
PRIOR, SMALL = 8.0, 1e-3  # outcomes that each bin of a calibration starts with; keeps the share of an empty bin defined


class ForecastMix:
    """A mix of two forecasts for each of several horizons, which learns eta from outcomes."""

    def __init__(self, horizons: int) -> None:
        self.loss = np.zeros((horizons, len(ETAS)))  # decayed sum of each eta's log-loss
        self.forecast = np.zeros((horizons, BINS))  # decayed sums: of forecasts in each bin,
        self.came = np.zeros((horizons, BINS))  # of outcomes that came true,
        self.n = np.zeros((horizons, BINS))  # and of all

    def eta(self, horizon: int, trust: float = 1.0) -> float:
        """Returns the weight of the second forecast, multiplied by its owner's `trust` from 0 to 1."""
        return float(ETAS[np.argmin(self.loss[horizon])]) * trust if self.loss[horizon].any() else 0.0

    def fuse(self, first: FloatArray, second: FloatArray | None, horizon: int, trust: float = 1.0) -> FloatArray:
        """Returns (1 - eta) first + eta second; `first` alone where there is no second."""
        if second is None:
            return first
        eta = np.float32(self.eta(horizon, trust))
        fused: FloatArray = (1 - eta) * first + eta * second
        return fused

    def learn(self, first: FloatArray, second: FloatArray, came: BoolArray, horizon: int) -> None:
        """Learns from the outcomes `came` of two forecasts, all of one shape."""
        a, b, true = (np.asarray(x, np.float64).ravel() for x in (first, second, came))
        mixed = np.clip((1 - ETAS[:, None]) * a + ETAS[:, None] * b, FLOOR, 1 - FLOOR)
        loss = -(true * np.log(mixed) + (1 - true) * np.log1p(-mixed)).mean(axis=1)
        self._watch(mixed[np.argmin(self.loss[horizon])], true, horizon)
        self.loss[horizon] = DECAY * self.loss[horizon] + loss

    def reliability(self, horizon: int) -> npt.NDArray[np.float64]:
        """Returns the mean forecast and the share that came true of each bin with outcomes, [bins, 2]."""
        some = self.n[horizon] > 0
        sums = np.stack([self.forecast[horizon], self.came[horizon]], axis=1)[some]
        means: npt.NDArray[np.float64] = sums / self.n[horizon][some, None]
        return means

    def _watch(self, p: npt.NDArray[np.float64], true: npt.NDArray[np.float64], horizon: int) -> None:
        bins = np.minimum((p * BINS).astype(np.int64), BINS - 1)
        for sums, values in ((self.forecast, p), (self.came, true), (self.n, np.ones_like(p))):
            sums[horizon] = DECAY * sums[horizon] + np.bincount(bins, values, BINS)


class Calibration:
    """The recent share of outcomes that came true, by score, linear between bins."""

    def __init__(self, low: float, high: float, bins: int, slope: float = 1.0) -> None:
        """Starts as the logistic function of `slope` * score."""
        self.centres = np.linspace(low, high, bins)
        self._came = PRIOR / (1 + np.exp(-slope * self.centres))
        self._n = np.full(bins, PRIOR)
        self.share = self._came / self._n
        self._per_bin = (bins - 1) / (high - low)

    @property
    def record(self) -> npt.NDArray[np.float64]:
        """Decayed outcomes by score: how many, and how many that came true, [2, bins]."""
        return np.stack([self._n, self._came])

    def restore(self, record: npt.NDArray[np.float64]) -> None:
        """Goes on from another one's record."""
        self._n, self._came = record.copy()
        self.share = (self._came + SMALL) / (self._n + 2 * SMALL)

    def __call__(self, score: FloatArray) -> FloatArray:
        """Returns the probability that each score comes true, of the shape of `score`."""
        p: FloatArray = np.interp(score, self.centres, self.share).astype(np.float32)
        return p

    def learn(self, score: FloatArray, came: BoolArray) -> None:
        """Learns from the outcomes `came` of scores; replaces `share`, so that other threads may read it."""
        places = np.rint((score.ravel() - self.centres[0]) * self._per_bin).astype(np.int64)
        places = np.clip(places, 0, len(self.centres) - 1)
        self._n = DECAY * self._n + np.bincount(places, minlength=len(self._n))
        self._came = DECAY * self._came + np.bincount(places, came.ravel(), len(self._n))
        self.share = (self._came + SMALL) / (self._n + 2 * SMALL)

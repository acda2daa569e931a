"""What else is forecast, blended into the predictor's worths.

Source: [Two-Tier, 4.1], fusion. The predictor tells each expert's worth v0, decay^steps to its next need; ScoutGate
and the next layer's own gate tell the chance of a need at once. By calibration v0 stands for such a chance p0 as well;
what v0 is worth beyond it, w = (v0 - p0) / (1 - p0), is kept, and the chance is replaced by the fused one:

    p = (1 - eta) p0 + eta q,    v = p + (1 - p) w

Without a forecast, or with eta = 0, this is v0. Eta is learned for each horizon: this step at so many looks of the
predictor, the next step, and the layer that comes next as its own gate sees it.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
from numba import njit

from edgemoe.experts.predict.next_use import LOOKS, NextUsePredictor
from edgemoe.policy.fusion import Calibration, Mix
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

LOW, HIGH, BINS = -8.0, 8.0, 33  # of log odds
NEXT_STEP, NEXT_LAYER = LOOKS, LOOKS + 1  # horizons after those of this step
HORIZONS = LOOKS + 2
SAMPLE = 96  # experts learned from in a step
SURE = np.float32(1e-5)  # no worth is nearer to 0 or 1


class ExpertForecast(Protocol):
    """P(some sequence of the batch needs the expert): `probs` [horizons, L, E], this step's and the next one's."""

    @property
    def step(self) -> int:
        """The step that it was made for."""

    @property
    def probs(self) -> FloatArray: ...


class Forecaster(Protocol):
    """Whoever makes them: ScoutGate."""

    @property
    def forecast(self) -> ExpertForecast | None:
        """The latest."""

    @property
    def trust(self) -> float:
        """1 while forecasts are as good as was promised, down to 0."""


class Said(NamedTuple):
    """Two forecasts of some experts [n], until it is known what came."""

    horizon: int
    keys: IntArray  # layer * E + expert
    odds: FloatArray  # log odds of the worth
    chance: FloatArray  # by whoever else forecasts


class Blend:
    """Owns calibrations, mixing weights, and the forecasts whose outcome is awaited. On the controller's thread."""

    def __init__(self, predictor: NextUsePredictor, seed: int = 0) -> None:
        self.mix = Mix(HORIZONS)
        self.calibrations = [Calibration(LOW, HIGH, BINS) for _ in range(HORIZONS)]
        self._predictor, self._random = predictor, np.random.default_rng(seed)
        self._said: list[Said] = []  # in this step
        self._before: list[Said] = []  # in the last one, of this one
        self._gate_eta = 0.0  # of NEXT_LAYER
        self._shares = np.stack([calibration.share for calibration in self.calibrations]).astype(np.float32)

    def ranks(self, out: FloatArray, forecast: ExpertForecast | None, trust: float, first: int, last: int) -> None:
        """Ranks of layers `first` to `last`: log odds of the worth, and the layer's place in the round."""
        predictor, now = self._predictor, self._horizon
        etas = self.mix.eta(now, trust), self.mix.eta(NEXT_STEP, trust)
        if forecast is None or len(forecast.probs) < 2 or not any(etas):
            out[first:last] = predictor.scores[first:last]
            return
        shares = self._shares[now], self._shares[NEXT_STEP]
        _blend(out, predictor.scores, predictor.phase, forecast.probs, predictor.done, first, last, *shares, *etas)

    def listen(self, forecast: ExpertForecast) -> None:
        """Notes what is said now of some experts."""
        predictor = self._predictor
        keys = self._random.integers(0, predictor.scores.size, SAMPLE)
        layers = keys // predictor.experts
        odds = predictor.scores.ravel()[keys] - predictor.phase[layers]
        for row, (horizon, told) in enumerate(
            ((self._horizon, layers >= predictor.done), (NEXT_STEP, layers < predictor.done))
        ):
            if told.any() and row < len(forecast.probs):
                self._said.append(Said(horizon, keys[told], odds[told], forecast.probs[row].ravel()[keys[told]]))

    def hear(self, said: Said) -> None:
        """Notes what was said elsewhere, of this step."""
        self._said.append(said)

    def learn(self, needed: BoolArray) -> None:
        """A step is over that needed these experts, [L, E]."""
        known = self._before + [said for said in self._said if said.horizon != NEXT_STEP]
        self._before, self._said = [said for said in self._said if said.horizon == NEXT_STEP], []
        for said in known:
            came = needed.ravel()[said.keys]
            calibration = self.calibrations[said.horizon]
            self.mix.learn(calibration(said.odds), said.chance, came, said.horizon)
            calibration.learn(said.odds, came)
            self._shares[said.horizon] = calibration.share
        self._gate_eta = self.mix.eta(NEXT_LAYER)

    def forget(self) -> None:
        """A step is over of which nobody looked at what came."""
        self._said, self._before = [], []

    def foresee(self, odds: FloatArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The chance [n] that the next layer's gate gives, fused with worths [n] of these log odds; and the worths
        with it, as log odds. From any thread."""
        fused, again = np.empty_like(chance), np.empty_like(chance)
        _foresee(odds, chance, self._shares[NEXT_LAYER], self._gate_eta, fused, again)
        return fused, again

    @property
    def _horizon(self) -> int:
        """Of this step, by how much of it has run."""
        return min(LOOKS - 1, LOOKS * self._predictor.done // self._predictor.layers)


@njit(fastmath=True, nogil=True)
def _blend(
    out: FloatArray,
    scores: FloatArray,
    phase: FloatArray,
    probs: FloatArray,
    done: int,
    first: int,
    last: int,
    share_now: FloatArray,
    share_next: FloatArray,
    eta_now: float,
    eta_next: float,
) -> None:
    """The formulas above for layers `first` to `last`, of which `done` have run."""
    for layer in range(first, last):
        has_run = layer < done
        share = share_next if has_run else share_now
        eta = np.float32(eta_next if has_run else eta_now)
        row = probs[1 if has_run else 0, layer]
        for expert in range(scores.shape[1]):
            _, odds = _fuse(scores[layer, expert] - phase[layer], row[expert], share, eta)
            out[layer, expert] = odds + phase[layer]


@njit(fastmath=True, nogil=True)
def _fuse(odds: np.float32, q: np.float32, share: FloatArray, eta: np.float32) -> tuple[np.float32, np.float32]:
    """The chance p of one expert, and its worth v as log odds."""
    place = (odds - np.float32(LOW)) * np.float32((BINS - 1) / (HIGH - LOW))
    place = min(max(place, np.float32(0)), np.float32(BINS - 1.001))
    below = int(place)
    p = share[below] + (place - np.float32(below)) * (share[below + 1] - share[below])
    utility = np.float32(1) / (np.float32(1) + np.float32(math.exp(-odds)))
    beyond = min(max((utility - p) / (np.float32(1) - p), np.float32(0)), np.float32(1))
    p += eta * (q - p)
    utility = min(max(p + (np.float32(1) - p) * beyond, SURE), np.float32(1) - SURE)
    return p, np.float32(math.log(utility / (np.float32(1) - utility)))


@njit(nogil=True)
def _foresee(
    odds: FloatArray, chance: FloatArray, share: FloatArray, eta: float, fused: FloatArray, again: FloatArray
) -> None:
    """`_fuse` for some experts [n]."""
    for i in range(len(odds)):
        fused[i], again[i] = _fuse(odds[i], chance[i], share, np.float32(eta))


def compile_blend() -> None:
    """Has numba compile what a step runs."""
    small, phase = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
    share = np.zeros(BINS, np.float32)
    _blend(small.copy(), small, phase, np.zeros((2, 2, 2), np.float32), 1, 0, 2, share, share, 0.5, 0.5)
    _foresee(phase, phase, share, 0.5, phase.copy(), phase.copy())

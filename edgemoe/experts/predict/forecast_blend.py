"""Blends other forecasts into the predictor's worths [Two-Tier, 4.1].

The predictor applies the formulas of docs/design/prediction.md with the `shares` and `etas` that are kept here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgemoe.experts.predict.routing_memory import LOOKS
from edgemoe.experts.tiers.residency_records import SharedRecord
from edgemoe.jit.intrinsics import INT, carray, f32_at, i64_at, jit, record
from edgemoe.jit.object_cache import code
from edgemoe.kernels.cpu.vector import exp32, log32
from edgemoe.policy.forecast_mix import Calibration, ForecastMix
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray, fields, place_of

LOW, HIGH, BINS = -8.0, 8.0, 33  # of log odds
NEXT_STEP, NEXT_LAYER = LOOKS, LOOKS + 1  # horizons after this step's
HORIZONS = LOOKS + 2
SAMPLE = 96  # experts learned from in a step
SURE = np.float32(1e-5)  # no worth is nearer to 0 or 1


@dataclass(frozen=True, slots=True)
class ExpertForecast:
    """P(some decoding sequence needs the expert) in the step that was begun, horizon 0, and in later ones."""

    step: int
    probs: FloatArray  # [horizons, L, E]


class Forecaster(Protocol):
    """Makes forecasts. ScoutGate implements it."""

    @property
    def forecast(self) -> ExpertForecast | None:
        """The latest forecast."""

    @property
    def trust(self) -> float:
        """1 while forecasts are as good as was promised, down to 0."""


class AwaitedForecast(NamedTuple):
    """Two forecasts of some experts [n], kept until the outcome is known."""

    horizon: int
    keys: IntArray  # layer * E + expert
    odds: FloatArray  # log odds of the worth
    chance: FloatArray  # by the other forecaster


class ForecastBlend:
    """Owns calibrations, mixing weights, and the forecasts whose outcome is awaited. On the controller's thread."""

    def __init__(self) -> None:
        self.mix = ForecastMix(HORIZONS)
        self.calibrations = [Calibration(LOW, HIGH, BINS) for _ in range(HORIZONS)]
        self.shares = np.stack([calibration.share for calibration in self.calibrations]).astype(np.float32)
        self.etas = np.zeros(HORIZONS, np.float32)
        self._awaited: list[AwaitedForecast] = []  # in this step
        self._before: list[AwaitedForecast] = []  # in the last one, of this one

    def add_forecast(self, awaited: AwaitedForecast) -> None:
        """Notes a forecast of this step."""
        self._awaited.append(awaited)

    def learn(self, needed: BoolArray) -> None:
        """Learns from a step that needed the experts set in `needed` [L * E]."""
        awaited = self._awaited
        known = self._before + [each for each in awaited if each.horizon != NEXT_STEP]
        self._before, self._awaited = [each for each in awaited if each.horizon == NEXT_STEP], []
        for each in known:
            came, calibration = needed[each.keys], self.calibrations[each.horizon]
            self.mix.learn(calibration(each.odds), each.chance, came, each.horizon)
            calibration.learn(each.odds, came)
        if known:
            self._apply()

    def learned(self) -> dict[str, Any]:
        """Returns the arrays to save, by name."""
        mix, calibrations = self.mix, self.calibrations
        return {
            "mix_loss": mix.loss,
            "mix_bins": np.stack([mix.forecast, mix.came, mix.n]),
            "calibrations": np.stack([calibration.record for calibration in calibrations]),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores saved arrays; keeps the initial state if they are missing or unsound."""
        ours = self.learned()
        if any(
            name not in saved
            or saved[name].shape != kept.shape
            or saved[name].dtype != kept.dtype
            or not np.isfinite(saved[name]).all()
            or (saved[name] < 0).any()
            for name, kept in ours.items()
        ):
            return
        self.mix.loss[:] = saved["mix_loss"]
        self.mix.forecast[:], self.mix.came[:], self.mix.n[:] = saved["mix_bins"]
        for calibration, kept in zip(self.calibrations, saved["calibrations"], strict=True):
            calibration.restore(kept)
        self._apply()

    def _apply(self) -> None:
        for horizon, calibration in enumerate(self.calibrations):
            self.shares[horizon] = calibration.share
            self.etas[horizon] = self.mix.eta(horizon)


@jit
def fuse(odds: np.float32, q: np.float32, share: FloatArray, eta: np.float32) -> tuple[np.float32, np.float32]:
    """Returns the chance p of one expert, and its worth v as log odds, by the `share` [bins] of its horizon."""
    place = (odds - np.float32(LOW)) * np.float32((BINS - 1) / (HIGH - LOW))
    place = min(max(place, np.float32(0)), np.float32(BINS - 1.001))
    below = int(place)
    p = share[below] + (place - np.float32(below)) * (share[below + 1] - share[below])
    utility = np.float32(1) / (np.float32(1) + exp32(-odds))
    beyond = min(max((utility - p) / (np.float32(1) - p), np.float32(0)), np.float32(1))
    p += eta * (q - p)
    utility = min(max(p + (np.float32(1) - p) * beyond, SURE), np.float32(1) - SURE)
    return p, log32(utility / (np.float32(1) - utility))


# * `count` `experts` and their `chance` float32
# * `ranks` float32 of their layer's experts
# * `share` and `eta` float32 of the horizon
# * `shifts` float32: the layer's phase, and the margin
# * results: `odds`, `fused` and `utility` float32
GATE = fields("count", "experts", "chance", "ranks", "share", "eta", "shifts", "odds", "fused", "utility")
COUNT, RANKS = (place_of(GATE, name) for name in ("count", "ranks"))


@code(INT)
def FUSE_CHANCES(gate: int) -> None:
    """Runs `fuse` on the next layer's gate for some experts."""
    g = record(gate, GATE)
    phase, margin = f32_at(g.shifts)[0], f32_at(g.shifts)[1]
    share, eta = carray(f32_at(g.share), (BINS,)), f32_at(g.eta)[0]
    for i in range(g.count):
        odds = f32_at(g.ranks)[i64_at(g.experts)[i]] - phase
        fused, worth = fuse(odds, f32_at(g.chance)[i], share, eta)
        f32_at(g.odds)[i], f32_at(g.fused)[i], f32_at(g.utility)[i] = odds, fused, worth + phase - margin


class GateFusion:
    """Blends the next layer's gate into ranks. On the thread that runs the steps."""

    def __init__(self, ranks: FloatArray, blend: ForecastBlend, margin: float) -> None:
        """Reads `ranks` [L, E] and the learned blend; utilities are lowered by the margin."""
        self._record = shared = SharedRecord(GATE)
        self._address, self._fields = ctypes.c_int64(shared.address), shared.numbers  # converted once
        self._ranks, self._ranks_at, self._row_bytes = ranks, ranks.ctypes.data, ranks.strides[0]
        shared.set_array("share", blend.shares[NEXT_LAYER])
        shared.set_array("eta", blend.etas[NEXT_LAYER:])
        self._experts = shared.views("experts", ranks.shape[1])
        self._chance, self._odds, self._fused, self._utility = (
            shared.views(name, ranks.shape[1], np.float32) for name in ("chance", "odds", "fused", "utility")
        )
        self._shifts: FloatArray = shared.set_array("shifts", np.array([0, margin], np.float32))
        self._fuse_chances = FUSE_CHANCES.call_briefly

    def __call__(
        self, layer: int, experts: IntArray, chance: FloatArray, phase: float
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Fuses the gate's chance [n] of a layer's experts [n], whose rank is by `phase` more than their log odds.

        Returns these log odds, the fused chance, and the rank with it, less the margin, [n] each.
        """
        n, fields = len(experts), self._fields
        self._experts[n][...], self._chance[n][...], self._shifts[0] = experts, chance, phase
        fields[COUNT], fields[RANKS] = n, self._ranks_at + layer * self._row_bytes
        self._fuse_chances(self._address)
        return self._odds[n].copy(), self._fused[n].copy(), self._utility[n].copy()

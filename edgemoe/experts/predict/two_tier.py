"""The `two-tier` cache policy: the source's rules [Two-Tier, 4], run on the compute thread at the end of each step.

EWMA and ScoutGate are fused into one chance. An expert is admitted ahead of need above (1 + h) lambda a byte, and
replaces one below (1 - h) lambda. Where we differ: eta is the value with the least recent log-loss, not a setting.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from edgemoe.experts.predict.forecast_blend import Forecaster
from edgemoe.experts.predict.next_use import Ids
from edgemoe.experts.predict.prefetch_planner import PrefetchRequests, TierPrices
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.policy.cache_ranks import EWMA
from edgemoe.policy.forecast_mix import ForecastMix
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import StepMeta, StepRouting

log = logging.getLogger(__name__)
THIS_STEP, NEXT_STEP = 0, 1  # horizons of ScoutGate


class _Forecast(NamedTuple):
    """Two forecasts of one step's needs, [L, E] each."""

    ewma: FloatArray
    scoutgate: FloatArray


class TwoTierPolicy:
    """Implements `types.LivePolicy`; `on_step_begun` and `observe` mark the begin and the end of each step."""

    def __init__(
        self, geometry: ExpertGeometry, *, hysteresis: float = 0.1, forecaster: Forecaster | None = None
    ) -> None:
        """Creates the policy. A `forecaster` counts the steps as `on_step_begun` does here."""
        self.mix = ForecastMix(2)
        self.planned = 0  # moves
        self._geometry, self._hysteresis, self._forecaster = geometry, hysteresis, forecaster
        self._ewma = EWMA(geometry.layers, geometry.experts, geometry.top_k)
        self._step = 0
        self._needed: BoolArray = np.zeros((geometry.layers, geometry.experts), np.bool_)  # in the running step
        self._pinned: BoolArray = np.zeros_like(self._needed)
        self._began = self._ewma.p.copy()  # the EWMA when the step began
        self._ahead: _Forecast | None = None  # the previous step's forecast of this one
        self._tiers: tuple[TierPrices, PrefetchRequests] | None = None

    def attach(self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry) -> None:
        """Begins planning prefetches for these tiers in idle time."""
        self._tiers = TierPrices(residency, loader, geometry, self._hysteresis), loader

    @property
    def policy(self) -> TwoTierPolicy:
        """The policy for residency: this object."""
        return self

    def metrics(self) -> dict[str, float]:
        """Returns its metrics by their final names."""
        etas = {named(names.LEARNED_ETA, horizon=str(horizon)): self.mix.eta(horizon) for horizon in (0, 1)}
        return {names.LEARNED_MOVES: float(self.planned), **etas}

    def close(self) -> None:
        """Ends nothing: it has no thread."""

    # --- the cache's side ---------------------------------------------------------------------------------------

    @property
    def margin(self) -> float:
        return self._ewma.margin

    def touch(self, layer: int, experts: IntArray) -> None:
        self._ewma.touch(layer, experts)
        self._needed[layer, experts] = True

    def rank(self, layer: int) -> FloatArray:
        """Returns p W of the fused p, [L, E]; infinite for experts that the floor pins."""
        worth = self._ewma.worth(layer, self._fused(THIS_STEP))
        worth[self._pinned] = np.inf
        return worth

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self._ewma.fuse_chances(layer, experts, chance)

    # --- the engine's side --------------------------------------------------------------------------------------

    def on_step_begun(self, meta: StepMeta, ids: Ids | None = None) -> None:
        """Begins a step: clears its needs and keeps the present EWMA."""
        self._step += 1
        self._needed[:] = False
        self._began = self._ewma.p.copy()

    def observe(self, routing: StepRouting) -> None:
        """Ends a step: scores its forecasts, and makes the next plan. A prompt's step cancels the last plan."""
        if not routing.meta.decode.any():
            self._ahead = None
            self._request(plan=False)
            return
        if (forecast := self._current_forecast()) is not None:
            self.mix.learn(self._began, forecast[THIS_STEP], self._needed, THIS_STEP)
        if self._ahead is not None:
            self.mix.learn(*self._ahead, self._needed, NEXT_STEP)
        self._ahead = (
            None if forecast is None or len(forecast) == 1 else _Forecast(self._ewma.p.copy(), forecast[NEXT_STEP])
        )
        self._request(plan=True)

    def _request(self, *, plan: bool) -> None:
        if self._tiers is None:
            return
        prices, loader = self._tiers
        moves = []
        if plan:
            p = self._fused(NEXT_STEP)
            worth = self._ewma.worth(self._geometry.layers - 1, p)
            for move in prices.moves(worth):
                moves.append(move._replace(score=prices.lowest_worth(move.target), chance=float(p[move.expert])))
            self._pin(prices, worth)
        self.planned += len(moves)
        loader.prefetch(moves, PrefetchPriority.FAR)

    def _pin(self, prices: TierPrices, worth: FloatArray) -> None:
        working_set_bytes = int(self._geometry.top_k * self._geometry.strides_bytes.sum())
        pinned = prices.pinned(worth, working_set_bytes)
        if pinned.any() and not self._pinned.any():
            log.warning(
                "a tier does not hold one token's experts: the densest stay, the others stream",
                extra={"needed": working_set_bytes, "stay": int(pinned.sum())},
            )
        self._pinned = pinned

    def _current_forecast(self) -> FloatArray | None:
        """Returns ScoutGate's forecasts of this step, [horizons, L, E]; None where there are none yet."""
        forecast = self._forecaster.forecast if self._forecaster is not None else None
        return forecast.probs if forecast is not None and forecast.step == self._step else None

    def _fused(self, horizon: int) -> FloatArray:
        """Returns (1 - eta) EWMA + eta ScoutGate, [L, E]."""
        forecast = self._current_forecast()
        if self._forecaster is None or forecast is None or len(forecast) <= horizon:
            return self._ewma.p
        return self.mix.fuse(self._ewma.p, forecast[horizon], horizon, self._forecaster.trust)

"""The learned cache policy: predictor, blended forecasts, plans, and a budget of processor time for all of it.

It has no thread. The steps' thread marks the begin and end of steps and asks for ranks. Another thread, or the same,
calls `work`: the controller beside the engine, a replay between two layers (`LearnedPolicy`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from edgemoe.experts.predict.forecast_blend import (
    NEXT_LAYER,
    NEXT_STEP,
    AwaitedForecast,
    ExpertForecast,
    ForecastBlend,
    Forecaster,
    GateFusion,
)
from edgemoe.experts.predict.next_use import Ids, NextUsePredictor
from edgemoe.experts.predict.next_use_step import TRACKS
from edgemoe.experts.predict.prefetch_planner import PrefetchPlanner, PrefetchRequests
from edgemoe.experts.predict.routing_memory import LOOKS
from edgemoe.experts.tiers.residency import Residency
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import StepMeta, StepRouting

SHARE = 0.03  # of a step's time that `work` may cost, on average,
STALL_SHARE = 0.2  # but of its stall, in which a core has nothing else to do
SAVED_STEPS, OWED_STEPS = 8, 8  # steps' shares that may be saved up, and owed
PROBES = 8  # steps between two in which a layer's hints are learned from


def share_of(routing: StepRouting) -> float:
    """Returns the processor time that learning from a step may cost."""
    return SHARE * (routing.step_s - routing.stall_s) + STALL_SHARE * routing.stall_s


class RankPredictor:
    """Owns predictor, blend and plans. Before `start` it counts steps only."""

    margin = 2.0  # of log odds; by simulation, see tools/bench/results/gpu_offload.md

    def __init__(
        self,
        layers: int,
        *,
        hysteresis: float = 0.1,
        forecaster: Forecaster | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Creates the predictor of a model with `layers` layers. `forecaster` counts steps as `on_step_begun` does.

        `clock` is the processor time of the working thread.
        """
        self.ready = False  # from then on ranks are worked out
        self.step = 0  # that has begun
        self.dropped = 0  # steps that `work` was too slow for
        self.planned = 0  # moves
        self.studies = self.glances = 0  # steps with looks, and without
        self.looks = LOOKS  # that a step gets
        self._hysteresis, self._forecaster, self._clock = hysteresis, forecaster, clock
        self._margin = math.log((1 + hysteresis) / (1 - hysteresis))  # of a request over the expert that it replaces
        self._heard: ExpertForecast | None = None  # the forecast that was blended in last
        self._spent_s = self._credit_s = 0.0  # processor time, up to the latest step's end; the time that may be spent
        self._looking = True  # whether the step that ends next has a look
        self._plans: list[PrefetchPlanner] = []
        self._running: NextUsePredictor | None = None  # of the running step, where it is learned from
        self._ranked = 0  # layer that ranks were wanted for last
        self._stepping = 0  # the thread that runs the steps
        self._prompted, self._prompts_s = False, 0.0  # whether the step was a prompt's; the limit for such steps
        self._shares_s: dict[int, float] = {}  # the limit of each ended step; 0 for failed ones
        self._gates: deque[tuple[int, AwaitedForecast]] = deque(maxlen=4 * layers)  # of gates, and in which step

    def start(self, predictor: NextUsePredictor, blend: ForecastBlend) -> None:
        """Begins ranking by this predictor and blend."""
        self.predictor, self.blend = predictor, blend
        self._gate = GateFusion(predictor.ranks, blend, self._margin)
        predictor.set_fusion(blend.shares, blend.etas)
        self._shares_s.clear()
        self._gates.clear()
        self._spent_s, self.looks, self._looking = self._clock(), LOOKS, True
        self.ready = True

    def fail(self) -> None:
        """Stops ranking, until the next `start`."""
        self.ready = False
        self.cancel_plans()

    def attach(self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry) -> None:
        """Begins planning prefetches for these tiers in idle time."""
        self._plans.append(PrefetchPlanner(residency, loader, geometry, self._hysteresis))

    # --- the side of the steps

    def on_step_begun(self, meta: StepMeta, ids: Ids) -> None:
        """Begins a step. Its routing will be written into `ids` [L, T, k], layer by layer, over -1."""
        decode = np.flatnonzero(meta.decode)
        self.begin_step([meta.requests[i] for i in decode.tolist()], ids, meta.sure_rows[decode])

    def begin_step(self, sequences: Sequence[Hashable], ids: Ids, rows: IntArray) -> None:
        """Begins a step in which these sequences decode, with the last tokens `rows`."""
        self.step += 1
        self._stepping = threading.get_ident()
        self._ranked, self._running, self._prompted = 0, None, False
        if self.ready and len(rows):
            if self.predictor.begin(sequences, ids, rows):
                self._running = self.predictor
            else:
                self.dropped += 1

    def rank(self, layer: int) -> FloatArray:
        """Returns ranks [L, E], up to date with the layers that have run, for the thread that runs them.

        For other threads they are as they were brought up to date last.
        """
        running, forecaster = self._running, self._forecaster
        if running is not None and threading.get_ident() == self._stepping:  # others may outlast the step
            forecast = forecaster.forecast if forecaster is not None else None
            if forecast is not None and forecast is not self._heard and forecast.step == self.step:
                self._heard = forecast
                if forecaster is not None and len(forecast.probs) > 1:
                    running.add_forecast(forecast.probs, forecaster.trust)
            running.update_ranks(layer + 1 - self._ranked)
            self._ranked = layer
        return self.predictor.ranks

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Implements `types.LivePolicy`: fuses a hint's chances with the ranks of a layer's experts."""
        predictor = self.predictor
        odds, fused, utility = self._gate(layer, experts, chance, predictor.phase_of(layer))
        if (layer + self.step) % PROBES == 0:
            awaited = AwaitedForecast(NEXT_LAYER, layer * predictor.experts + experts, odds, chance)
            self._gates.append((predictor.begun, awaited))
        return fused, utility

    def observe(self, routing: StepRouting) -> bool:
        """Ends a step. Returns whether it is learned from."""
        self.add_prompts(routing.meta, routing.ids)
        return self.end_step(share_of(routing))

    def add_prompts(self, meta: StepMeta, ids: Ids) -> None:
        """Adds the prompts' part of the routing [L, T, k] of a step that ends now, and that of accepted drafts."""
        decoding = int(np.count_nonzero(meta.decode))
        if not self.ready:
            return
        ends = np.cumsum(meta.query_lens)
        for at in np.flatnonzero(~meta.decode)[: max(0, TRACKS - decoding)].tolist():
            first, last = ends[at] - meta.query_lens[at], ends[at]
            self._prompted |= self.predictor.add_prompt(meta.requests[at], ids[:, first:last])
        for at in np.flatnonzero(meta.drafted)[:TRACKS].tolist():
            accepted = ids[:, meta.sure_rows[at] + 1 : ends[at]]
            self.predictor.add_prompt(meta.requests[at], accepted, behind=self._running is not None)

    def end_step(self, share_s: float) -> bool:
        """Ends a step, after `add_prompts`; learning may cost `share_s` of processor time."""
        running, self._running = self._running, None
        if running is None:
            self._prompts_s += share_s if self._prompted else 0.0
            return False
        self._shares_s[running.begun] = share_s + self._prompts_s
        self._prompts_s = 0.0
        running.end()
        return True

    # --- the side of the work

    def work(self, wait_s: float = 0.0) -> bool:
        """Does the pending work, waits for more up to `wait_s`, and plans after a finished step; then returns True."""
        finished = self.predictor.work(wait_s)
        if finished:
            self._on_step_finished()
        return finished

    def cancel_plans(self) -> None:
        """Cancels the plans of the step that is over."""
        for plans in self._plans:
            plans.cancel()

    def metrics(self) -> dict[str, float]:
        """Returns its metrics by their final names."""
        metrics = {
            named(names.LEARNED_STEPS, how="followed"): float(self.studies),
            named(names.LEARNED_STEPS, how="glanced"): float(self.glances),
            names.LEARNED_SECONDS: self._spent_s,
            names.LEARNED_MOVES: float(self.planned),
            names.LEARNED_RIGHT: self._plans[0].right if self._plans else 0.0,
        }
        for name, horizon in (("0", 0), ("1", NEXT_STEP), ("gate", NEXT_LAYER)):
            metrics[named(names.LEARNED_ETA, horizon=name)] = self.blend.mix.eta(horizon)
        return metrics

    def _on_step_finished(self) -> None:
        """Learns from the finished step's forecasts, charges its cost, and plans for the next step."""
        predictor, blend = self.predictor, self.blend
        number = predictor.step - 1
        for awaited in predictor.pop_awaited():
            blend.add_forecast(awaited)
        while self._gates and self._gates[0][0] <= number:
            at, awaited = self._gates.popleft()
            if at == number:
                blend.add_forecast(awaited)
        blend.learn(predictor.learner.needs(number) > 0)
        predictor.set_fusion(blend.shares, blend.etas)
        self.studies += int(self._looking)
        self.glances += int(not self._looking)
        self._looking = bool(predictor.looking)
        self._charge(self._shares_s.pop(number, 0.0))
        if self._looking:
            for plans in self._plans:
                self.planned += plans.plan(predictor.ranks, predictor)
        else:
            self.cancel_plans()

    def _charge(self, share_s: float) -> None:
        """Adds a step's share of time, subtracts the time spent on it, and sets the number of looks of later steps."""
        spent_s, self._spent_s = self._spent_s, self._clock()
        credit_s = self._credit_s + share_s - (self._spent_s - spent_s)
        self._credit_s = min(max(credit_s, -OWED_STEPS * share_s), SAVED_STEPS * share_s)
        self.looks = min(LOOKS, self.looks + 1) if self._credit_s > 0 else max(0, self.looks - 1)
        self.predictor.set_looks(self.looks)


Clock = Callable[[], float]


class LearnedPolicy:
    """Implements `types.LivePolicy`.

    A caller that knows the sequence of each row calls `begin` and `end` around a step, and `route` before each
    `touch`. Otherwise a step begins when the layers start over, and its needs count as the routing of one sequence.
    """

    foretells = True  # ranks are good for prefetching, not only for evicting
    margin = RankPredictor.margin

    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        seed: int = 0,
        *,
        hysteresis: float = 0.1,
        clock: Clock = lambda: 0.0,
    ) -> None:
        """Creates the predictor. `clock` is the processor time that `work` has taken; by default it takes none."""
        self.predictive = RankPredictor(layers, hysteresis=hysteresis, clock=clock)
        self.start(NextUsePredictor(layers, experts, top_k, seed), ForecastBlend())
        self._routed: npt.NDArray[np.integer] | None = None
        self._ids: Ids = np.empty((0, 0, 0), np.int16)  # [L, S, k] of the running step
        self._bracketed = False
        self._layer = layers  # the one that ran last; `layers` before the first step

    def start(self, predictor: NextUsePredictor, blend: ForecastBlend) -> None:
        """Begins ranking by this predictor and blend, which may have learned before."""
        self.predictor = predictor
        self.predictive.start(predictor, blend)

    def begin(self, sequences: Sequence[Hashable]) -> None:
        """Begins a step of these sequences, one token each."""
        self._bracketed = True
        self._open(sequences, self.predictor.top_k)

    def route(self, ids: npt.NDArray[np.integer]) -> None:
        """Sets the routing of each sequence in the layer that is touched next, [S, k]."""
        self._routed = ids

    def add_prompts(self, meta: StepMeta, ids: Ids) -> None:
        """Adds the prompts' part of the running step's routing [L, T, k]."""
        self.predictive.add_prompts(meta, ids)

    def end(self, routing: StepRouting | None = None) -> None:
        """Ends the step. If `routing` has its duration, `work` is limited to a share of that."""
        learned = self.predictive.end_step(math.inf if routing is None else share_of(routing))
        if not learned:
            self.predictive.cancel_plans()
        self.predictive.work()

    def touch(self, layer: int, experts: IntArray) -> None:
        if not self._bracketed:
            if layer <= self._layer:
                self._turn()
            self._layer = layer
        if self._routed is not None:
            self._ids[layer] = self._routed
        else:
            self._ids[layer, 0] = np.resize(experts, self._ids.shape[2])
        self._routed = None

    def rank(self, layer: int) -> FloatArray:
        """Returns the log odds of decay^time to the next need, [L, E]."""
        ranks = self.predictive.rank(layer)
        self.predictive.work()
        return ranks

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self.predictive.fuse_chances(layer, experts, chance)

    def _open(self, sequences: Sequence[Hashable], width: int) -> None:
        self._ids = np.full((self.predictor.layers, len(sequences), width), -1, np.int16)
        self.predictive.begin_step(sequences, self._ids, np.arange(len(sequences)))

    def _turn(self) -> None:
        if self._layer < self.predictor.layers:
            self.end()
        self._open((0,), self.predictor.experts)

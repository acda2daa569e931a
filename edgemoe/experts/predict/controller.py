"""The controller: learns from every step beside the engine, and keeps the ranks by which residency drops experts.

The compute thread tells when a step begins and ends; what its gates choose is read where they write it. Residency asks
for ranks where it must evict, and those of the layers that have run are brought up to date then. A thread of the
controller's own does the rest in compiled code, and comes back to Python once a step, to plan what to bring up in idle
time. It is never waited for: steps that it is too slow for are left out. Its processor time is held below a share of
the steps' time by how many looks a step gets, at the memory and at all experts. Until it is ready, and whenever it has
failed and until it has started again, the least recently used go first.

A forecaster's forecasts are blended in as soon as they are there. What was learned is saved every minute.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgemoe.experts.predict import saved_state
from edgemoe.experts.predict.fusion import NEXT_LAYER, NEXT_STEP, AwaitedForecast, Blend, ExpertForecast, Forecaster
from edgemoe.experts.predict.next_use import Ids, NextUsePredictor, link_predictor
from edgemoe.experts.predict.prefetch_planner import Plans, PrefetchRequests
from edgemoe.experts.predict.routing_memory import LOOKS
from edgemoe.experts.tiers.residency import Residency
from edgemoe.policy.baselines import LRU
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.routing import StepMeta, StepRouting

log = logging.getLogger(__name__)

SHARE = 0.03  # of a step's time that the thread may cost, on average,
STALL_SHARE = 0.2  # but of its stall, in which a core has nothing else to do
SAVED_STEPS, OWED_STEPS = 8, 8  # of that: what may be saved up, and owed
SAVE_S = 60.0  # between two times that what was learned is saved
RESTART_S, DOUBLED = 1.0, 6  # after a failure, doubled with each, so many times at most
CLOSING_S = 30.0  # what is being compiled cannot be stopped
PROBES = 8  # every so many steps a layer's hints are learned from


class Kept(NamedTuple):
    """Where things are kept between starts; None is nowhere."""

    state: Path | None = None  # the file of what was learned
    kernels: Path | None = None  # the folder of compiled code


NOWHERE = Kept()


class LearnedRanks:
    """Implements `types.LivePolicy` for residency, by what the controller knows."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def touch(self, layer: int, experts: IntArray) -> None:
        if not self._controller.ready:
            self._controller.meanwhile.touch(layer, experts)

    def rank(self, layer: int) -> FloatArray:
        return self._controller.rank(layer) if self._controller.ready else self._controller.meanwhile.rank(layer)

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return (self._controller if self._controller.ready else self._controller.meanwhile).foresee(
            layer, experts, chance
        )


class Controller:
    """Owns the predictor and its thread. `policy` is for residency; `look` and `observe` for the engine."""

    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        *,
        hysteresis: float = 0.1,
        kept: Kept = NOWHERE,
        forecaster: Forecaster | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Goes on from `kept.state` where it has learned of this model before.

        A `forecaster` counts the steps as `look` does here. `clock` is the thread's processor time.
        """
        self.policy, self.meanwhile = LearnedRanks(self), LRU(layers, experts)
        self.ready = False  # from then on ranks are worked out
        self.step = 0  # that the compute thread has begun
        self.dropped = 0  # steps that the thread was too slow for
        self.failures = 0  # of the thread, after each of which it has started again
        self.planned = 0  # moves
        self.studies = self.glances = 0  # steps with looks, and without
        self._shape, self._hysteresis, self._kept = (layers, experts, top_k), hysteresis, kept
        self._margin = math.log((1 + hysteresis) / (1 - hysteresis))  # of a request over what has to go for it
        self._forecaster = forecaster
        self._heard: ExpertForecast | None = None  # the forecast that was blended in last
        self._clock, self._spent_s = clock, 0.0  # processor time, up to the latest step's end
        self._credit_s = 0.0  # of it, what may be spent
        self._looks, self._looking = LOOKS, True  # that a step gets; whether the one that ends next has any
        self._plans: Plans | None = None
        self._running: NextUsePredictor | None = None  # of the running step, where it is learned from
        self._ranked = 0  # layer that ranks were wanted for last
        self._shares_s: dict[int, float] = {}  # what steps that have ended may cost; those that failed, nothing
        self._gates: deque[tuple[int, AwaitedForecast]] = deque(maxlen=4 * layers)  # of gates, and in which step
        self._prefilled = threading.Event()  # a step without decoding has ended
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def attach(self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry) -> None:
        """From here on plans what the tiers should fetch in idle time."""
        self._plans = Plans(residency, loader, geometry, self._hysteresis)

    # --- the compute thread's side

    def look(self, meta: StepMeta, ids: Ids) -> None:
        """A step begins. Into `ids` [L, T, k] its gates' choices will be written, layer by layer, over -1."""
        self.step += 1
        self._ranked, self._running = 0, None
        if self.ready and meta.decode.any():
            decode = np.flatnonzero(meta.decode)
            rows = (np.cumsum(meta.query_lens) - 1)[decode]  # the last tokens
            if self._predictor.begin([meta.requests[i] for i in decode.tolist()], ids, rows):
                self._running = self._predictor
            else:
                self.dropped += 1

    def rank(self, layer: int) -> FloatArray:
        """Ranks [L, E] that are up to date with the layers that have run."""
        running, forecaster = self._running, self._forecaster
        if running is not None:
            forecast = forecaster.forecast if forecaster is not None else None
            if forecast is not None and forecast is not self._heard and forecast.step == self.step:
                self._heard = forecast
                if forecaster is not None and len(forecast.probs) > 1:
                    running.hear(forecast.probs, forecaster.trust)
            running.follow(layer + 1 - self._ranked)
            self._ranked = layer
        return self._predictor.ranks

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """See `types.LivePolicy`."""
        predictor = self._predictor
        phase = predictor.phase_of(layer)
        odds = predictor.ranks[layer, experts] - phase
        if (layer + self.step) % PROBES == 0:
            awaited = AwaitedForecast(NEXT_LAYER, layer * predictor.experts + experts, odds, chance)
            self._gates.append((predictor.begun, awaited))
        fused, again = self._blend.foresee(odds, chance)
        return fused, again + phase - self._margin

    def observe(self, routing: StepRouting) -> None:
        """A step ended."""
        running, self._running = self._running, None
        if running is not None:
            self._shares_s[running.begun] = _share_s(routing)
            running.end()
        elif self.ready:
            self._prefilled.set()
            self._predictor.nudge()

    def wait_idle(self, timeout_s: float) -> bool:
        """Until it is ready and has done all that there is to do; False where that took too long."""
        end_s = time.monotonic() + timeout_s
        while not (self.ready and self._predictor.idle):
            if time.monotonic() > end_s:
                return False
            time.sleep(1e-3)
        return True

    def metrics(self) -> dict[str, float]:
        """What it did, by the final names; nothing before it is ready."""
        if not self.ready:
            return {}
        metrics = {
            named(names.LEARNED_STEPS, how="followed"): float(self.studies),
            named(names.LEARNED_STEPS, how="glanced"): float(self.glances),
            names.LEARNED_SECONDS: self._spent_s,
            names.LEARNED_MOVES: float(self.planned),
            names.LEARNED_RIGHT: self._plans.ledger.share if self._plans is not None else 0.0,
        }
        for name, horizon in (("0", 0), ("1", NEXT_STEP), ("gate", NEXT_LAYER)):
            metrics[named(names.LEARNED_ETA, horizon=name)] = self._blend.mix.eta(horizon)
        return metrics

    def close(self) -> None:
        """Ends the thread, which saves what was learned."""
        self._closed.set()
        if self.ready:
            self._predictor.stop()
        self._thread.join(CLOSING_S)

    # --- the thread's side

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._begin()
                self._serve()
            except Exception:
                self.ready = False
                log.exception("the cache policy failed; least recently used first until it has started again")
                if self._plans is not None:
                    self._plans.withdraw()
                self._closed.wait(RESTART_S * 2 ** min(self.failures, DOUBLED))
                self.failures += 1

    def _begin(self) -> None:
        link_predictor(self._kept.kernels)
        predictor, blend, file = NextUsePredictor(*self._shape), Blend(), self._kept.state
        if file is not None and file.exists():
            saved = saved_state.read(file)
            if saved is None or not predictor.restore(saved):
                log.warning(f"{file} is no state of this model's cache; learning begins anew")
            else:
                blend.restore(saved)
        predictor.weigh(blend.shares, blend.etas)
        self._predictor, self._blend = predictor, blend
        self._shares_s.clear()
        self._gates.clear()
        self._spent_s, self._looks, self._looking = self._clock(), LOOKS, True
        self.ready = True

    def _serve(self) -> None:
        """Works until it is closed; saves every minute, and at the end."""
        saved_s, saved_step = time.monotonic(), self._predictor.step
        while not self._closed.is_set():
            finished = self._predictor.work(max(0.1, saved_s + SAVE_S - time.monotonic()))
            prefilled = self._prefilled.is_set()
            self._prefilled.clear()
            if finished:
                self._end()
            if prefilled and self._plans is not None:
                self._plans.withdraw()
            if time.monotonic() >= saved_s + SAVE_S:
                saved_step = self._save(saved_step)
                saved_s = time.monotonic()
        self._save(saved_step)

    def _save(self, saved_step: int) -> int:
        """Saves what was learned since a step. The step that runs."""
        step = self._predictor.step
        if self._kept.state is None or step == saved_step:
            return step
        try:
            saved_state.write(self._kept.state, self._predictor.learned() | self._blend.learned())
        except OSError as error:
            log.warning(f"what the cache learned could not be saved to {self._kept.state}: {error}")
        return step

    def _end(self) -> None:
        """A step is finished, and the next one was looked at: learns what forecasts were worth, pays, and plans."""
        predictor, blend = self._predictor, self._blend
        number = predictor.step - 1
        for awaited in predictor.awaited():
            blend.hear(awaited)
        while self._gates and self._gates[0][0] <= number:
            at, awaited = self._gates.popleft()
            if at == number:
                blend.hear(awaited)
        blend.learn(predictor.learner.needs(number) > 0)
        predictor.weigh(blend.shares, blend.etas)
        self.studies += int(self._looking)
        self.glances += int(not self._looking)
        self._looking = bool(predictor.looking)
        self._pay(self._shares_s.pop(number, 0.0))
        if self._plans is not None:
            if self._looking:
                self.planned += self._plans.make(predictor.ranks, predictor)
            else:
                self._plans.withdraw()

    def _pay(self, share_s: float) -> None:
        """Counts a step's share against what was spent on it, and decides how many looks later steps get."""
        spent_s, self._spent_s = self._spent_s, self._clock()
        credit_s = self._credit_s + share_s - (self._spent_s - spent_s)
        self._credit_s = min(max(credit_s, -OWED_STEPS * share_s), SAVED_STEPS * share_s)
        self._looks = min(LOOKS, self._looks + 1) if self._credit_s > 0 else max(0, self._looks - 1)
        self._predictor.allow(self._looks)


def _share_s(routing: StepRouting) -> float:
    """Processor time that a step may cost."""
    return SHARE * (routing.step_s - routing.stall_s) + STALL_SHARE * routing.stall_s

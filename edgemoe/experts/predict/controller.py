"""The controller: learns from every step beside the engine, and keeps the ranks by which residency drops experts.

The compute thread leaves notes: residency's policy one per layer-step, the engine one per step. A thread of the
controller's own works them off, publishes new ranks by replacing an array, and plans what to bring up in idle time.
If notes come faster than they are worked off they are dropped: ranks grow older, the engine never waits. The thread's
processor time is held below a share of the steps' time: beyond it, steps are only glanced at. Until it has compiled
what it runs, which takes some seconds, the least recently used go first.

While one sequence decodes, its step is followed layer by layer. Of a batch, residency tells only the union, so that it
is learned from when the step is over and each sequence's choice is known. A forecaster's forecasts are blended in as
soon as they are there.
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
import numpy.typing as npt

from edgemoe.experts.predict.compile_learning import compile_learning
from edgemoe.experts.predict.fusion import NEXT_LAYER, NEXT_STEP, Blend, ExpertForecast, Forecaster, Said
from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.predict.prefetch_planner import Plans, PrefetchRequests
from edgemoe.experts.tiers.residency import Residency
from edgemoe.policy.baselines import LRU
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.routing import StepMeta, StepRouting

log = logging.getLogger(__name__)

NOTES = 4096  # that may wait
SHARE = 0.03  # of a step's time that following it may cost, on average,
STALL_SHARE = 0.2  # but of its stall, in which a core has nothing else to do
SAVED_STEPS, OWED_STEPS = 8, 64  # of that: what may be saved up, and from which debt on a step is left out
CLOSING_S = 30.0  # what is being compiled cannot be stopped
PROBES = 8  # every so many steps a layer's hints are learned from


class Touch(NamedTuple):
    """One layer-step, as residency tells it, and the step that it belongs to."""

    step: int
    layer: int
    experts: IntArray


Note = Touch | StepRouting | Said


class RankSnapshot:
    """Implements `types.LivePolicy` for residency: leaves notes, and reads what was published last."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def touch(self, layer: int, experts: IntArray) -> None:
        if self._controller.following:
            self._controller.note(Touch(self._controller.step, layer, experts))
        elif not self._controller.ready:
            self._controller.meanwhile.touch(layer, experts)

    def rank(self, layer: int) -> FloatArray:
        return self._controller.ranks if self._controller.ready else self._controller.meanwhile.rank(layer)

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return (self._controller if self._controller.ready else self._controller.meanwhile).foresee(
            layer, experts, chance
        )


class Controller:
    """Owns the predictor and its thread. `policy` is for residency, `observe` for the engine; `close` ends it."""

    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        *,
        hysteresis: float = 0.1,
        state_file: Path | None = None,
        forecaster: Forecaster | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Goes on from `state_file` where it has learned of this model before.

        A `forecaster` counts the steps as `look` does here. `clock` is the thread's processor time.
        """
        self.policy, self.meanwhile = RankSnapshot(self), LRU(layers, experts)
        self.ready = False  # from then on ranks are worked out
        self.following = False  # this step's layers; else it is only glanced at when it is over
        self.step = 0  # that the compute thread has begun
        self.dropped = 0  # notes that the thread was too slow for
        self.planned = 0  # moves
        self.studies = self.glances = 0  # steps that were followed; those only glanced at
        self._shape, self._hysteresis, self._state_file = (layers, experts, top_k), hysteresis, state_file
        self._margin = math.log((1 + hysteresis) / (1 - hysteresis))  # of a request over what has to go for it
        self._forecaster = forecaster
        self._forecast: ExpertForecast | None = None  # of the running step
        self._clock, self._spent_s = clock, 0.0  # processor time, up to the latest step's end
        self._credit_s = 0.0  # of it, what may be spent
        self._sequences: tuple[str, ...] = ()  # that are presumed to decode in the running step
        self._followed = 0  # layers of it that were followed
        self._plans: Plans | None = None
        self._notes: deque[Note] = deque()
        self._wake, self._idle, self._closed = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def attach(self, residency: Residency, loader: PrefetchRequests, expert_bytes: int) -> None:
        """From here on plans what the tiers should fetch in idle time; all experts are of one size."""
        self._plans = Plans(residency, loader, expert_bytes, self._hysteresis)

    # --- the compute thread's side

    def look(self, meta: StepMeta) -> None:
        """A step begins."""
        self.step += 1

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """See `types.LivePolicy`."""
        phase = self._predictor.phase[layer]
        odds = self.ranks[layer, experts] - phase
        if self.following and (layer + self.step) % PROBES == 0:
            self.note(Said(NEXT_LAYER, layer * self._predictor.experts + experts, odds, chance))
        fused, again = self._blend.foresee(odds, chance)
        return fused, again + phase - self._margin

    def note(self, note: Note) -> None:
        """Something happened. Never waits; wakes the thread where it has to look."""
        if not self.ready:
            return
        with self._wake:
            if len(self._notes) >= NOTES:
                self.dropped += len(self._notes)
                self._notes.clear()
            self._notes.append(note)
            if self._idle and not (isinstance(note, Touch) and note.layer + 1 not in self._predictor.looks):
                self._idle = False
                self._wake.notify_all()

    def observe(self, routing: StepRouting) -> None:
        """A step ended."""
        self.note(routing)

    def wait_idle(self, timeout_s: float) -> bool:
        """Until it is ready and every note is worked off; False where that took too long."""
        with self._wake:
            return self._wake.wait_for(lambda: self._idle, timeout_s)

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
        """Ends the thread and saves what was learned."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(CLOSING_S)
        if self.ready and self._state_file is not None and not self._thread.is_alive():
            try:
                self._predictor.save(self._state_file)
            except OSError as error:
                log.warning(f"what the cache learned could not be saved to {self._state_file}: {error}")

    # --- the thread's side

    def _run(self) -> None:
        self._begin()
        while (note := self._take()) is not None:
            if isinstance(note, StepRouting):
                self._end(note)
            elif isinstance(note, Touch):
                self._follow(note)
            else:
                self._blend.hear(note)

    def _begin(self) -> None:
        compile_learning(*self._shape[1:])
        self._predictor = NextUsePredictor(*self._shape)
        file = self._state_file
        if file is not None and file.exists() and not self._predictor.load(file):
            log.warning(f"{file} is no state of this model's cache; learning begins anew")
        self._blend = Blend(self._predictor)
        self.ranks = self._predictor.scores  # any thread reads
        if self._forecaster is not None:
            self.ranks = self.ranks.copy()
        self._spent_s = self._clock()
        self.ready = self.following = True

    def _take(self) -> Note | None:
        with self._wake:
            if not self._notes:
                self._idle = True
                self._wake.notify_all()
            self._wake.wait_for(lambda: self._notes or self._closed)
            return None if self._closed else self._notes.popleft()

    def _follow(self, touch: Touch) -> None:
        """One layer of a step; once it does not fit what was presumed, the step's end is waited for."""
        if not self.following:  # since after it was told
            return
        fits = len(self._sequences) == 1 and len(touch.experts) == self._predictor.top_k
        looked = False
        if fits and touch.layer == self._followed:
            looked = self._predictor.see(touch.layer, touch.experts[None, :], touch.experts)
            self._followed += 1
        came = self._forecast is None and self._ask(touch.step)
        if self._forecast is not None and (came or looked):
            self._blend.listen(self._forecast)
        if came or looked:
            self._publish(0, len(self.ranks))
            self._plan()  # what was requested for layers that have run is not worth it any more
        elif fits:
            self._publish(touch.layer, touch.layer + 1)

    def _ask(self, step: int) -> bool:
        """Whether there is a forecast of this step by now."""
        forecast = self._forecaster.forecast if self._forecaster is not None else None
        if forecast is None or forecast.step != step:
            return False
        self._forecast = forecast
        return True

    def _end(self, routing: StepRouting) -> None:
        """A step is over: closes what was followed, or learns it as a whole, and looks at the next one."""
        meta = routing.meta
        requests = tuple(np.array(meta.requests)[meta.decode].tolist())
        if not requests:  # prefill only
            return
        ids = routing.ids[:, (np.cumsum(meta.query_lens) - 1)[meta.decode]]  # [L, S, k] of the last tokens
        if self.following:
            self._study(requests, ids)
            self.studies += 1
        else:
            self._blend.forget()
        if not self.following and self._credit_s > -OWED_STEPS * _share_s(routing):
            self._predictor.glance(requests, ids)
            self._publish(0, len(ids))
            self.glances += 1
        self._sequences, self._followed, self._forecast = requests, 0, None
        self._pay(_share_s(routing))
        if self.following:
            self._predictor.begin(requests)
            self._publish(0, len(ids))
            self._plan()

    def _study(self, requests: tuple[str, ...], ids: npt.NDArray[np.integer]) -> None:
        """Learns all that a step tells."""
        predictor = self._predictor
        if self._followed < len(ids) or requests != self._sequences:
            predictor.begin(requests)
            for layer, row in enumerate(ids):  # [S, k]
                predictor.see(layer, row, np.unique(row).astype(np.int64))
        self._blend.learn(predictor.last == predictor.step)
        predictor.end()

    def _pay(self, share_s: float) -> None:
        """Counts a step's share against what was spent on it, and decides how much the next one may cost."""
        spent_s, self._spent_s = self._spent_s, self._clock()
        self._credit_s = min(self._credit_s + share_s - (self._spent_s - spent_s), SAVED_STEPS * share_s)
        self.following = self._credit_s >= 0

    def _publish(self, first: int, last: int) -> None:
        """Works out the ranks of layers `first` to `last` anew."""
        if self._forecaster is not None:
            self._blend.ranks(self.ranks, self._forecast, self._forecaster.trust, first, last)

    def _plan(self) -> None:
        if self._plans is not None:
            self.planned += self._plans.make(self.ranks, self._predictor)


def _share_s(routing: StepRouting) -> float:
    """Processor time that following a step may cost."""
    return SHARE * (routing.step_s - routing.stall_s) + STALL_SHARE * routing.stall_s

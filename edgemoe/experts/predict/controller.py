"""Runs prediction beside the engine, on a thread of its own, and gives residency its ranks for eviction.

The engine never waits for this thread: steps for which it is too slow are not learned from. Before it is ready, and
between a failure and its restart, eviction is LRU. The learned state is saved every minute.
See docs/design/prediction.md for the threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from edgemoe.experts.predict.forecast_blend import ForecastBlend, Forecaster
from edgemoe.experts.predict.next_use import PREDICTOR, Ids, NextUsePredictor, link_predictor, read_state, write_state
from edgemoe.experts.predict.predictive_policy import RankPredictor
from edgemoe.experts.predict.prefetch_planner import PrefetchRequests
from edgemoe.experts.tiers.residency import Residency
from edgemoe.jit.compile_process import CompileProcess
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import StepMeta, StepRouting

log = logging.getLogger(__name__)

SAVE_S = 60.0  # between two saves of the learned state
RESTART_S, DOUBLED = 1.0, 6  # pause after a failure, doubled with each failure, at most DOUBLED times
PREDICTOR_PLACE = f"{NextUsePredictor.__module__}:PREDICTOR"
POLL_S = 0.1  # between two looks at a compiling process
CLOSING_S = 30.0  # that the thread has to save


class PredictorFiles(NamedTuple):
    """Paths of files kept between starts; None keeps nothing."""

    state: Path | None = None  # the file of the learned state
    kernels: Path | None = None  # the folder of compiled code


NOWHERE = PredictorFiles()


class LearnedRanks:
    """Implements `types.LivePolicy` for residency by the predictor's ranks; by LRU until it is ready."""

    def __init__(self, foresight: RankPredictor, meanwhile: LRU) -> None:
        self._predictive, self._meanwhile = foresight, meanwhile

    @property
    def margin(self) -> float:
        return (self._predictive if self._predictive.ready else self._meanwhile).margin

    def touch(self, layer: int, experts: IntArray) -> None:
        if not self._predictive.ready:
            self._meanwhile.touch(layer, experts)

    def rank(self, layer: int) -> FloatArray:
        return (self._predictive if self._predictive.ready else self._meanwhile).rank(layer)

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return (self._predictive if self._predictive.ready else self._meanwhile).fuse_chances(layer, experts, chance)


class PredictionController:
    """Owns the foresight and its thread. `policy` is for residency; `on_step_begun` and `observe` for the engine."""

    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        *,
        hysteresis: float = 0.1,
        kept: PredictorFiles = NOWHERE,
        forecaster: Forecaster | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Goes on from `kept.state` where it has learned of this model before.

        A `forecaster` counts the steps as `on_step_begun` does here. `clock` is the thread's processor time.
        """
        self.predictive = RankPredictor(layers, hysteresis=hysteresis, forecaster=forecaster, clock=clock)
        self.meanwhile = LRU(layers, experts)
        self.policy = LearnedRanks(self.predictive, self.meanwhile)
        self.failures = 0  # of the thread, after each of which it has started again
        self._shape, self._kept = (layers, experts, top_k), kept
        self._prefilled = threading.Event()  # a step without decoding has ended
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def attach(self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry) -> None:
        """Begins planning prefetches for these tiers in idle time."""
        self.predictive.attach(residency, loader, geometry)

    @property
    def ready(self) -> bool:
        """Whether ranks are worked out."""
        return self.predictive.ready

    # --- the compute thread's side

    def on_step_begun(self, meta: StepMeta, ids: Ids) -> None:
        """Begins a step. Its routing will be written into `ids` [L, T, k], layer by layer, over -1."""
        self.predictive.on_step_begun(meta, ids)

    def observe(self, routing: StepRouting) -> None:
        """Ends a step with its routing, and wakes the thread."""
        if not self.predictive.observe(routing) and self.ready:
            self._prefilled.set()
            self.predictive.predictor.wake()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until it is ready and has no work left. Returns False after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while not (self.ready and self.predictive.predictor.idle):
            if time.monotonic() > end_s:
                return False
            time.sleep(1e-3)
        return True

    def metrics(self) -> dict[str, float]:
        """Returns its metrics by their final names; none before it is ready."""
        return self.predictive.metrics() if self.ready else {}

    def close(self) -> None:
        """Ends the thread, which saves the learned state. A thread that still compiles is left alone."""
        self._closed.set()
        if self.ready:
            self.predictive.predictor.stop()
            self._thread.join(CLOSING_S)

    # --- the thread's side

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._compile()
                if self._closed.is_set():
                    return
                link_predictor(self._kept.kernels)
                self._begin()
                self._serve()
            except Exception:
                self.predictive.fail()
                log.exception("the cache policy failed; least recently used first until it has started again")
                self._closed.wait(RESTART_S * 2 ** min(self.failures, DOUBLED))
                self.failures += 1

    def _compile(self) -> None:
        """Has another process compile the predictor, so that steps go on meanwhile; closing ends it."""
        with closing(CompileProcess([PREDICTOR], PREDICTOR_PLACE, self._kept.kernels, niceness=10)) as compiling:
            while compiling.is_running and not self._closed.wait(POLL_S):
                pass

    def _begin(self) -> None:
        self.predictive.start(*restored(NextUsePredictor(*self._shape), self._kept.state))

    def _serve(self) -> None:
        """Works until it is closed; saves every minute, and at the end."""
        foresight = self.predictive
        saved_s, saved_step = time.monotonic(), foresight.predictor.step
        while not self._closed.is_set():
            foresight.work(max(0.1, saved_s + SAVE_S - time.monotonic()))
            if self._prefilled.is_set():
                self._prefilled.clear()
                foresight.cancel_plans()
            if time.monotonic() >= saved_s + SAVE_S:
                saved_step = self._save(saved_step)
                saved_s = time.monotonic()
        self._save(saved_step)

    def _save(self, saved_step: int) -> int:
        """Saves the learned state if a step has ended since `saved_step`. Returns the running step."""
        foresight = self.predictive
        step = foresight.predictor.step
        if self._kept.state is None or step == saved_step:
            return step
        try:
            write_state(self._kept.state, foresight.predictor.learned() | foresight.blend.learned())
        except OSError as error:
            log.warning(f"what the cache learned could not be saved to {self._kept.state}: {error}")
        return step


def restored(predictor: NextUsePredictor, file: Path | None) -> tuple[NextUsePredictor, ForecastBlend]:
    """Returns a new predictor and blend that go on from a file, if there is one; says so where it does not fit."""
    blend = ForecastBlend()
    if file is not None and file.exists():
        saved = read_state(file)
        if saved is None or not predictor.restore(saved):
            log.warning(f"{file} is no state of this model's cache; learning begins anew")
        else:
            blend.restore(saved)
    return predictor, blend

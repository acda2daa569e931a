"""The engine put together: blocks, scheduler, runner and step loop over a decoder and its experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from msgspec import structs

from edgemoe.config.settings import EngineSettings
from edgemoe.engine.blocks import BlockManager, KVSwap
from edgemoe.engine.loop import Emit, StepLoop
from edgemoe.engine.prefix_transfer import PrefixTransfer
from edgemoe.engine.scheduler import ChunkBudget, Scheduler
from edgemoe.engine.speculation import Speculation
from edgemoe.engine.state_slots import StateSlots
from edgemoe.engine.steps import PHASES, ForwardRunner, LoadedModel, StepObservers
from edgemoe.engine.window_blocks import WindowBlocks
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.request import RequestLimits
from edgemoe.types.stages import CacheRoom
from edgemoe.types.step import BLOCK_TOKENS, LEAST_STATE_SLOTS, least_blocks


def engine_metrics(
    loop: StepLoop, scheduler: Scheduler, runner: ForwardRunner, blocks: BlockManager
) -> dict[str, float]:
    """Returns numbers of queues, blocks, steps and ended requests by metric name. May be called while a step runs."""
    metrics: dict[str, float] = {
        names.QUEUE_DEPTH: len(scheduler.waiting),
        names.REQUESTS_RUNNING: len(scheduler.running),
        names.REQUESTS_BLAMED: loop.steps.blamed,
        names.KV_BLOCKS: blocks.count,
        names.KV_BLOCKS_REFERENCED: blocks.count - blocks.free,
        names.PREFIX_HIT_TOKENS: scheduler.prefix_tokens["hit"],
        names.PREFIX_MISS_TOKENS: scheduler.prefix_tokens["miss"],
    }
    for way in ("park", "recompute"):
        metrics[named(names.PREEMPTIONS, way=way)] = scheduler.paused_total[way]
    for reason in ("stop", "length", "error", "cancelled"):
        metrics[named(names.REQUESTS_FINISHED, reason=reason)] = loop.finished[reason]
    for phase in PHASES:
        metrics[named(names.STEPS, phase=phase)] = runner.totals["steps", phase]
        metrics[named(names.STEP_SECONDS, phase=phase)] = runner.totals["seconds", phase]
        metrics[named(names.STEP_TOKENS, phase=phase)] = runner.totals["tokens", phase]
        metrics[named(names.ACTIVE_EXPERTS, phase=phase)] = runner.totals["experts", phase]
    return metrics


NOBODY = StepObservers()
STAGE_PAUSE_S = 1.0  # without a step for another box, after which this one is idle


@dataclass(frozen=True, slots=True)
class ServingBudget:
    """Memory and time that an engine may use."""

    kv_blocks: int
    context_tokens: int  # of one request, if the blocks hold as many
    kv_swap_bytes: int = 0  # for keys, values and states of paused requests
    state_slots: int = 0  # for a model with states beside keys and values
    missing_expert_timeout_s: float = 0.0  # for which a request waits for another box to supply a missing expert
    window_blocks: int = 0  # for layers with windows; 0: these have the same blocks as all others


class Engine:
    """Runs requests that are submitted to `loop`, and hands their tokens to `emit`.

    Requests may be submitted from any thread; `emit` is called on the compute thread.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        budget: ServingBudget,
        emit: Emit,
        *,
        watchers: StepObservers = NOBODY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        spec, grammars, states = model.spec, model.grammars, None
        self._budget, self._most_sequences = budget, settings.max_sequences
        if budget.state_slots:
            most = min(settings.max_sequences, (budget.state_slots - 1) // 2)  # one slot to read, one to write
            settings = structs.replace(settings, max_sequences=most)
            states = StateSlots(budget.state_slots, most)
        windows = WindowBlocks(budget.window_blocks, spec.kv_layout.window) if budget.window_blocks else None
        self.max_sequences = settings.max_sequences  # that run at once
        self._windows, self._states = windows, states
        self.blocks = BlockManager(
            budget.kv_blocks, spec.geometry.layers, spec.geometry.experts, settings.prefix_cache, states, windows
        )
        self.prefixes = PrefixTransfer(self.blocks, states, windows, model.kv, spec.kv_layout)
        self.limits = RequestLimits(min(budget.context_tokens, budget.kv_blocks * BLOCK_TOKENS), spec.vocab)
        chunk_budget = ChunkBudget(settings.step_tokens, settings.mixed_step_s)
        kv_swap = None
        if settings.preemption == "park":
            in_windows = model.kv.windows if windows else None
            kv_swap = KVSwap(
                model.kv, self.blocks, spec.kv_layout.block_bytes, budget.kv_swap_bytes, model.kv.states, in_windows
            )
        self.scheduler = Scheduler(settings, self.blocks, chunk_budget, kv_swap)
        self.runner = ForwardRunner(model, self.blocks, chunk_budget, watchers)
        if settings.drafts == "lookup" and states is None:  # a rejected token's state could not be taken back
            speculation = Speculation(self.blocks, self.scheduler.step_shares, self.limits.context_tokens)
            self.scheduler.speculation = speculation
        self.loop = StepLoop(
            self.scheduler, self.runner, self.limits, emit, grammars, clock, budget.missing_expert_timeout_s
        )
        self._grammars = grammars

    def start(self, threads: int, ended: Callable[[BaseException | None], None]) -> threading.Thread:
        """Starts the loop on a compute thread, which calls `ended` once with the error that ended it, or None."""

        def compute() -> None:
            torch.set_num_threads(threads)  # OpenMP keeps this by thread
            error: BaseException | None = None
            try:
                self.loop.run()
            except BaseException as caught:
                error = caught
            ended(error)

        thread = threading.Thread(target=compute, name="compute", daemon=True)
        thread.start()
        return thread

    def is_idle(self) -> bool:
        """Returns whether it has no requests, and no other box has asked for its layers lately. From any thread."""
        runner = self.runner
        serves = runner.started_s is not None or runner.clock() - runner.stage_ended_s < STAGE_PAUSE_S
        return self.scheduler.idle and not serves

    @property
    def speculation(self) -> Speculation | None:
        """Returns the part that drafts tokens; None where the setting or the model has none."""
        return self.scheduler.speculation

    def compute_again(self, most: CacheRoom | None = None) -> None:
        """Computes the keys and values of all running requests again, and empties the prefix cache, before the next
        step. From then on no more places are used than `most` states. From any thread.
        """
        self.loop.call(partial(self._compute_again, most))

    def _compute_again(self, most: CacheRoom | None) -> None:
        self.scheduler.restart_all()
        if most is None:
            return
        budget = self._budget
        self.blocks.resize(min(budget.kv_blocks, most.blocks or budget.kv_blocks))
        if (windows := self._windows) is not None:
            count = min(budget.window_blocks, most.window_blocks or budget.window_blocks)
            windows.resize(max(least_blocks(windows.window), count))
        if (states := self._states) is not None:
            slots = max(LEAST_STATE_SLOTS, min(budget.state_slots, most.state_slots or budget.state_slots))
            self.max_sequences = min(self._most_sequences, (slots - 1) // 2)
            states.resize(slots, self.max_sequences)
            self.scheduler.max_sequences = self.max_sequences
        context_tokens = min(budget.context_tokens, self.blocks.count * BLOCK_TOKENS)
        self.limits = RequestLimits(context_tokens, self.limits.vocab)
        if self.speculation is not None:
            self.speculation.context_tokens = context_tokens
        self.loop.limit(self.limits)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers for /metrics by their final names. May be called from any thread."""
        metrics = engine_metrics(self.loop, self.scheduler, self.runner, self.blocks)
        for part in (self.speculation, self._windows):
            if part is not None:
                metrics |= part.metrics()
        return metrics

    def close(self) -> None:
        """Ends the grammar thread. Must be called after the loop has ended."""
        if self._grammars is not None:
            self._grammars.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless requests, queues, blocks and swapped blocks agree; between steps."""
        self.loop.check_integrity()

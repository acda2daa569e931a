"""The engine's numbers by their final names, for the front's /metrics page."""

from __future__ import annotations

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.loop import StepLoop
from edgemoe.engine.scheduler import Scheduler
from edgemoe.engine.step import PHASES, Runner
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named


def engine_metrics(loop: StepLoop, scheduler: Scheduler, runner: Runner, blocks: BlockManager) -> dict[str, float]:
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

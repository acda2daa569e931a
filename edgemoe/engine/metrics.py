"""The engine's numbers by their final names, for the front's /metrics page."""

from __future__ import annotations

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.loop import StepLoop
from edgemoe.engine.runner import PHASES, Runner
from edgemoe.engine.scheduler import Scheduler
from edgemoe.telemetry import metrics
from edgemoe.telemetry.metrics import named


def figures(loop: StepLoop, scheduler: Scheduler, runner: Runner, blocks: BlockManager) -> dict[str, float]:
    """Returns numbers of queues, blocks, steps and ended requests by metric name. May be called while a step runs."""
    values: dict[str, float] = {
        metrics.QUEUE_DEPTH: len(scheduler.waiting),
        metrics.REQUESTS_RUNNING: len(scheduler.running),
        metrics.REQUESTS_BLAMED: loop.steps.blamed,
        metrics.KV_BLOCKS: blocks.count,
        metrics.KV_BLOCKS_REFERENCED: blocks.count - blocks.free,
        metrics.PREFIX_HIT_TOKENS: scheduler.prefix_tokens["hit"],
        metrics.PREFIX_MISS_TOKENS: scheduler.prefix_tokens["miss"],
    }
    for way in ("park", "recompute"):
        values[named(metrics.PREEMPTIONS, way=way)] = scheduler.paused_total[way]
    for reason in ("stop", "length", "error", "cancelled"):
        values[named(metrics.REQUESTS_FINISHED, reason=reason)] = loop.finished[reason]
    for phase in PHASES:
        values[named(metrics.STEPS, phase=phase)] = runner.totals["steps", phase]
        values[named(metrics.STEP_SECONDS, phase=phase)] = runner.totals["seconds", phase]
        values[named(metrics.STEP_TOKENS, phase=phase)] = runner.totals["tokens", phase]
        values[named(metrics.ACTIVE_EXPERTS, phase=phase)] = runner.totals["experts", phase]
    return values

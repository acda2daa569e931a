"""The engine put together: blocks, scheduler, runner and step loop over a decoder and its experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from edgemoe.config.settings import EngineSettings
from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.chunk_budget import ChunkBudget
from edgemoe.engine.kv_swap import KVSwap
from edgemoe.engine.loop import Emit, StepLoop
from edgemoe.engine.metrics import figures
from edgemoe.engine.runner import Runner, StepDecoder, StepExperts
from edgemoe.engine.scheduler import Scheduler
from edgemoe.engine.validate import RequestLimits
from edgemoe.families.spec import ModelSpec
from edgemoe.types.routing import StepMeta, StepRouting
from edgemoe.types.step import BLOCK_TOKENS

if TYPE_CHECKING:
    from edgemoe.engine.grammar import Grammars


class Engine:
    """Runs requests: they are submitted to `loop`, and what they yield is handed to `emit`.

    Requests may be submitted from any thread; `emit` is called on the compute thread.
    """

    def __init__(
        self,
        decoder: StepDecoder,
        kv: Any,
        experts: StepExperts,
        spec: ModelSpec,
        settings: EngineSettings,
        emit: Emit,
        *,
        kv_blocks: int,
        context_tokens: int,
        device: torch.device,
        parking_bytes: int = 0,
        grammars: Grammars | None = None,
        observe: Callable[[StepRouting], None] | None = None,
        expect: Callable[[StepMeta], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        missing_expert_timeout_s: float = 0.0,
    ) -> None:
        """Composes an engine over a KV cache `kv` of `kv_blocks` blocks.

        `expect` is called before each step, `observe` after it with what the gates chose.
        A request whose expert is missing is retried for `missing_expert_timeout_s`, then it ends with an error.
        """
        self.blocks = BlockManager(kv_blocks, spec.layers, spec.experts, settings.prefix_cache)
        self.bounds = RequestLimits(min(context_tokens, kv_blocks * BLOCK_TOKENS), spec.vocab, grammars is not None)
        chunk_budget = ChunkBudget(settings.step_tokens, settings.mixed_step_s)
        kv_swap = None
        if settings.preemption == "park":
            kv_swap = KVSwap(kv, self.blocks, BLOCK_TOKENS * spec.kv_bytes_per_token, parking_bytes)
        self.scheduler = Scheduler(settings, self.blocks, chunk_budget, kv_swap)
        self.runner = Runner(decoder, kv, experts, self.blocks, chunk_budget, device, observe, expect=expect)
        self.loop = StepLoop(self.scheduler, self.runner, self.bounds, emit, grammars, clock, missing_expert_timeout_s)
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

    def figures(self) -> dict[str, float]:
        """Returns the numbers for /metrics by their final names. May be called from any thread."""
        return figures(self.loop, self.scheduler, self.runner, self.blocks)

    def close(self) -> None:
        """Ends the grammar thread. Must be called after the loop has ended."""
        if self._grammars is not None:
            self._grammars.close()

    def check_integrity(self) -> None:
        """Asserts that requests, queues, blocks and parked bytes agree. Must be called between steps."""
        self.loop.check_integrity()

"""Finds a model's sizes, by which budgets are divided, and links its kernels: for an engine and for `edgemoe plan`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from edgemoe.config.budgets import ModelNeeds
from edgemoe.config.settings import Settings
from edgemoe.experts import compiled_parts
from edgemoe.families.spec import ModelSpec
from edgemoe.jit.compile_process import CompileProcess
from edgemoe.jit.object_cache import CompileProgress, link
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.dense_weights import decoded_bytes
from edgemoe.store.layout import table_sizes
from edgemoe.types.encoding import Encoding
from edgemoe.types.step import BLOCK_TOKENS


class ReportPhase(Protocol):
    """Reports the phase of loading, the share of it that is done, and the current item."""

    def __call__(self, phase: str, fraction: float = 0.0, detail: str = "", /) -> None: ...


def kernel_dir(settings: Settings) -> Path | None:
    """Returns the folder of compiled kernels, beside the stores; None without one."""
    stores = settings.model.store_dir
    return Path(stores).with_name("kernels") if stores else None


def link_kernels(
    settings: Settings, threads: int, bf16: bool, report: ReportPhase, encodings: Iterable[Encoding] = ()
) -> Kernels:
    """Links the kernels, the code of rows of `encodings`, and the tiers' code. Compiles in two processes."""
    directory, progress, tiers = kernel_dir(settings), report_compiling(report, "kernels"), compiled_parts.TIERS
    in_bytes = settings.engine.prompt_activations == "int8"
    report("kernels")
    with closing(CompileProcess([tiers], f"{compiled_parts.__name__}:TIERS", directory)):
        kernels = Kernels(threads, bf16, directory, progress, in_bytes)
        for encoding in encodings:
            kernels.row_code(encoding)
        link(tiers.codes, directory, progress=progress)
    return kernels


def report_compiling(report: ReportPhase, phase: str) -> CompileProgress:
    """Returns a callback that reports each compiled function as progress of the phase."""
    return lambda name, done, count: report(phase, done / count, f"compiling {name}, {done + 1} of {count}")


def needs_of(spec: ModelSpec, dense_bytes: int) -> ModelNeeds:
    """Returns the sizes that budgets depend on; `dense_bytes` is the size of the file of dense weights."""
    experts, layout = spec.geometry, spec.kv_layout
    table_bytes, row_bytes = table_sizes(spec)
    return ModelNeeds(
        dense_bytes=dense_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token + -(-experts.layers * experts.experts // BLOCK_TOKENS),
        experts=experts,
        context_tokens=spec.context_tokens,
        state_bytes=spec.state_bytes,
        states_elsewhere=spec.has_states and not spec.state_layers,
        decoded_bytes=decoded_bytes(spec),
        window=layout.window,
        window_block_bytes=layout.window_block_bytes,
        table_bytes=table_bytes,
        row_bytes=row_bytes,
    )

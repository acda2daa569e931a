"""Compiles the kernels that `edgemoe plan` measures, in two processes side by side, for a limited time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from edgemoe.experts import compiled_parts
from edgemoe.experts.compiled_parts import TIERS, kernels_of, tiers_and_rows
from edgemoe.families.spec import ModelSpec
from edgemoe.jit.compile_process import CompileProcess
from edgemoe.jit.object_cache import CompiledPart, is_private, is_ready, link
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.types.encoding import Encoding, pair_of


class CompiledKernels:
    """The compiled code for models of one weight type in several encodings. `close` it after the last use."""

    def __init__(self, directory: Path | None, specs: Sequence[ModelSpec]) -> None:
        """Begins to compile. Without a private `directory`, keeps the code in a temporary folder until `close`."""
        with ExitStack() as stack:
            if directory is None or not is_private(directory):
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgemoe-")))
            self._directory, self._dtype, self._all_compiled = directory, specs[0].dtype, False
            names = dict.fromkeys(each.name for spec in specs for each in encodings_of(spec))
            self._processes = [
                stack.enter_context(closing(self._begin(kernels_of.__name__, [specs[0].dtype]))),
                stack.enter_context(closing(self._begin(tiers_and_rows.__name__, [specs[0].dtype, *names]))),
            ]
            self._resources = stack.pop_all()

    def _begin(self, function: str, arguments: Sequence[str]) -> CompileProcess:
        parts: list[CompiledPart] = getattr(compiled_parts, function)(*arguments)
        return CompileProcess(parts, f"{compiled_parts.__name__}:{function}", self._directory, arguments=arguments)

    def wait(self, ends_s: float) -> None:
        """Compiles until `ends_s` of `time.monotonic`."""
        self._all_compiled = all(process.wait(ends_s) for process in self._processes)
        for process in self._processes:  # one that went on would disturb the measurements
            process.close()

    def has_code(self, spec: ModelSpec) -> bool:
        """Whether all code for the model was compiled in time."""
        rows = tiers_and_rows(self._dtype, *(each.name for each in encodings_of(spec)))
        parts = [*kernels_of(self._dtype), *rows]
        return self._all_compiled or all(is_ready(part.codes, self._directory, part.variant) for part in parts)

    def link(self, threads: int, byte_activations: bool) -> Kernels:
        """Returns the kernels. Compiles them here if no process could."""
        kernels = Kernels(threads, self._dtype == "bfloat16", self._directory, byte_activations=byte_activations)
        link(TIERS.codes, self._directory)
        return kernels

    def close(self) -> None:
        """Ends the processes, and deletes the temporary folder."""
        self._resources.close()


def encodings_of(spec: ModelSpec) -> list[Encoding]:
    """Returns the encodings of a model's weights, each once."""
    names = (spec.dtype, spec.dense_encoding or spec.dtype, *spec.encodings)
    return list(dict.fromkeys(each for name in names for each in pair_of(name)))

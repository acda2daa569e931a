"""Launches the kernels of decode steps, or compiles them all beforehand, side by side.

A kernel begins while the one before it still runs, on GPUs that can [programmatic dependent launch]. It reads weights,
waits in `await_inputs`, and lets the next one begin. All that is older than the kernel before it can be read at once,
and nothing may be written before. Parameters of Triton functions have no annotations, which Triton would evaluate.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import triton.language as tl

from edgemoe.kernels.gpu.weights import jit

LEAST_CAPABILITY = 9  # Hopper


@jit
def await_inputs(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until the kernel before has ended and its outputs can be read; then lets the next kernel begin."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(device: Any) -> dict[str, bool]:
    """Returns the options of a launch on a device, for kernels that call `await_inputs`."""
    early = {"EARLY": True, "launch_pdl": True} if device.type == "cuda" and _can(device) else {"EARLY": False}
    return early | {"enable_fp_fusion": True}  # whose default depends on the release of Triton


@functools.cache
def _can(device: Any) -> bool:
    import torch

    return torch.cuda.get_device_capability(device)[0] >= LEAST_CAPABILITY


class KernelLaunch(NamedTuple):
    """A kernel, its grid and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def variant(self) -> tuple[Any, ...]:
        """Returns the types and constants by which the kernel is compiled."""
        return self.kernel, tuple(map(_kind, self.arguments)), tuple(sorted(self.named.items()))


def _kind(argument: Any) -> Any:
    """Returns a tensor's type, and whether it is aligned as Triton likes it; else the argument's type."""
    return (argument.dtype, argument.data_ptr() % 16) if hasattr(argument, "data_ptr") else type(argument)


_collecting = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launches a kernel on the current stream, or notes it within `collected`."""
    found: dict[Any, KernelLaunch] | None = getattr(_collecting, "found", None)
    if found is None:
        kernel[grid](*arguments, **named)
    else:
        noted = KernelLaunch(kernel, grid, arguments, named)
        found.setdefault(noted.variant, noted)


@contextlib.contextmanager
def collected() -> Iterator[dict[Any, KernelLaunch]]:
    """Notes the first of this thread's launches of each variant in the dict that it yields; none of them run."""
    found: dict[Any, KernelLaunch] = {}
    _collecting.found = found
    try:
        yield found
    finally:
        del _collecting.found


def compile_launches(launches: Iterable[KernelLaunch], device: Any, threads: int) -> None:
    """Compiles each kernel of the launches for a device and loads it. Raises Triton's errors."""

    def compile_one(each: KernelLaunch) -> None:
        import torch

        with torch.cuda.device(device):
            each.kernel.warmup(*each.arguments, grid=each.grid, **each.named)

    with ThreadPoolExecutor(threads, "edgemoe-triton") as pool:
        list(pool.map(compile_one, launches))

"""Lets a kernel begin while the one before it still runs, on GPUs that can [programmatic dependent launch].

A kernel first reads inputs that the kernel before it does not write, such as weights. Then it calls `await_inputs`,
which waits for that kernel and lets the next one begin. So everything older than the kernel before it is there from the
beginning, and no kernel may write before it has waited. Parameters of Triton functions have no annotations, because
Triton would evaluate them.
"""

from __future__ import annotations

import functools
from typing import Any

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

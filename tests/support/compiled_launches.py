"""Compiles kernels as steps of few rows launch them, for any GPU, on a machine without one."""

from __future__ import annotations

from typing import Any

import torch
import triton

from edgemoe.kernels.gpu.launches import KernelLaunch

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
WITHOUT_INPUTS = ("clear",)  # kernels that wait for no other
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compiled(launch: KernelLaunch, capability: int) -> Any:
    """Returns the launch's kernel compiled for a GPU of a capability, times 10."""
    names = launch.kernel.arg_names
    constants = {name: value for name, value in launch.named.items() if name not in OPTIONS}
    if "EARLY" in names:
        constants["EARLY"] = capability >= 90
    types = list(map(_type, launch.arguments))
    aligned = [at for at, argument in enumerate(launch.arguments) if isinstance(argument, torch.Tensor)]
    source = triton.compiler.ASTSource(
        launch.kernel,
        dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    options = {name: value for name, value in launch.named.items() if name in OPTIONS}
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)


def _type(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"

"""Records the kernels that steps of few rows launch on a GPU, and compiles them without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton

from edgemoe.kernels.gpu import decode_attention, decode_dense, decode_latent, decode_states, experts_decode

KERNELS = {
    decode_dense: ("product", "normalise", "place", "choose"),
    decode_latent: ("place_latent", "by_head"),
    decode_states: ("convolve", "delta", "mamba"),
    decode_attention: ("attend", "merge", "clear"),
    experts_decode: ("call_gate_up", "call_down", "combine", "to_planes"),
}
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


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments and the values of its constants."""

    kernel: Any
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def compiled(self, capability: int) -> Any:
        """Returns the kernel compiled for a GPU of a capability, times 10."""
        names = self.kernel.arg_names
        constants = dict(self.constants)
        if "EARLY" in names:
            constants["EARLY"] = capability >= 90
        signature = dict(zip(names, self.types, strict=False))
        pointers = [at for at, kind in enumerate(self.types) if kind.startswith("*")]
        source = triton.compiler.ASTSource(
            self.kernel,
            signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
        )
        target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"enable_fp_fusion": True} | dict(self.options))


class Recorder:
    """Stands for a kernel; notes its launches instead of running them."""

    def __init__(self, kernel: Any, into: set[Launch]) -> None:
        self._kernel, self._into = kernel, into

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self._note

    def _note(self, *arguments: Any, **named: Any) -> None:
        options = tuple((name, named.pop(name)) for name in OPTIONS if name in named)
        self._into.add(Launch(self._kernel, tuple(map(_type, arguments)), tuple(named.items()), options))


def _type(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


@contextlib.contextmanager
def recorded() -> Iterator[set[Launch]]:
    """Replaces all kernels of such steps; yields the launches as they come."""
    found: set[Launch] = set()
    with pytest.MonkeyPatch.context() as patch:
        for module, names in KERNELS.items():
            for name in names:
                patch.setattr(module, name, Recorder(getattr(module, name), found))
        yield found

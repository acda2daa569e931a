"""The kernels that take prompts through delta nets and Mamba-2 against torch's operations, and cut in other ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgemoe.families.state_mechanisms import DeltaHeads, MambaHeads
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.delta_net import DeltaNet
from edgemoe.model.kv import LayerStates, StepStates, TokenSpan
from edgemoe.model.mamba import Mamba

HIDDEN, TOKENS = 24, 150
NOTHING = torch.empty(0, dtype=torch.int64)
DELTA = [(4, 2, 8, 12, 4), (2, 2, 16, 80, 4), (2, 1, 128, 128, 2)]  # heads, key heads, widths, taps
MAMBA = [(4, 2, 8, 12, 4), (2, 1, 16, 80, 4), (3, 3, 128, 64, 2)]  # heads, groups, state, channels of a head, taps


class Reader:
    """Makes random weights of one layer, as a file's reader gives them."""

    def __init__(self, heads: Any, dtype: torch.dtype) -> None:
        self.number, self.attention = 0, SimpleNamespace(heads=heads)
        self.spec = SimpleNamespace(block=SimpleNamespace(eps=1e-6), state_layers=(0,))
        self._shapes, self._dtype = dict(heads.tensors(HIDDEN)), dtype

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = [torch.randn(self._shapes[name]) * (0.3 if "norm" not in name else 1.0) for name in names]
        return torch.cat(made).to(dtype or (torch.float32 if "norm" in names[0] else self._dtype))

    def matrix(self, *names: str) -> Any:
        rows = self.read(*names)
        return lambda x, bias=None: torch.nn.functional.linear(x, rows, bias)


def random_tokens(bf16: bool) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN).to(torch.bfloat16 if bf16 else torch.float32)


def make_layer(mechanism: str, sizes: tuple[int, ...], bf16: bool) -> Any:
    torch.manual_seed(sum(sizes))
    dtype = torch.bfloat16 if bf16 else torch.float32
    count, groups, dim, value_dim, taps = sizes
    if mechanism == "delta":
        return DeltaNet(Reader(DeltaHeads(count, groups, dim, value_dim=value_dim, taps=taps), dtype))  # type: ignore[arg-type]
    return Mamba(Reader(MambaHeads(count, groups, dim, value_dim=value_dim, taps=taps), dtype))  # type: ignore[arg-type]


def run(layer: Any, x: torch.Tensor, kernels: Kernels | None, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs, and the states after each of the runs of tokens that end there."""
    heads = layer.heads
    tail, matrices = (heads.taps - 1) * heads.channels, heads.count * heads.dim * heads.value_dim
    data = torch.full((len(ends) + 2, tail + matrices), torch.nan)
    data[1] = torch.randn(data.shape[1], generator=torch.Generator().manual_seed(3))
    views = [part.contiguous() for part in (data[:, :tail], data[:, tail:])]
    states = LayerStates(
        views[0].view(len(data), heads.taps - 1, heads.channels),
        views[1].view(len(data), heads.count, heads.dim, heads.value_dim),
    )
    spans = [
        TokenSpan(first, after, k + 1, k + 2) for k, (first, after) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    step: Any = SimpleNamespace(kernels=kernels, states=StepStates(NOTHING, NOTHING, NOTHING, spans))
    step.kv = SimpleNamespace(states=SimpleNamespace(layer=lambda _: states))
    out = layer(x, step)
    return out, torch.cat([part[2:].flatten(1) for part in states], dim=1)


LAYERS = [*(("delta", sizes) for sizes in DELTA), *(("mamba", sizes) for sizes in MAMBA)]
CASES = [pytest.param(*case, id=f"{case[0]}-{case[1][2]}x{case[1][3]}") for case in LAYERS]


@pytest.mark.parametrize(("mechanism", "sizes"), CASES)
@torch.inference_mode()
def test_a_prompt_gets_the_results_of_torch(kernels: Kernels, mechanism: str, sizes: tuple[int, ...]) -> None:
    layer, x = make_layer(mechanism, sizes, kernels.bf16), random_tokens(kernels.bf16)
    theirs, left = run(layer, x, None, [100, TOKENS])
    ours, kept = run(layer, x, kernels, [100, TOKENS])
    within = {"atol": 2e-2, "rtol": 2e-2} if kernels.bf16 else {"atol": 2e-5, "rtol": 2e-4}
    torch.testing.assert_close(ours, theirs, **within)
    torch.testing.assert_close(kept, left, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(("mechanism", "sizes"), CASES)
@torch.inference_mode()
def test_a_prompt_gets_the_same_bits_however_it_is_cut(
    kernels: Kernels, mechanism: str, sizes: tuple[int, ...]
) -> None:
    layer, x = make_layer(mechanism, sizes, kernels.bf16), random_tokens(kernels.bf16)
    whole, after = run(layer, x, kernels, [TOKENS])
    cut, later = run(layer, x, kernels, [1, 2, 5, 70, 71, TOKENS])
    assert torch.equal(cut, whole)
    assert torch.equal(later[-1], after[-1])

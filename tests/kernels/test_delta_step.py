"""The kernel of gated delta nets against their definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.stage_kit import new_step, run_stage
from torch.nn.functional import rms_norm, silu, softplus

from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.kernels.cpu.state_step import DELTA, advance_delta, scratch_floats

EPS = 1e-6


class Case:
    """Random inputs, weights and states."""

    def __init__(self, tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int) -> None:
        torch.manual_seed(tokens)
        self.sizes = {"tokens": tokens, "key_heads": key_heads, "value_heads": value_heads}
        self.sizes |= {"key_dim": key_dim, "value_dim": value_dim, "taps": taps}
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.channels = 2 * keys + values
        self.sizes |= {"channels": self.channels}
        self.projected, self.own = torch.randn(tokens, self.channels + values), torch.randn(tokens, 2 * value_heads)
        self.convolution = torch.randn(taps, self.channels)
        self.rates, self.dt_bias = torch.rand(value_heads) * 16, torch.randn(value_heads) * 8
        self.norm = torch.rand(value_dim)
        self.tail_floats = (taps - 1) * self.channels
        self.slots = torch.randn(2 * tokens + 1, self.tail_floats + value_heads * key_dim * value_dim)
        order = torch.randperm(2 * tokens + 1)
        self.reads, self.writes = order[:tokens].clone(), order[tokens : 2 * tokens].clone()
        self.out = torch.empty(tokens, values)

    def run(self, kernels: Kernels) -> None:
        job = np.zeros(1, DELTA)
        for name, size in self.sizes.items():
            if name != "tokens":
                job[name] = size
        for name in ("projected", "own", "convolution", "rates", "dt_bias", "norm", "reads", "writes", "out"):
            job[name] = getattr(self, name).data_ptr()
        job["tails"], job["matrices"] = self.slots.data_ptr(), self.slots.data_ptr() + 4 * self.tail_floats
        job["slot_stride"], job["eps"] = self.slots.stride(0) * 4, EPS
        floats = scratch_floats(*(self.sizes[name] for name in ("tokens", "value_heads", "key_dim", "value_dim")))
        job["scratch"] = kernels.scratch("delta", floats)
        run_stage(kernels, new_step(self.sizes["tokens"]), advance_delta, job, each=self.sizes["value_heads"])

    def reference(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the output and the slot of one token."""
        heads, dim, n, taps = (self.sizes[name] for name in ("value_heads", "key_dim", "value_dim", "taps"))
        slot, line = self.slots[self.reads[token]].double(), self.projected[token].double()
        window = torch.cat([slot[: self.tail_floats].view(taps - 1, -1), line[None, : self.channels]])
        mixed = silu((window * self.convolution).sum(0))
        keys = self.sizes["key_heads"] * dim
        q, k, v = mixed.split([keys, keys, self.channels - 2 * keys])
        q, k = (
            part.view(-1, dim) / (part.view(-1, dim).square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k)
        )
        q, k = (part.repeat_interleave(heads // len(part), dim=0) for part in (q / dim**0.5, k))
        gate, (beta, step) = line[self.channels :], self.own[token].double().chunk(2)
        state = (
            slot[self.tail_floats :].view(heads, dim, n)
            * (-self.rates * softplus(step + self.dt_bias)).exp()[:, None, None]
        )
        change = beta.sigmoid()[:, None] * (v.view(heads, n) - (k[:, None] @ state)[:, 0])
        state = state + k[:, :, None] * change[:, None]
        out = rms_norm((q[:, None] @ state)[:, 0], (n,), self.norm.double(), EPS) * silu(gate.view(heads, n))
        return out.flatten(), torch.cat([window[1:].flatten(), state.flatten()])


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("sizes", [(2, 4, 128, 128, 4), (2, 2, 16, 48, 4), (1, 3, 6, 5, 3), (3, 3, 4, 12, 2)])
def test_a_step_equals_its_definition_and_touches_no_other_slot(
    kernels: Kernels, tokens: int, sizes: tuple[int, int, int, int, int]
) -> None:
    case = Case(tokens, *sizes)
    before = case.slots.clone()
    expected = [case.reference(token) for token in range(tokens)]
    case.run(kernels)
    for token, (out, slot) in enumerate(expected):
        torch.testing.assert_close(case.out[token].double(), out, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(case.slots[case.writes[token]].double(), slot, atol=2e-5, rtol=2e-5)
    untouched = [slot for slot in range(len(before)) if slot not in case.writes]
    assert torch.equal(case.slots[untouched], before[untouched])


def test_a_token_gets_the_same_bits_alone_and_in_company(kernels: Kernels) -> None:
    whole = Case(5, 2, 4, 16, 16, 4)
    whole.run(kernels)
    alone = Case(5, 2, 4, 16, 16, 4)
    alone.sizes["tokens"] = 1
    alone.projected, alone.own = alone.projected[3:], alone.own[3:]
    alone.reads, alone.writes = alone.reads[3:], alone.writes[3:]
    alone.run(kernels)
    assert torch.equal(alone.out[0], whole.out[3])
    assert torch.equal(alone.slots[alone.writes[0]], whole.slots[whole.writes[3]])

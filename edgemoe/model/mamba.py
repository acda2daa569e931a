"""Computes Mamba-2 layers over states in slots [Mamba-2]: the mechanism "mamba".

The state of each head is a matrix S [state, value_dim]. A token makes it a S + B (dt x)^T, and reads C S + D x. Single
tokens use that recurrence, prompts chunks of CHUNK tokens. States are float32 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from edgemoe.families.state_mechanisms import MambaHeads
from edgemoe.kernels.cpu.prefill_states import make_mamba_span
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.kernels.cpu.state_scan import TOGETHER
from edgemoe.model.attention import StepContext
from edgemoe.model.dense_weights import LayerReader, read_taps, rms_norm
from edgemoe.model.kv import LayerStates, StepStates, convolve
from edgemoe.model.state_spans import StateSpans

CHUNK = 64  # tokens


@dataclass(frozen=True, slots=True)
class MambaInputs:
    """The tokens' inputs to the states and outputs of them, all float32."""

    b: torch.Tensor  # [T, heads, state]
    c: torch.Tensor  # [T, heads, state]
    x: torch.Tensor  # [T, heads, value_dim], times the steps of time
    decay: torch.Tensor  # [T, heads]: log a, never above 0

    def rows(self, rows: slice | torch.Tensor) -> MambaInputs:
        return MambaInputs(self.b[rows], self.c[rows], self.x[rows], self.decay[rows])


class Mamba:
    """One layer's Mamba-2."""

    def __init__(self, reader: LayerReader) -> None:
        heads = reader.attention.heads
        assert isinstance(heads, MambaHeads)
        self.heads, self.eps = heads, reader.spec.block.eps
        self.number = reader.spec.state_layers.index(reader.number)

        def vector(name: str) -> torch.Tensor:
            return reader.read(f"mamba.{name}", dtype=torch.float32)

        self.project = reader.matrix("mamba.in_proj.weight")  # [values + channels + heads, H]
        self.taps = read_taps(reader, "mamba.conv1d.weight")
        self.bias = vector("conv1d.bias") if heads.conv_bias else None
        self.rates, self.skip, self.dt_bias = vector("A_log").exp_(), vector("D"), vector("dt_bias")
        self.norm, self.out = vector("norm.weight"), reader.matrix("mamba.out_proj.weight")
        self.project_bias = self.out_bias = None
        if heads.biases:
            self.project_bias, self.out_bias = reader.read("mamba.in_proj.bias"), reader.read("mamba.out_proj.bias")
        self._spans: StateSpans | None = None

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype, and writes the states."""
        assert step.kv.states is not None
        states, projected = step.kv.states.layer(self.number), self.project(x, self.project_bias)
        if step.kernels is not None and not self.heads.dim % TOGETHER:
            if self._spans is None:
                self._spans = self._by_kernels(step.kernels)
            own = torch.empty((len(x), 2 * self.heads.count))
            return self.out(self._spans.run(projected, own, step.states, states), self.out_bias)
        return self.out(self._by_torch(projected.float(), step.states, states).to(x.dtype), self.out_bias)

    def _by_kernels(self, kernels: Kernels) -> StateSpans:
        heads = self.heads
        tensors = {"convolution": self.taps, "conv_bias": self.bias, "rates": self.rates, "dt_bias": self.dt_bias}
        tensors |= {"skip": self.skip, "norm": self.norm}
        return StateSpans(
            kernels,
            make_mamba_span(kernels.bf16),
            groups=heads.kv_count,
            first=heads.values,
            given=heads.values,
            asked=heads.values + heads.shared,
            eps=self.eps,
            **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
        )

    def _by_torch(self, projected: torch.Tensor, step: StepStates, states: LayerStates) -> torch.Tensor:
        heads, count = self.heads, len(projected)
        gate, mixed, dt = torch.split(projected, [heads.values, heads.channels, heads.count], dim=1)
        mixed = convolve(mixed, self.taps, step, states)
        mixed = silu(mixed if self.bias is None else mixed + self.bias)
        values, b, c = torch.split(mixed, [heads.values, heads.shared, heads.shared], dim=1)
        values = values.view(count, heads.count, heads.value_dim)
        inputs = self._inputs(values, b, c, softplus(dt + self.dt_bias))
        out = torch.empty_like(values)
        if len(step.rows):
            memory, out[step.rows] = recur(inputs.rows(step.rows), states.matrices[step.reads])
            states.matrices[step.writes] = memory
        for part in step.spans:
            tokens = slice(part.first, part.after)
            states.matrices[part.write], out[tokens] = chunked(inputs.rows(tokens), states.matrices[part.read])
        out = out + self.skip[:, None] * values
        grouped = (out.flatten(1) * silu(gate)).view(count, heads.kv_count, -1)
        return rms_norm(grouped, None, self.eps).flatten(1) * self.norm

    def _inputs(self, values: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor) -> MambaInputs:
        heads = self.heads
        b, c = (
            part.view(len(part), heads.kv_count, heads.dim).repeat_interleave(heads.count // heads.kv_count, dim=1)
            for part in (b, c)
        )
        return MambaInputs(b, c, values * dt[..., None], -self.rates * dt)


def recur(new: MambaInputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns states [S, heads, state, value_dim] after one token each, and the outputs [S, heads, value_dim]."""
    states = states * new.decay.exp()[..., None, None] + new.b[..., :, None] * new.x[..., None, :]
    return states, (new.c[..., None, :] @ states)[..., 0, :]


def chunked(new: MambaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state [heads, state, value_dim] after a sequence's next tokens, and the outputs [T, heads, D]."""
    outputs = []
    for first in range(0, len(new.x), CHUNK):
        state, out = _chunk(new.rows(slice(first, first + CHUNK)), state)
        outputs.append(out)
    return state, torch.cat(outputs)


def _chunk(new: MambaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    b, c, x = (part.transpose(0, 1) for part in (new.b, new.c, new.x))  # [heads, t, D]
    total = new.decay.T.cumsum(1)  # [heads, t]: log A
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, t, t]: A_i / A_j, j <= i
    grown = total.exp()[..., None]
    out = grown * (c @ state) + (c @ b.mT * between) @ x
    left = (total[:, -1:] - total).exp()[..., None]  # [heads, t, 1]: the decay of each input until the chunk's end
    return grown[:, -1:] * state + (left * b).mT @ x, out.transpose(0, 1)

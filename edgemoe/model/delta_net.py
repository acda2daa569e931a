"""Computes gated delta net layers over states in slots [GatedDeltaNet, Eq. 10].

The state of each value head is a matrix S [key_dim, value_dim]. Single tokens use the recurrence, prompts chunks of
CHUNK tokens (Section 3.3). States are float32 throughout. docs/design/kernels.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu, softplus

from edgemoe.families.state_mechanisms import DeltaHeads
from edgemoe.kernels.cpu.prefill_states import make_delta_span
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.kernels.cpu.state_scan import TOGETHER
from edgemoe.model.attention import StepContext
from edgemoe.model.dense_weights import DenseMatrix, LayerReader, read_taps, rms_norm
from edgemoe.model.kv import LayerStates, StepStates, convolve
from edgemoe.model.state_spans import StateSpans

CHUNK = 64  # tokens
NORM_EPS = 1e-6  # of queries and keys, independent of the model's own


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """One layer's weights: matrices in the model's dtype, the others in float32."""

    project: DenseMatrix  # [channels + values, H]: queries, keys, values, output gate
    own: torch.Tensor  # [2 * count, H]: beta and decay of each value head
    convolution: torch.Tensor  # [taps, channels], the current token's last
    rates: torch.Tensor  # [value_heads]: exp(A_log)
    dt_bias: torch.Tensor  # [value_heads]
    norm: torch.Tensor  # [value_dim]
    out: DenseMatrix  # [H, values]


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The tokens' inputs to the states. Queries and keys are normalised, queries scaled too; all float32."""

    q: torch.Tensor  # [T, value_heads, key_dim]
    k: torch.Tensor  # [T, value_heads, key_dim]
    v: torch.Tensor  # [T, value_heads, value_dim]
    decay: torch.Tensor  # [T, value_heads]: log a, never above 0
    beta: torch.Tensor  # [T, value_heads]

    def rows(self, rows: slice | torch.Tensor) -> DeltaInputs:
        return DeltaInputs(self.q[rows], self.k[rows], self.v[rows], self.decay[rows], self.beta[rows])


class DeltaNet:
    """One layer's gated delta net."""

    def __init__(self, reader: LayerReader) -> None:
        heads = reader.attention.heads
        assert isinstance(heads, DeltaHeads)
        self.heads, self.eps, self.number = (
            heads,
            reader.spec.block.eps,
            reader.spec.state_layers.index(reader.number),
        )
        if heads.grouped:
            project = reader.matrix("linear_attn.in_proj_qkvz.weight")
            own = reader.read("linear_attn.in_proj_ba.weight")
            for rows, order in zip((project.rows, own), heads.order(), strict=True):
                rows.copy_(rows[order])
        else:
            project = reader.matrix("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight")
            own = reader.read("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight")
        self.weights = DeltaWeights(
            project=project,
            own=own,
            convolution=read_taps(reader, "linear_attn.conv1d.weight"),
            rates=reader.read("linear_attn.A_log", dtype=torch.float32).exp_(),
            dt_bias=reader.read("linear_attn.dt_bias", dtype=torch.float32),
            norm=reader.read("linear_attn.norm.weight"),
            out=reader.matrix("linear_attn.out_proj.weight"),
        )
        self._spans: StateSpans | None = None

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype, and writes the states."""
        assert step.kv.states is not None
        layer = step.kv.states.layer(self.number)
        return self._advance(x, step, layer)

    def _advance(self, x: torch.Tensor, step: StepContext, layer: LayerStates) -> torch.Tensor:
        weights = self.weights
        projected, own = weights.project(x), linear(x, weights.own)
        if step.kernels is not None and not self.heads.dim % TOGETHER:
            if self._spans is None:
                self._spans = self._by_kernels(step.kernels)
            return weights.out(self._spans.run(projected, own.float(), step.states, layer))
        return weights.out(self._by_torch(projected, own, step.states, layer).to(x.dtype))

    def _by_kernels(self, kernels: Kernels) -> StateSpans:
        heads, weights = self.heads, self.weights
        tensors = ("convolution", "rates", "dt_bias", "norm")
        return StateSpans(
            kernels,
            make_delta_span(kernels.bf16),
            groups=heads.kv_count,
            given=heads.keys,
            values=2 * heads.keys,
            corrects=1,
            gates=heads.channels,
            eps=self.eps,
            **{name: getattr(weights, name).data_ptr() for name in tensors},
        )

    def _by_torch(
        self, projected: torch.Tensor, own: torch.Tensor, step: StepStates, states: LayerStates
    ) -> torch.Tensor:
        heads, weights = self.heads, self.weights
        mixed, gate = torch.split(projected, [heads.channels, heads.values], dim=1)
        beta, decay = own.chunk(2, dim=1)
        mixed = convolve(mixed.float(), weights.convolution, step, states)
        inputs = self._inputs(silu(mixed), beta.float(), decay.float())
        out = torch.empty_like(inputs.v)
        if len(step.rows):
            memory, out[step.rows] = recur(inputs.rows(step.rows), states.matrices[step.reads])
            states.matrices[step.writes] = memory
        for part in step.spans:
            rows = slice(part.first, part.after)
            states.matrices[part.write], out[rows] = chunked(inputs.rows(rows), states.matrices[part.read])
        gated = rms_norm(out, weights.norm, self.eps) * silu(gate.float().view_as(out))
        return gated.flatten(1)

    def _inputs(self, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor) -> DeltaInputs:
        heads, weights = self.heads, self.weights
        q, k, v = torch.split(mixed, [heads.keys, heads.keys, heads.values], dim=1)
        q, k = (_unit(part.view(len(mixed), -1, heads.dim)) for part in (q, k))
        share = heads.count // heads.kv_count
        return DeltaInputs(
            q=(q * heads.dim**-0.5).repeat_interleave(share, dim=1),
            k=k.repeat_interleave(share, dim=1),
            v=v.view(len(mixed), -1, heads.value_dim),
            decay=-weights.rates * softplus(decay + weights.dt_bias),
            beta=beta.sigmoid(),
        )


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def recur(new: DeltaInputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns states [S, heads, key_dim, value_dim] after one token each, and the outputs [S, heads, value_dim]."""
    states = states * new.decay.exp()[..., None, None]
    known = (new.k[..., None, :] @ states)[..., 0, :]
    states += new.k[..., :, None] * (new.beta[..., None] * (new.v - known))[..., None, :]
    return states, (new.q[..., None, :] @ states)[..., 0, :]


def chunked(new: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state [heads, key_dim, value_dim] after a sequence's next tokens, and the outputs [T, heads, D]."""
    outputs = []
    for first in range(0, len(new.q), CHUNK):
        state, out = _chunk(new.rows(slice(first, first + CHUNK)), state)
        outputs.append(out)
    return state, torch.cat(outputs)


def _chunk(new: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (part.transpose(0, 1) for part in (new.q, new.k, new.v))  # [heads, t, D]
    total = new.decay.T.cumsum(1)  # [heads, t]: log A
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, t, t]: A_i / A_j, j <= i
    grown, beta = total.exp()[..., None], new.beta.T[..., None]
    # (I + tril(b K K^T A_i / A_j, -1)) W = b (V - A K S): the update by each token
    system = (beta * (k @ k.mT)) * between
    writes = torch.linalg.solve_triangular(system, beta * (v - grown * (k @ state)), upper=False, unitriangular=True)
    out = grown * (q @ state) + (q @ k.mT * between) @ writes
    left = (total[:, -1:] - total).exp()[..., None]  # [heads, t, 1]: the decay of each update until the chunk's end
    return grown[:, -1:] * state + (left * k).mT @ writes, out.transpose(0, 1)

"""Computes gated delta net layers over states in slots [GatedDeltaNet].

Each value head remembers a matrix S [key_dim, value_dim]. A token with query q, key k (both of length 1), value v,
decay a and rate b changes it and reads it:

    S = a S + k (b (v - (a S)^T k))^T,    out = S^T q / sqrt(key_dim)                                    (Eq. 10)

Single tokens do just that. Prompts are computed in chunks of CHUNK tokens: with the decays of a chunk multiplied up to
A_i, what token i writes beyond what the state at the chunk's start predicts follows from a triangular system, and the
rest is matrix products (Section 3.3). States are float32 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, silu, softplus

from edgemoe.families.delta import DeltaSpec
from edgemoe.model.states import LayerStates
from edgemoe.types.step import Batch

CHUNK = 64  # tokens
NORM_EPS = 1e-6  # of queries and keys, whatever the model's own is


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """One layer's weights: matrices in the model's dtype, the others in float32."""

    project: torch.Tensor  # [spec.rows, H]: queries, keys, values, output gate, beta, decay
    convolution: torch.Tensor  # [taps, channels], the current token's last
    rates: torch.Tensor  # [value_heads]: exp(A_log)
    dt_bias: torch.Tensor  # [value_heads]
    norm: torch.Tensor  # [value_dim]
    out: torch.Tensor  # [H, values]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of one sequence's tokens: rows first:after of the step, and the slots of the state before and after."""

    first: int
    after: int
    read: int
    write: int


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What tokens bring to the states. Queries and keys are normalised, queries scaled too; all float32."""

    q: torch.Tensor  # [T, value_heads, key_dim]
    k: torch.Tensor  # [T, value_heads, key_dim]
    v: torch.Tensor  # [T, value_heads, value_dim]
    decay: torch.Tensor  # [T, value_heads]: log a, never above 0
    beta: torch.Tensor  # [T, value_heads]

    def rows(self, rows: slice | torch.Tensor) -> DeltaInputs:
        return DeltaInputs(self.q[rows], self.k[rows], self.v[rows], self.decay[rows], self.beta[rows])


class StepDelta:
    """Computes the gated delta nets of one step, with the slots and rows that all layers share."""

    def __init__(self, spec: DeltaSpec, eps: float, batch: Batch, device: torch.device) -> None:
        self._spec, self._eps = spec, eps
        starts = np.cumsum([0, *batch.query_lens]).tolist()
        used = list(zip(batch.states, starts, batch.query_lens, strict=False))
        single = [(start, use.read, use.writes[-1][1]) for use, start, count in used if count == 1]
        rows = torch.tensor(single, dtype=torch.int64, device=device).view(-1, 3)
        self._rows, self._reads, self._writes = rows.unbind(1)
        self._segments: list[Stretch] = []
        for use, start, count in used:
            done, read = 0, use.read
            for after, slot in use.writes if count > 1 else ():
                self._segments.append(Stretch(start + done, start + after, read, slot))
                done, read = after, slot

    def __call__(self, layer: DeltaWeights, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """Returns the layer's output [T, H] in the model's dtype for its normalised input x, and writes the states."""
        spec = self._spec
        widths = [spec.channels, spec.values, spec.value_heads, spec.value_heads]
        mixed, gate, beta, decay = torch.split(linear(x, layer.project), widths, dim=1)
        inputs = self._inputs(layer, self._convolve(layer, mixed.float(), states), beta.float(), decay.float())
        out = torch.empty_like(inputs.v)
        if len(self._rows):
            memory, out[self._rows] = recur(inputs.rows(self._rows), states.matrices[self._reads])
            states.matrices[self._writes] = memory
        for part in self._segments:
            rows = slice(part.first, part.after)
            states.matrices[part.write], out[rows] = chunked(inputs.rows(rows), states.matrices[part.read])
        gated = rms_norm(out, out.shape[-1:], layer.norm, self._eps) * silu(gate.float().view_as(out))
        return linear(gated.flatten(1).to(x.dtype), layer.out)

    def _convolve(self, layer: DeltaWeights, mixed: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """Returns silu of the causal convolution of `mixed` [T, channels], and writes the tails."""
        out = torch.empty_like(mixed)
        if len(self._rows):
            window = torch.cat([states.tails[self._reads], mixed[self._rows, None]], dim=1)  # [S, taps, channels]
            out[self._rows] = (window * layer.convolution).sum(1)
            states.tails[self._writes] = window[:, 1:]
        for part in self._segments:
            line = torch.cat([states.tails[part.read], mixed[part.first : part.after]])  # [taps - 1 + t, channels]
            count = part.after - part.first
            taps = (line[tap : tap + count] * weight for tap, weight in enumerate(layer.convolution))
            out[part.first : part.after] = sum(taps)
            states.tails[part.write] = line[count:]
        return silu(out)

    def _inputs(self, layer: DeltaWeights, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor) -> DeltaInputs:
        spec = self._spec
        q, k, v = torch.split(mixed, [spec.keys, spec.keys, spec.values], dim=1)
        q, k = (_unit(part.view(len(mixed), -1, spec.key_dim)) for part in (q, k))
        share = spec.value_heads // spec.key_heads
        return DeltaInputs(
            q=(q * spec.key_dim**-0.5).repeat_interleave(share, dim=1),
            k=k.repeat_interleave(share, dim=1),
            v=v.view(len(mixed), -1, spec.value_dim),
            decay=-layer.rates * softplus(decay + layer.dt_bias),
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
    # (I + tril(b K K^T A_i / A_j, -1)) W = b (V - A K S): what each token writes
    system = (beta * (k @ k.mT)) * between
    writes = torch.linalg.solve_triangular(system, beta * (v - grown * (k @ state)), upper=False, unitriangular=True)
    out = grown * (q @ state) + (q @ k.mT * between) @ writes
    left = (total[:, -1:] - total).exp()[..., None]  # [heads, t, 1]: what is left of each write at the chunk's end
    return grown[:, -1:] * state + (left * k).mT @ writes, out.transpose(0, 1)

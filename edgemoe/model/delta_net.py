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
import numpy.typing as npt
import torch
from torch.nn.functional import linear, rms_norm, silu, softplus

from edgemoe.families.delta import DeltaSpec
from edgemoe.kernels.cpu.delta_step import DELTA, scratch_floats
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.states import LayerStates, StepStates

CHUNK = 64  # tokens
KERNEL_TOKENS = 16  # at most; with more, torch's products are faster
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
class DeltaInputs:
    """What tokens bring to the states. Queries and keys are normalised, queries scaled too; all float32."""

    q: torch.Tensor  # [T, value_heads, key_dim]
    k: torch.Tensor  # [T, value_heads, key_dim]
    v: torch.Tensor  # [T, value_heads, value_dim]
    decay: torch.Tensor  # [T, value_heads]: log a, never above 0
    beta: torch.Tensor  # [T, value_heads]

    def rows(self, rows: slice | torch.Tensor) -> DeltaInputs:
        return DeltaInputs(self.q[rows], self.k[rows], self.v[rows], self.decay[rows], self.beta[rows])


class DeltaNet:
    """One layer's gated delta net."""

    def __init__(self, spec: DeltaSpec, eps: float, weights: DeltaWeights) -> None:
        self._spec, self._eps, self._weights = spec, eps, weights
        self._record: npt.NDArray[np.void] | None = None  # of the kernel, as far as it is the same for each step

    def __call__(
        self, x: torch.Tensor, step: StepStates, states: LayerStates, kernels: Kernels | None = None
    ) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype, and writes the states.

        `kernels` compute the steps in which every sequence has one token.
        """
        if kernels is not None and not step.stretches and len(x) <= KERNEL_TOKENS:
            return self._by_kernel(x, step, states, kernels)
        spec, weights = self._spec, self._weights
        widths = [spec.channels, spec.values, spec.value_heads, spec.value_heads]
        mixed, gate, beta, decay = torch.split(linear(x, weights.project), widths, dim=1)
        inputs = self._inputs(self._convolve(mixed.float(), step, states), beta.float(), decay.float())
        out = torch.empty_like(inputs.v)
        if len(step.rows):
            memory, out[step.rows] = recur(inputs.rows(step.rows), states.matrices[step.reads])
            states.matrices[step.writes] = memory
        for part in step.stretches:
            rows = slice(part.first, part.after)
            states.matrices[part.write], out[rows] = chunked(inputs.rows(rows), states.matrices[part.read])
        gated = rms_norm(out, out.shape[-1:], weights.norm, self._eps) * silu(gate.float().view_as(out))
        return linear(gated.flatten(1).to(x.dtype), weights.out)

    def _by_kernel(self, x: torch.Tensor, step: StepStates, states: LayerStates, kernels: Kernels) -> torch.Tensor:
        spec, weights, tokens = self._spec, self._weights, len(x)
        if self._record is None:
            self._record = self._fixed()
        job, floats = self._record, scratch_floats(tokens, spec.value_heads, spec.key_dim, spec.value_dim)
        projected, out = torch.empty(tokens, spec.rows), torch.empty(tokens, spec.values)
        result = torch.empty(tokens, x.shape[1])
        is_bf16 = x.dtype == torch.bfloat16
        kernels.linear(
            weights.project.data_ptr(), spec.rows, x.shape[1], x.data_ptr(), is_bf16, tokens, projected.data_ptr()
        )
        job["tokens"], job["projected"], job["out"] = tokens, projected.data_ptr(), out.data_ptr()
        job["reads"], job["writes"] = step.reads.data_ptr(), step.writes.data_ptr()
        job["tails"], job["matrices"] = states.tails.data_ptr(), states.matrices.data_ptr()
        job["slot_stride"], job["scratch"] = states.tails.stride(0) * 4, kernels.scratch("delta", floats)
        kernels.delta(job.ctypes.data)
        kernels.linear(
            weights.out.data_ptr(), x.shape[1], spec.values, out.data_ptr(), False, tokens, result.data_ptr()
        )
        return result.to(x.dtype)

    def _fixed(self) -> npt.NDArray[np.void]:
        """Returns the DELTA record with the sizes and weights of the layer."""
        job, spec, weights = np.zeros(1, DELTA), self._spec, self._weights
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps", "rows", "channels"):
            job[name] = getattr(spec, name)
        for name in ("convolution", "rates", "dt_bias", "norm"):
            job[name] = getattr(weights, name).data_ptr()
        job["eps"] = self._eps
        return job

    def _convolve(self, mixed: torch.Tensor, step: StepStates, states: LayerStates) -> torch.Tensor:
        """Returns silu of the causal convolution of `mixed` [T, channels], and writes the tails."""
        out, convolution = torch.empty_like(mixed), self._weights.convolution
        if len(step.rows):
            window = torch.cat([states.tails[step.reads], mixed[step.rows, None]], dim=1)  # [S, taps, channels]
            out[step.rows] = (window * convolution).sum(1)
            states.tails[step.writes] = window[:, 1:]
        for part in step.stretches:
            line = torch.cat([states.tails[part.read], mixed[part.first : part.after]])  # [taps - 1 + t, channels]
            count = part.after - part.first
            taps = (line[tap : tap + count] * weight for tap, weight in enumerate(convolution))
            out[part.first : part.after] = sum(taps)
            states.tails[part.write] = line[count:]
        return silu(out)

    def _inputs(self, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor) -> DeltaInputs:
        spec, weights = self._spec, self._weights
        q, k, v = torch.split(mixed, [spec.keys, spec.keys, spec.values], dim=1)
        q, k = (_unit(part.view(len(mixed), -1, spec.key_dim)) for part in (q, k))
        share = spec.value_heads // spec.key_heads
        return DeltaInputs(
            q=(q * spec.key_dim**-0.5).repeat_interleave(share, dim=1),
            k=k.repeat_interleave(share, dim=1),
            v=v.view(len(mixed), -1, spec.value_dim),
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
    # (I + tril(b K K^T A_i / A_j, -1)) W = b (V - A K S): what each token writes
    system = (beta * (k @ k.mT)) * between
    writes = torch.linalg.solve_triangular(system, beta * (v - grown * (k @ state)), upper=False, unitriangular=True)
    out = grown * (q @ state) + (q @ k.mT * between) @ writes
    left = (total[:, -1:] - total).exp()[..., None]  # [heads, t, 1]: what is left of each write at the chunk's end
    return grown[:, -1:] * state + (left * k).mT @ writes, out.transpose(0, 1)

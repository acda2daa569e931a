"""Takes a step's sequences through a layer with states on the CPU, by the kernels of `prefill_states`."""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.jit.object_cache import Code
from edgemoe.kernels.cpu.prefill_states import STATE_SPAN, carry_state, parts, scratch_floats
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.kv import LayerStates, StepStates, TokenSpan


class StateSpans:
    """Runs the tokens of each sequence of a step through one layer."""

    def __init__(self, kernels: Kernels, passes: tuple[Code, Code], **fields: int | float) -> None:
        """Takes the first and the last pass, and fields of the layer's STATE_SPAN record."""
        self._kernels = kernels
        self._mix, self._gate = (kernels.stage_address(each) for each in passes)
        self._carry = kernels.stage_address(carry_state)
        self._job = np.zeros(1, STATE_SPAN)
        for name, value in fields.items():
            self._job[name] = value

    def run(self, x: torch.Tensor, own: torch.Tensor, step: StepStates, states: LayerStates) -> torch.Tensor:
        """Returns the gated outputs [T, values] for the input projection `x` [T, line], and writes the states.

        `own` [T, 2 * heads] float32 are the inputs of betas and decays, or room for a Mamba's steps and decays.
        """
        job, run = self._job, self._kernels.pool.run
        heads, rows, value_dim = states.matrices.shape[1:]
        out = x.new_empty(len(x), heads * value_dim)
        job["line"], job["own_line"] = x.stride(0), own.stride(0)
        job["heads"], job["rows"], job["value_dim"] = heads, rows, value_dim
        job["taps"], job["channels"] = states.tails.shape[1] + 1, states.tails.shape[2]
        job["state"] = self._kernels.scratch("span.state", scratch_floats(heads, rows, value_dim))
        for part in (*step.singles, *step.spans):
            count = part.after - part.first
            job["tokens"], job["x"], job["own"] = count, x[part.first].data_ptr(), own[part.first].data_ptr()
            job["out"], job["tail"] = out[part.first].data_ptr(), states.tails[part.read].data_ptr()
            job["read"], job["write"] = (states.matrices[slot].data_ptr() for slot in (part.read, part.write))
            job["mixed"] = self._kernels.scratch("span.mixed", count * states.tails.shape[2])
            job["sums"] = self._kernels.scratch("span.sums", count * heads * value_dim)
            address = job.ctypes.data
            run(self._mix, address, count)
            self._keep_tail(x, part, states.tails)
            run(self._carry, address, heads * parts(value_dim))
            run(self._gate, address, count)
        return out

    def _keep_tail(self, x: torch.Tensor, part: TokenSpan, tails: torch.Tensor) -> None:
        """Writes the convolution's last inputs."""
        first, (kept, channels) = int(self._job["first"][0]), tails.shape[1:]
        new = x[max(part.first, part.after - kept) : part.after, first : first + channels].float()
        if len(new) < kept:
            new = torch.cat([tails[part.read], new])[-kept:]
        tails[part.write] = new

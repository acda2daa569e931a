"""Runs the kernels for experts of few tokens in Triton's interpreter; prints how far they are off as JSON.

The words are the encodings. Each has one of the sizes and activations by turns, or with the word `all` each of them.
A program of its own: whether Triton compiles or interprets is settled when it is imported.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from edgemoe.experts.compute.cuda import RamExperts, ReachableExperts
from edgemoe.experts.tiers.residency_records import NONE
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.kernels.gpu import experts_decode
from edgemoe.kernels.gpu.weights import KINDS
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import SILU, Activation, ExpertGeometry
from edgemoe.types.size_classes import SlabLayout
from support.fake_gpu import no_order
from support.interpreter import prepare_interpreter
from support.packed_experts import far, slab_of, work

SWIGLU, GELU, RELU2 = Activation("clamped_swiglu", 1.702, 7.0), Activation("gelu_tanh"), Activation("relu2")
MADE = (  # H, I, ..., tokens
    *((64, 96, SILU, False, 1), (64, 608, SWIGLU, True, 2), (576, 32, GELU, False, 1)),
    *((64, 96, RELU2, False, 2), (96, 64, RELU2, True, 1)),
)
PLAIN = ((72, 40, SILU, False, 2), (130, 36, SILU, False, 1))


def error(geometry: ExpertGeometry, tokens: int) -> float:
    """Returns the error of the sums. Experts lie in slots in reverse; read from RAM, they give the same bits."""
    rng = np.random.default_rng(0)
    slab, (group, x) = slab_of(geometry, rng), work(geometry, tokens, rng)
    layout = SlabLayout.within(geometry.all_bytes, geometry)
    assert layout is not None
    where = np.arange(geometry.experts)[None, ::-1].copy()
    ram, in_ram = HostSlab(layout), np.roll(where, 1, axis=1)
    ram.slots()[in_ram[0]] = slab.numpy()
    slots = ReachableExperts(
        slab.flip(0).contiguous().view(-1), layout, geometry, where, no_order(), RamExperts(ram, in_ram)
    )
    assert slots.renew()
    ids, weights = np.zeros(tokens * geometry.top_k, np.int64), np.zeros(tokens * geometry.top_k, np.float32)
    ids[group.calls] = np.repeat(group.experts, np.diff(group.offsets))
    weights[group.calls] = group.weights
    shape = tokens, geometry.top_k
    calls = x, torch.from_numpy(ids).view(shape), torch.from_numpy(weights).view(shape)
    out = slots.forward(0, *calls)
    where[0, ids[0]] = NONE
    assert slots.renew()
    assert torch.equal(out, slots.forward(0, *calls))
    rows = torch.zeros(tokens, geometry.top_k, geometry.hidden)
    rows[:, 0] = out
    return far(geometry, slab, group, x, rows)


if __name__ == "__main__":
    prepare_interpreter()
    experts_decode.GATES, experts_decode.OUTPUTS = 64, 128  # few programs, which are interpreted one after the other
    errors = {}
    for number, (kind, encoding) in enumerate((name, ENCODINGS[name]) for name in KINDS):
        if kind not in sys.argv:
            continue
        made = MADE if "all" in sys.argv else MADE[number % len(MADE) :][:1]
        errors[kind] = [
            error(ExpertGeometry(1, 3, 2, h, i, "float32", activation, biases, (kind,)), tokens)
            for h, i, activation, biases, tokens in (*made, *(PLAIN if encoding.scales(1) == 0 else ()))
        ]
    print(json.dumps(errors))

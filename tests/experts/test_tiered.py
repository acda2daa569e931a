"""Experts in tiers compute what experts at hand compute, whatever the budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiers_kit import SMALL, FileStore, Weights, running, small_tiers

from edgemoe.experts.tiered import StepMeta

BUDGETS = [  # slots of RAM, of the devices; there are 24 experts
    (24, ()),
    (12, ()),
    (2, ()),
    (1, ()),
    (24, (24,)),
    (12, (6,)),
    (3, (2,)),
    (2, (1,)),
    (1, (1,)),
    (24, (3, 5)),
    (7, (3, 3)),
    (2, (1, 1)),
]


def meta(tokens: int, prefill: int = 0) -> StepMeta:
    """`tokens` of which the last `prefill` are one sequence's chunk, the others decode."""
    decoding = tokens - prefill
    lens = np.array([1] * decoding + [prefill] * bool(prefill))
    return StepMeta(
        requests=tuple(f"r{i}" for i in range(len(lens))),
        query_lens=lens,
        decode=np.arange(len(lens)) < decoding,
        tokens=np.arange(tokens),
        positions=np.arange(tokens),
    )


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def weights(request: pytest.FixtureRequest) -> Weights:
    return Weights(SMALL._replace(bf16=request.param))


@pytest.mark.parametrize("containment", [True, False])
@pytest.mark.parametrize(("ram", "devices"), BUDGETS)
def test_any_budget_computes_what_resident_experts_do(
    ram: int, devices: tuple[int, ...], containment: bool, weights: Weights
) -> None:
    store, rng = FileStore(weights), np.random.default_rng(1)
    tolerance = 3e-2 if weights.shape.bf16 else 1e-5
    with running(small_tiers(store, ram, devices, containment=containment)) as tiers:
        for step, (tokens, prefill) in enumerate([(1, 0), (1, 0), (3, 0), (20, 20), (9, 8), (1, 0), (2, 0)]):
            tiers.experts.begin_step(meta(tokens, prefill))
            for layer in range(weights.shape.layers):
                hidden, ids, shares = weights.route(tokens, rng)
                if step % 2 and layer + 1 < weights.shape.layers:
                    tiers.experts.hint(layer + 1, torch.rand(tokens, weights.shape.experts))
                out = tiers.experts.forward(layer, hidden, ids, shares)
                want = weights.forward(layer, hidden, ids, shares)
                assert out.dtype == hidden.dtype
                torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
            tiers.check_integrity()
            tiers.experts.end_step()

"""The choice of experts by a decode step's stage, against the gate's definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.stage_kit import new_step, run_stage

from edgemoe.families.spec import RouterSpec
from edgemoe.kernels.cpu.decode_stages import ROUTER, choose
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.feed_forward import Gate

EXPERTS, K, TOKENS = 24, 5, 7
ROUTERS = [
    RouterSpec(EXPERTS, K),
    RouterSpec(EXPERTS, K, renormalise=True, logit_bias=True, scale=2.5),
    RouterSpec(EXPERTS, K, score="sigmoid", selection_bias=True, renormalise=True, added_mass=0.25),
    RouterSpec(EXPERTS, K, score="sigmoid", groups=6, top_groups=2, group_score="top2", renormalise=True),
    RouterSpec(EXPERTS, K, groups=4, top_groups=2, selection_bias=True, least_mass=0.8, renormalise=True),
    RouterSpec(EXPERTS, K, logit_cap=2.0, expert_scale=True),
]


def _gate(router: RouterSpec) -> Gate:
    """Returns a gate whose input are the logits themselves."""

    def read(name: str, dtype: Any = None) -> torch.Tensor:
        return torch.eye(EXPERTS) if name.endswith("weight") else torch.randn(EXPERTS)

    return Gate(SimpleNamespace(spec=SimpleNamespace(router=router), read=read))  # type: ignore[arg-type]


def _chosen(kernels: Kernels, gate: Gate, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and weights [T, k] by the kernel."""
    router, tokens = gate.router, len(logits)
    ids, weights = torch.zeros(tokens, K, dtype=torch.int64), torch.zeros(tokens, K)
    step = new_step(tokens, ids=ids.data_ptr(), weights=weights.data_ptr())
    kept = {"scores": logits.clone(), "selection": torch.zeros(tokens, EXPERTS), "best": torch.zeros(tokens, 6)}
    job = np.zeros(1, ROUTER)
    for name in ("experts", "renormalise", "groups", "top_groups", "least_mass", "added_mass", "scale"):
        job[name] = getattr(router, name)
    job["step"], job["k"], job["cap"] = step.ctypes.data, K, router.logit_cap
    job["by_sigmoid"], job["by_two"] = router.score == "sigmoid", router.group_score == "top2"
    for name in ("logit_bias", "selection_bias", "expert_scale"):
        if (values := getattr(gate, name)) is not None:
            kept[name] = values
    for name, memory in kept.items():
        job[name] = memory.data_ptr()
    run_stage(kernels, step, choose, job)
    return ids, weights


@pytest.mark.parametrize("router", ROUTERS, ids=range(len(ROUTERS)))
def test_experts_and_weights_are_those_of_the_gate(kernels: Kernels, router: RouterSpec) -> None:
    torch.manual_seed(0)
    gate, logits = _gate(router), torch.randn(TOKENS, EXPERTS) * 3
    expected_ids, expected = gate.route(logits)
    ids, weights = _chosen(kernels, gate, logits)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("router", ROUTERS, ids=range(len(ROUTERS)))
def test_scores_that_are_not_numbers_choose_distinct_experts(kernels: Kernels, router: RouterSpec) -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    logits[0] = torch.nan
    logits[1, 3:] = torch.nan
    ids, _ = _chosen(kernels, _gate(router), logits)
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    assert all(len(set(row)) == K for row in ids.tolist())

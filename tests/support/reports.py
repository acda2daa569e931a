"""Reports as engines make them, of tokens whose routes are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgemoe.cluster.control.messages import BoxReport
from edgemoe.policy.placement.route_score import Routes, heaviest_pairs
from edgemoe.types.placement import ACTIVITY_UNIT


def report(routes: Routes, experts: int, model: str = "m" * 32, *, successions: bool = False, **more: Any) -> BoxReport:
    """Returns the report of a box whose requests had these routes [T, L, k], all lately."""
    tokens, layers, _ = routes.shape
    chosen = np.stack([np.bincount(routes[:, layer].ravel(), minlength=experts) for layer in range(layers)])
    pairs = heaviest_pairs(routes, experts, experts * experts)
    pairs[:, 3] = np.minimum(pairs[:, 3] * ACTIVITY_UNIT // tokens, ACTIVITY_UNIT)
    shares = np.minimum(chosen * ACTIVITY_UNIT // tokens, ACTIVITY_UNIT)
    if successions:
        chose = np.zeros((layers, tokens, experts))
        np.put_along_axis(chose, routes.transpose(1, 0, 2).astype(np.int64), 1.0, axis=2)
        pairs, passed = pairs[:0], chose[:-1].transpose(0, 2, 1) @ chose[1:]  # [L - 1, E, E]
        listed = np.argwhere(passed > 0)
        table = np.column_stack([listed, np.minimum(passed[tuple(listed.T)] * ACTIVITY_UNIT // tokens, ACTIVITY_UNIT)])
        more["passed"] = table.astype("<u2").tobytes()
    return BoxReport(model, float(tokens), shares.astype("<u2").tobytes(), pairs=pairs.astype("<u2").tobytes(), **more)

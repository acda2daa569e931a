"""A daemon whose leader ignores the cost of experts: pull without marginal union and residency.

python -m tools.research.routing.blind.union serve --config FILE      as `python -m edgemoe` would
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence

import numpy as np

from edgemoe.policy.routing.marginal_union import UnionTerm
from edgemoe.policy.routing.offers import RoutingTarget, Values, WaitingRequest


def nothing(self: UnionTerm, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget]) -> Values:
    """Returns costs of zero for every offer."""
    return np.zeros((len(views), len(offers)))


if __name__ == "__main__":
    UnionTerm.__call__ = nothing  # type: ignore[method-assign]
    runpy.run_module("edgemoe", run_name="__main__", alter_sys=True)

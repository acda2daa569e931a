"""A daemon whose leader takes all experts for in place everywhere: pull with marginal union, without residency.

python -m tools.testbed.blind.residency serve --config FILE      as `python -m edgemoe` would
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace

from edgemoe.policy.routing.by_experts import UnionTerm
from edgemoe.policy.routing.offers import EngineView, Offered, Values

costs = UnionTerm.__call__


def unaware(self: UnionTerm, offers: Sequence[Offered], views: Sequence[EngineView]) -> Values:
    """Returns what requests would cost if nothing had to be fetched."""
    return costs(self, offers, [replace(view, resident=None) for view in views])


if __name__ == "__main__":
    UnionTerm.__call__ = unaware  # type: ignore[method-assign]
    runpy.run_module("edgemoe", run_name="__main__", alter_sys=True)

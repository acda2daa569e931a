"""A daemon whose leader assumes that all experts are in place everywhere: pull with marginal union, without
residency.

    python -m tools.research.routing.blind.blind_residency serve --config FILE      as `python -m edgemoe` would
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence

from edgemoe.cluster.control.requests import offer_queue
from edgemoe.policy.routing.signatures import ModelSizes


def unheard(far: bytes, far_s: Sequence[float], sizes: ModelSizes) -> None:
    """Ignores an engine's report of its experts' places."""


if __name__ == "__main__":
    offer_queue.resident_of = unheard  # type: ignore[attr-defined]
    runpy.run_module("edgemoe", run_name="__main__", alter_sys=True)

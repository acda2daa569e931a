"""The experts that a box reads ahead while it lends its memory to the plan, and while it keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from edgemoe.policy.lending import SETTLE_S, LendingChoice
from edgemoe.worker.cluster_parts import MemoryLending


class Box:
    """A box of four experts in one layer, whose steps take 20 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        costs = SimpleNamespace(unit_s=0.0, read_s=lambda _: 0.0)
        self.remote: Any = SimpleNamespace(taken_s=0.0, units=0, experts=0, costs=costs, elsewhere=self._elsewhere)
        geometry = SimpleNamespace(layers=1, experts=4, exists=np.ones((1, 4), np.bool_), strides_bytes=np.array([8]))
        self.tiers: Any = SimpleNamespace(
            geometry=geometry,
            residency=SimpleNamespace(ram=SimpleNamespace(slots=4)),
            on_disk=np.ones((1, 4), np.bool_),
            experts=SimpleNamespace(remote=self.remote),
            loader=SimpleNamespace(elsewhere=self.remote.elsewhere),
        )
        self.lending = MemoryLending()
        self.lending.choice, self.lending.settled = LendingChoice(lambda: self.now_s), True
        self.lending.join(self.tiers, SimpleNamespace(experts=0))  # type: ignore[arg-type]

    @staticmethod
    def _elsewhere(layer: int, experts: Any) -> Any:
        return np.ones(len(experts), np.bool_)

    def step(self, lacking_s: float) -> None:
        """Ends a step of which layer-steps that lacked experts took so long."""
        self.now_s += SETTLE_S + 1.0
        self.remote.taken_s += lacking_s
        meta, ids = SimpleNamespace(prompt_tokens=0), np.array([[[0, 1]]])
        self.lending.on_step_ended(SimpleNamespace(meta=meta, ids=ids, step_s=20.0))  # type: ignore[arg-type]


def test_experts_of_peers_are_read_ahead_only_while_memory_is_kept() -> None:
    box = Box()
    box.step(lacking_s=0.0)
    assert box.tiers.loader.elsewhere is box.remote.elsewhere, "a step of a box alone would take as long"
    box.step(lacking_s=10.0)
    assert box.lending.keeps_memory
    assert box.tiers.loader.elsewhere is None
    box.step(lacking_s=15.0)
    assert not box.lending.keeps_memory, "it is no better so"
    assert box.tiers.loader.elsewhere is box.remote.elsewhere

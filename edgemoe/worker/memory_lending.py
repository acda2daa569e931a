"""Observes this box's steps for the decision whether its memory is lent to the cluster's plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.compute.peer_compute import PeerCompute
from edgemoe.experts.compute.peer_layer_step import FEW_TOKENS
from edgemoe.policy.lending import LeastRecentCache, LendingChoice
from edgemoe.types.step import StepRouting

log = logging.getLogger(__name__)


class MemoryLending:
    """Owns the decision and the simulated cache. `on_step_ended` runs on the compute thread."""

    def __init__(self) -> None:
        self.choice = LendingChoice()
        self.settled = False  # all home experts are in memory
        self._tiers: ExpertTiers | None = None
        self._host: PeerCompute | None = None
        self._taken_s = self._units = 0.0
        self._given = self._got = 0

    def join(self, tiers: ExpertTiers, host: PeerCompute) -> None:
        """Observes the steps of these tiers from now on, if their disk has every expert; `host` computes for peers."""
        geometry = tiers.geometry
        self._cache = LeastRecentCache((geometry.layers, geometry.experts), tiers.residency.ram.slots)
        self._first = (np.arange(geometry.layers) * geometry.experts)[:, None, None]  # [L, 1, 1] each layer's first key
        sizes = geometry.strides_bytes
        self._mean_size = float(sizes.mean() / sizes[0])  # of an expert, beside one of the first layer
        self._host = host
        self._tiers = tiers if tiers.on_disk[geometry.exists].all() else None

    @property
    def keeps_memory(self) -> bool:
        """Returns whether memory follows own requests: former homes too are ranked like others, at once."""
        return not self.choice.lends

    def rooms(self, capacities: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of home experts of each size to offer room for."""
        return tuple(min(room, max(1, int(room * self.choice.share))) for room in capacities)

    def on_step_ended(self, routing: StepRouting) -> None:
        """Adds a step of few tokens that only decoded."""
        if self._tiers is None or self._host is None or (remote := self._tiers.experts.remote) is None:
            return
        lacking_s, units = remote.taken_s - self._taken_s, remote.units - self._units
        self._taken_s, self._units = remote.taken_s, remote.units
        if routing.meta.prompt_tokens or routing.ids.shape[1] > FEW_TOKENS:
            return
        misses = self._cache.count_misses(np.unique((routing.ids + self._first)[routing.ids >= 0]))
        if not self.settled:
            return
        costs = remote.costs
        alone_s = (
            max(0.0, routing.step_s - lacking_s) + units * costs.unit_s + misses * self._mean_size * costs.read_s(0)
        )
        given, got = self._host.experts - self._given, remote.experts - self._got
        self._given, self._got = self._host.experts, remote.experts
        if self.choice.observe(routing.step_s, alone_s, given, got):
            # as a box alone does, one that keeps its memory reads ahead, also if peers have the experts
            self._tiers.loader.elsewhere = remote.elsewhere if self.choice.lends else None
            whose = "the plan" if self.choice.lends else "this box's own requests, which are faster so"
            log.info(f"memory for experts follows {whose}")

"""Requests, on the compute thread, the likely experts of the layers to come, until the layer runs."""

from __future__ import annotations

import numpy as np

from edgemoe.experts.predict.gate_lookahead import GateLookAhead
from edgemoe.experts.tiers.eviction import ALWAYS
from edgemoe.experts.tiers.prefetch_priority import PrefetchPriority
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertId, Move, Tier

NOBODY: IntArray = np.empty(0, np.int64)
TIERS, NEAR = tuple(Tier), PrefetchPriority.NEAR  # to ask an enumeration for a member takes a while


class PrefetchRequester:
    """Knows the prefetch requests of each priority that the loader has at present. Compute thread only."""

    def __init__(self, residency: Residency, loader: ExpertLoader, top_k: int) -> None:
        self._residency, self._loader = residency, loader
        self._ahead = GateLookAhead(residency, top_k)
        self._foresee, self._fastest = residency.policy.foresee, residency.fastest
        self._requested: dict[PrefetchPriority, int] = {}  # priorities with prefetch requests, and the layer of these

    def demand(self, layer: int, chosen: IntArray) -> None:
        """Learns from what the gate of a layer chose [T, k], and cancels the requests for layers up to it."""
        self._ahead.learn(layer, chosen)
        if self._requested:
            self._drop(layer)

    def hear(self, layer: int, probs: FloatArray) -> None:
        """Learns from a hint [T, E], and requests the missing experts that it makes likely, the likeliest first."""
        moves: list[Move] = []
        if (likely := self._ahead.hear(layer, probs)) is not None:
            missing = self._ahead.missing(*self._foresee(layer, *likely))
            fastest = self._fastest
            moves = [
                Move(ExpertId(layer, expert), TIERS[tier], fastest, utility, chance)
                for expert, tier, chance, utility in missing
            ]
        self._request(layer, moves, NEAR)

    def replace(self, layer: int, experts: IntArray, priority: PrefetchPriority) -> None:
        """Replaces the requests of one priority by the missing ones of `experts` [n], all of them certain."""
        tiers = zip(experts.tolist(), self._residency.tiers_of(layer, experts).tolist(), strict=True)
        moves = [
            Move(ExpertId(layer, expert), TIERS[tier], self._fastest, ALWAYS)
            for expert, tier in tiers
            if tier != self._fastest
        ]
        self._request(layer, moves, priority)

    def _request(self, layer: int, moves: list[Move], priority: PrefetchPriority) -> None:
        """Replaces the requests of one priority, if there is any, before or now."""
        if moves or priority in self._requested:
            self._loader.prefetch(moves, priority)
            self._requested.pop(priority, None)
            if moves:
                self._requested[priority] = layer

    def _drop(self, layer: int) -> None:
        """Cancels prefetch requests for layers that have started."""
        for priority in [priority for priority, requested in self._requested.items() if requested <= layer]:
            self._request(layer, [], priority)

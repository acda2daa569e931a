"""Requests, on the compute thread, the likely experts of the layers to come, until the layer runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import numpy as np

from edgemoe.experts.predict.gate_lookahead import GateLookAhead
from edgemoe.experts.tiers.eviction import ALWAYS
from edgemoe.experts.tiers.prefetch_priority import PrefetchPriority
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertId, Move, Tier

NOBODY: IntArray = np.empty(0, np.int64)
CERTAIN = (1.0, ALWAYS)  # chance and utility


class PrefetchRequester:
    """Knows the prefetch requests of each priority that the loader has at present. Compute thread only."""

    def __init__(self, residency: Residency, loader: ExpertLoader, layers: int, top_k: int) -> None:
        self._residency, self._loader, self._top_k = residency, loader, top_k
        self._ahead = GateLookAhead(layers, top_k)
        self._policy = residency.policy
        self._requested: dict[PrefetchPriority, int] = {}  # priorities with prefetch requests, and the layer of these

    def demand(self, layer: int, chosen: IntArray) -> None:
        """Learns from what the gate of a layer chose [T, k], and cancels the requests for layers up to it."""
        self._ahead.learn(layer, chosen)
        if self._requested:
            self._drop(layer)

    def hear(self, layer: int, probs: FloatArray) -> None:
        """Learns from a hint [T, E], and requests the experts that it makes likely."""
        self._ahead.hear(layer, probs)
        self._request_likely(layer, probs)

    def _request_likely(self, layer: int, probs: FloatArray) -> None:
        """Requests the missing experts that a hint [T, E] makes likely, each with its chance and utility."""
        likely = _likely(probs, self._top_k)
        if self._residency.all_on_top(layer, likely):
            self.replace(layer, NOBODY, PrefetchPriority.NEAR)
            return
        chance, utility = self._policy.foresee(layer, likely, self._ahead.chances(layer, probs, likely))
        order = np.argsort(-chance, kind="stable")
        order = order[utility[order] > -ALWAYS]
        self.replace(
            layer,
            likely[order],
            PrefetchPriority.NEAR,
            zip(chance[order].tolist(), utility[order].tolist(), strict=True),
        )

    def replace(
        self,
        layer: int,
        experts: IntArray,
        priority: PrefetchPriority,
        odds: Iterable[tuple[float, float]] | None = None,
    ) -> None:
        """Replaces the requests of one priority by the missing ones of `experts` [n], best first.

        `odds` are the chance and utility of each; without them all are certain.
        """
        moves: list[Move] = []
        if not self._residency.all_on_top(layer, experts):
            fastest = self._residency.fastest
            ids = [ExpertId(layer, expert) for expert in experts.tolist()]
            tiers = [Tier(tier) for tier in self._residency.tiers_of(layer, experts).tolist()]
            moves = [
                Move(expert, tier, fastest, utility, chance)
                for expert, tier, (chance, utility) in zip(ids, tiers, odds or repeat(CERTAIN), strict=False)
                if tier is not fastest
            ]
        if moves or priority in self._requested:
            self._loader.prefetch(moves, priority)
            self._requested.pop(priority, None)
            if moves:
                self._requested[priority] = layer

    def _drop(self, layer: int) -> None:
        """Cancels prefetch requests for layers that have started."""
        for priority in [priority for priority, requested in self._requested.items() if requested <= layer]:
            self.replace(layer, NOBODY, priority)


def _likely(probs: FloatArray, k: int) -> IntArray:
    """Returns the union of each token's k most probable experts, in descending order; `probs` [T, E]."""
    best = probs[0] if len(probs) == 1 else probs.max(axis=0)
    top = probs.argpartition(-k, axis=1)[:, -k:].ravel()
    if len(probs) > 1:
        top = np.unique(top)
    likely: IntArray = top[best[top].argsort()[::-1]]
    return likely

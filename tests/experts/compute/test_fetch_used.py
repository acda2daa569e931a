"""Experts that peers computed come into this box's memory beside the next steps, where there is room for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers
from support.waiting import wait_until
from test_moe import meta

from edgemoe.experts.build import ExpertTiers
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.peers import ExpertWork, PeerCosts, RemoteCall


class QuickPeer:
    """A peer that has every expert in memory and answers with zeros at once."""

    timeout_s = 5.0

    def offers(self, layer: int, experts: IntArray) -> Sequence[PeerCosts]:
        return [PeerCosts("b", 1e-12, 0.0, 1e-12, np.zeros(len(experts), np.float32))]

    def fetch_s(self, layer: int, experts: IntArray, without: Collection[str]) -> FloatArray:
        return np.full(len(experts), np.inf, np.float32)

    def holders_away(self, layer: int, expert: int) -> Sequence[str]:
        return ()

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        call = RemoteCall(node, work, 0.0)
        call.result = memoryview(np.zeros_like(work.hidden)).cast("B")
        answers.put(call)
        return call


def decode(tiers: ExpertTiers, first: int, prefill: int = 0) -> None:
    """Runs a step in which every layer needs the experts `first` and the next one."""
    tokens = max(1, prefill)
    tiers.experts.begin_step(meta(tokens, prefill))
    ids = torch.tensor([[first, first + 1]] * tokens)
    for layer in range(SMALL.layers):
        tiers.experts.forward(layer, torch.zeros(tokens, SMALL.hidden), ids, torch.full((tokens, 2), 0.5))
    tiers.experts.end_step()


def resident(tiers: ExpertTiers) -> set[int]:
    return set(np.flatnonzero(tiers.residency.resident_mask().all(axis=0)).tolist())


def test_experts_that_a_peer_computed_are_read_for_the_next_steps() -> None:
    with running(small_tiers(FileStore(Weights(SMALL)), 12)) as tiers:
        tiers.join(QuickPeer())
        for first in (0, 2, 4):
            decode(tiers, first)
            assert tiers.experts.remote is not None
            wait_until(lambda first=first: {first, first + 1} <= resident(tiers))
        assert tiers.experts.remote.experts == 3 * 2 * SMALL.layers
        decode(tiers, 4)
        assert tiers.experts.remote.experts == 3 * 2 * SMALL.layers, "the last ones are here now"


@pytest.mark.parametrize("case", ["homes leave no room", "prompt", "no prefetch"])
def test_nothing_is_read_without_use(case: str) -> None:
    store = FileStore(Weights(SMALL))
    with running(small_tiers(store, 12, prefetch=case != "no prefetch")) as tiers:
        tiers.join(QuickPeer())
        if case == "homes leave no room":
            homes = np.zeros((SMALL.layers, SMALL.experts), np.bool_)
            homes[:, -3:] = True
            tiers.residency.homes.set_homes(homes)
            assert tiers.residency.homes.passing < SMALL.layers * SMALL.top_k
        decode(tiers, 0, prefill=3 if case == "prompt" else 0)
        assert tiers.experts.remote is not None
        assert tiers.experts.remote.experts
        assert not tiers.loader.prefetch_requests
        assert len(store.reads) + tiers.experts.remote.experts == 2 * SMALL.layers, "each came one way only"

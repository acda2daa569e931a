"""Prefetch is never worse than no prefetch, at any speed of the link: in simulated time, with the engine's own rule.

Layers compute, then demand some experts over the link. A forecast names experts for the next layer with their true
probabilities. No expert stays on the device for a later layer, so a wrong prefetch never gains anything. Both runs need
the same experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from edgemoe.experts.transfer.link_prefetch import IdleWindow
from edgemoe.experts.transfer.links import PieceSchedule, pieces_of

EXPERT_BYTES, LAYERS, STEPS, COMPUTE_S = 9.44e6, 8, 150, 4e-4
CHANCES = (0.002, 0.1, 0.3, 0.6, 0.9)


class Load:
    def __init__(self, layer: int, *, demand: bool) -> None:
        self.layer, self.demand = layer, demand

    @property
    def urgency(self) -> int:
        return int(self.demand)


class Foreseen(NamedTuple):
    chance: float
    needed: bool


class LayerRun(NamedTuple):
    """A layer's needs beyond its forecast, its forecast, and the time that it computes."""

    others: int
    foreseen: list[Foreseen]
    compute_s: float


class Box:
    """One link and the layers' times, in simulated time."""

    def __init__(self, gb_per_s: float, *, pieces: int | None = None) -> None:
        self.now_s, expert_s = 0.0, EXPERT_BYTES / (gb_per_s * 1e9)
        pieces = pieces or pieces_of(EXPERT_BYTES)
        self.window = IdleWindow(LAYERS, lambda: self.now_s)
        self.link: PieceSchedule[Load] = PieceSchedule(pieces, expert_s / pieces)
        self.begun: list[Foreseen] = []

    def run(self, layers: list[LayerRun], *, prefetch: bool) -> list[float]:
        """Returns the stall of each layer."""
        stalls, coming = [], {}
        for i, run in enumerate(layers):
            layer, began_s = i % LAYERS, self.now_s
            self.window.demand(layer)
            there = self._take_ended()
            loads = [load for foreseen, load in coming.items() if layers[i].foreseen[foreseen].needed]
            for load in loads:
                load.demand = True
            waiting = [load for load in loads if load not in there and load in self.link.loads]
            missing = sum(foreseen.needed for foreseen in run.foreseen) - len(loads) + run.others
            for _ in range(missing):
                waiting.append(Load(layer, demand=True))
                self.link.add(waiting[-1], self.now_s)
            while any(load in self.link.loads for load in waiting):
                self.now_s = self.link.end_s
                self._take_ended()
            stalls.append(self.now_s - began_s)
            self.window.begin(layer)
            for load in self.link.loads:  # prefetched for this layer, which has run without it
                self.link.drop(load, self.now_s)
            coming = self._compute(run, layers[i + 1] if prefetch and i + 1 < len(layers) else None)
        return stalls

    def _take_ended(self) -> list[Load]:
        return self.link.pop_ended(self.now_s)

    def _compute(self, run: LayerRun, following: LayerRun | None) -> dict[int, Load]:
        """Lets the layer compute while the link prefetches the next layer's forecast."""
        end_s, coming = self.now_s + run.compute_s, {}
        if following is not None:
            order = sorted(range(len(following.foreseen)), key=lambda j: -following.foreseen[j].chance)
            for j in order:
                foreseen = following.foreseen[j]
                if self.now_s >= end_s or not self.window.pays(foreseen.chance, self.link.piece_s):
                    break
                self.begun.append(foreseen)
                coming[j] = Load(0, demand=False)
                self.link.add(coming[j], self.now_s)
                self.now_s = min(end_s, self.link.end_s)
                self._take_ended()
        self.now_s = end_s
        return coming


def layers_of(seed: int) -> list[LayerRun]:
    rng = np.random.default_rng(seed)
    return [
        LayerRun(
            int(rng.integers(3)),
            [Foreseen(chance, bool(rng.random() < chance)) for chance in CHANCES if rng.random() < 0.4],
            COMPUTE_S * float(rng.uniform(0.3, 2.0)),
        )
        for _ in range(LAYERS * STEPS)
    ]


@pytest.mark.parametrize("gb_per_s", [2, 8, 25])
def test_no_layer_waits_a_piece_longer_than_without_and_all_together_wait_less(gb_per_s: float) -> None:
    layers = layers_of(1)
    without, box = Box(gb_per_s).run(layers, prefetch=False), Box(gb_per_s)
    with_it = box.run(layers, prefetch=True)
    assert len(box.begun) > LAYERS * STEPS / 10, "prefetches, so that it can fail"
    assert sum(not foreseen.needed for foreseen in box.begun) > LAYERS * STEPS / 40, "wrong ones, too"
    later = np.array(with_it) - without
    assert later.max() <= box.link.piece_s * (1 + 1e-6)
    assert later.max() > 0.5 * box.link.piece_s, "some demand did wait"
    assert later.sum() < -0.02 * sum(without)


@pytest.mark.parametrize("gb_per_s", [2, 8, 25])
def test_each_chance_that_is_begun_pays_for_itself_and_the_least_is_not_begun(gb_per_s: float) -> None:
    for chance in CHANCES:
        layers = [run._replace(foreseen=[f for f in run.foreseen if f.chance == chance]) for run in layers_of(2)]
        box, without = Box(gb_per_s), Box(gb_per_s).run(layers, prefetch=False)
        with_it = box.run(layers, prefetch=True)
        assert sum(with_it) <= sum(without) * (1 + 1e-9), chance
        assert not box.begun or chance > box.link.piece_s / (3 * COMPUTE_S + box.link.piece_s)
        assert box.begun or chance < 0.5


@pytest.mark.parametrize("gb_per_s", [2, 8, 25])
def test_in_one_piece_it_would_be_worse_for_some_layer(gb_per_s: float) -> None:
    layers, whole = layers_of(1), Box(gb_per_s, pieces=1)
    later = np.array(whole.run(layers, prefetch=True)) - Box(gb_per_s).run(layers, prefetch=False)
    assert later.max() > 2 * Box(gb_per_s).link.piece_s

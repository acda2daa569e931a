"""Time to next use of every expert, learned from nothing while serving.

`scores` ranks all experts by decay^time to their next need, time in steps and parts of a step: a layer that is still
to run in this step comes sooner than one that has run (W of [Two-Tier, 4.1], with its gamma measured in steps). Bounded
memory; the state survives restarts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from edgemoe.experts.predict import online_mlp as learner
from edgemoe.experts.predict import saved_state as state
from edgemoe.experts.predict.online_mlp import FEATURES, RATES, OnlineMLP, describe, score
from edgemoe.experts.predict.routing_memory import NONE, RoutingHistory, RoutingMemory
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

MEMORY_BYTES = 64 << 20  # of recall
MOST_SLOTS = 8192
TRACKS = 16  # sequences that are aligned with the memory at once
NEIGHBOURS = 32  # tokens of the past that are asked, in all
FEWEST = 8  # of them for one sequence
LOOKS = 4  # alignments per step, at even distances between the layers
UPDATES = 1  # minibatches per step
LOG_DECAY = np.float32(math.log(learner.DECAY))


class NextUsePredictor:
    """Owns all that is learned. One step: `begin`, `see` for each layer, `end`. Not thread-safe."""

    def __init__(self, layers: int, experts: int, top_k: int, seed: int = 0) -> None:
        self.layers, self.experts, self.top_k = layers, experts, top_k
        self.scores = np.zeros((layers, experts), np.float32)  # log odds; those of a running step, kept up to date
        self.step = 0
        self.memory = RoutingMemory(layers, experts, min(MOST_SLOTS, MEMORY_BYTES // (layers * experts)))
        self.learner = OnlineMLP(layers, experts, seed)
        self.rates = np.full((layers, len(RATES), experts), top_k / experts, np.float32)
        self.count = np.full((layers, experts), 4 * top_k / experts, np.float32)
        self.visits = np.full(layers, 4.0, np.float32)
        self.last: IntArray = np.full((layers, experts), -1000, np.int64)  # step of the latest need
        self._tracks: OrderedDict[Hashable, RoutingHistory] = OrderedDict()
        self._running: list[RoutingHistory] = []
        self._neighbours = NEIGHBOURS
        self._looked = 0  # times
        self.done = 0  # layers of this step that have run
        self.phase: FloatArray = np.zeros(layers, np.float32)  # [L] log of what a layer's place in the round takes away
        self._never = np.ones(layers * experts, np.float32)  # 1 - recall
        self.known = np.zeros((layers, FEATURES, experts), np.float32)
        self._match = np.zeros(2, np.float32)  # mean over sequences: best match, how many count
        self._odds = np.array(
            [learner.logit(np.float32(1 - i / 255), np.float32(0.02)) for i in range(256)], np.float32
        )
        self.looks = {math.ceil(layers * (i + 1) / LOOKS) for i in range(LOOKS)}
        self.later = (np.arange(layers) / layers * math.log(learner.DECAY)).astype(np.float32)  # [L]
        for layer in range(layers):
            self._describe(layer, self.step - 1)

    def begin(self, sequences: Sequence[Hashable]) -> None:
        """A step begins in which each of the sequences decodes one token; those beyond TRACKS go untracked."""
        self.learner.begin(self.step)
        self._running = [self._track(name) for name in sequences[:TRACKS]]
        self._neighbours = max(FEWEST, NEIGHBOURS // max(1, len(self._running)))
        self.done = 0
        self.phase[:] = self.later
        for track in self._running:
            track.begin()
        self._look()

    def see(self, layer: int, ids: npt.NDArray[np.integer], needed: IntArray) -> bool:
        """Layer `layer` ran: what each sequence chose, [S, k], and the distinct experts that were needed, [n].

        Whether all scores are new; else those of the layer are.
        """
        for track, row in zip(self._running, np.ascontiguousarray(ids, np.int64), strict=False):
            track.see(layer, row)
        self.done = layer + 1
        self.phase[layer] = self.later[layer] + LOG_DECAY
        self._visit(layer, needed)
        if looks := layer + 1 in self.looks:
            self._look()
        else:
            self._refresh(layer, layer + 1)
        return looks

    def end(self) -> None:
        """The step is over: remember it, and learn."""
        self._remember()
        self.learner.learn(self.step, UPDATES)
        self.step += 1

    def glance(self, sequences: Sequence[Hashable], ids: npt.NDArray[np.integer]) -> None:
        """A whole step, [L, S, k], for a small part of the cost: remembered, but neither aligned nor learned from.

        In place of `begin`, `see` and `end`. Scores are then those of the next step.
        """
        self.learner.begin(self.step)
        self._running = [self._track(name) for name in sequences[:TRACKS]]
        chosen = np.ascontiguousarray(ids, np.int64)
        for i, track in enumerate(self._running):
            track.glance(np.ascontiguousarray(chosen[:, i]))
        for layer, row in enumerate(chosen):
            self._visit(layer, row[0] if len(row) == 1 else np.unique(row))
        self._remember()
        self.learner.learn(self.step, 0)
        self.step += 1
        self.done = 0
        self.phase[:] = self.later
        self._refresh(0, self.layers)

    def soon(self) -> FloatArray:
        """Expected decay^steps to the next need, [L, E]."""
        odds = self.scores - self.phase[:, None]
        soon: FloatArray = 1 / (1 + np.exp(-odds))
        return soon

    # --- state

    def save(self, path: Path) -> None:
        """Writes what was learned; whole or not at all."""
        filled = self.memory.filled
        state.write(
            path,
            {
                "shape": np.array([self.layers, self.experts, self.top_k], np.int64),
                "chosen": np.ascontiguousarray(self.memory.chosen[:, :, :filled]).view(np.int64),
                "before": self.memory.before[:filled],
                "written": np.array([self.memory.written], np.int64),
                **self._learned(),
            },
        )

    def load(self, path: Path) -> bool:
        """Takes over a saved state of the same model; False, and nothing changed, where it is not one."""
        saved, memory = state.read(path), self.memory
        shape = [self.layers, self.experts, self.top_k]
        if saved is None or not state.fits(saved, shape, self._learned(), memory.chosen.shape[1], memory.slots):
            return False
        self.memory = state.rebuilt(saved, RoutingMemory(self.layers, self.experts, memory.slots))
        self.rates[:], self.count[:], self.visits[:] = saved["rates"], saved["count"], saved["visits"]
        self.last[:] = self.step - saved["age"]
        self.learner.weights[:] = saved["weights"]
        self._tracks.clear()
        for layer in range(self.layers):
            self._describe(layer, self.step - 1)
        return True

    def _learned(self) -> dict[str, Any]:
        return {
            "rates": self.rates,
            "count": self.count,
            "visits": self.visits,
            "age": np.minimum(self.step - self.last, 1 << 20),
            "weights": self.learner.weights,
        }

    # --- inside

    def _track(self, name: Hashable) -> RoutingHistory:
        track = self._tracks.pop(name, None) or RoutingHistory(self.memory, self.top_k, NEIGHBOURS)
        self._tracks[name] = track
        if len(self._tracks) > TRACKS:
            self._tracks.popitem(last=False)
        return track

    def _visit(self, layer: int, needed: IntArray) -> None:
        """A layer ran that needed distinct experts [n]."""
        self.visits[layer] += 1
        keys = slice(layer * self.experts, (layer + 1) * self.experts)
        needs = self.learner.needs(self.step)[keys]
        known, visits = self.known[layer], self.visits[layer]
        _visit(self.rates[layer], self.count[layer], self.last[layer], needs, known, needed, RATES, visits, self.step)

    def _remember(self) -> None:
        for track in self._running:
            track.end()
            for other in self._tracks.values():
                other.matched[track.last] = 0
                if other is not track and other.last == track.last:
                    other.last = NONE

    def _describe(self, layer: int, now: int) -> None:
        """Features of a layer that ran last in step `now`."""
        age = now - self.last[layer]
        describe(self.known[layer], self.rates[layer], age, self.count[layer], self.visits[layer])

    def _look(self) -> None:
        """Aligns every sequence anew, and scores all experts."""
        for track in self._running:
            track.align(self.done, self._neighbours)
        if self._running:
            self._match[0] = sum(track.best for track in self._running) / len(self._running)
            self._match[1] = sum(track.spread for track in self._running) / len(self._running)
        self._refresh(0, self.layers)
        self._looked += 1
        if self._looked % 2:  # of five a step: those of even steps and odd ones in turns
            self.learner.note(self.known, self.step, self.done)

    def _refresh(self, first: int, last: int) -> None:
        """Scores the experts of layers `first` to `last`."""
        self._never[first * self.experts : last * self.experts] = 1
        for track in self._running:
            track.recall(self._never, first, last, self.done)
        _score(
            self.scores,
            self.known,
            self._never,
            self._match,
            self.phase,
            first,
            last,
            self.done,
            self.learner.weights,
            self._odds,
        )


@njit(fastmath=True, nogil=True)
def _visit(
    rates: FloatArray,
    count: FloatArray,
    last: IntArray,
    needs: BoolArray,
    known: FloatArray,
    needed: IntArray,
    steps: FloatArray,
    visits: np.float32,
    step: int,
) -> None:
    """One visit of a layer: EWMAs [3, E], counts, last uses and needs [E], and the features [F, E] made of them."""
    for i in range(steps.shape[0]):
        for expert in range(rates.shape[1]):
            rates[i, expert] *= np.float32(1) - steps[i]
        for expert in needed:
            rates[i, expert] += steps[i]
    for expert in needed:
        count[expert] += np.float32(1)
        last[expert] = step
        needs[expert] = True
    describe(known, rates, step - last, count, visits)


@njit(fastmath=True, nogil=True)
def _score(
    scores: FloatArray,
    known: FloatArray,
    never: FloatArray,
    match: FloatArray,
    phase: FloatArray,
    first: int,
    last: int,
    done: int,
    weights: FloatArray,
    odds: FloatArray,
) -> None:
    """Scores of layers `first` to `last`, their place in the round included; `done` layers have run."""
    experts = scores.shape[1]
    for layer in range(first, last):
        score(
            scores[layer],
            known[layer],
            never[layer * experts : (layer + 1) * experts],
            match[0],
            match[1],
            np.float32(1) if layer < done else np.float32(0),
            phase[layer],
            weights,
            odds,
        )

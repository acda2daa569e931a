"""The trained next-use network beside the online learner: the `learned` policy with mixed scores.

The trained network (next_use_model.py) does not change. Its memory, a ring of past tokens, fills while it serves, up to
SLOTS tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from edgemoe.errors import ConfigError
from edgemoe.experts.predict.next_use import MEMORY_BYTES, MOST_SLOTS
from edgemoe.experts.predict.next_use_step import TRACKS
from edgemoe.experts.predict.online_mlp import DECAY
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.experts.predict.routing_memory import NONE, RoutingMemory
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.step import StepRouting
from tools.research.cache.next_use.model import AFTER, FLOOR, FROM_HERE, PAST, NextUseNet

NEIGHBOURS = 48  # past tokens that count, the likeliest
WEIGHT = 0.4  # weight of the network's log odds; the best on the last part of a training half
LOG_DECAY = math.log(DECAY)


class NetworkHistory:
    """One sequence: its running token, and its past."""

    def __init__(self, network: NextUseNet, looks: int) -> None:
        shape = network.shape
        self.past = torch.zeros(PAST, shape.token)  # vectors of the last tokens, the latest first
        self.history = torch.zeros(1)
        self.hot = torch.zeros(1, shape.total)
        self.words = np.zeros((shape.layers, -(-shape.experts // 64)), np.uint64)
        self.keys = torch.zeros(looks, shape.key)
        self.slots: deque[int] = deque(maxlen=PAST)  # of the last tokens, which recall skips
        self.last = NONE
        self.parametric = np.zeros((2, shape.total), np.float32)
        self.recalled = np.zeros((2, shape.total), np.float32)


class NextUseNetwork:
    """Owns the network's memory. One step: `begin`, `see` for each layer, `end`. Not thread-safe."""

    def __init__(self, network: NextUseNet, known: FloatArray) -> None:
        """Uses `known` [L, F, E] of the online predictor: its features 1 to 6 are each expert's own history."""
        shape = self.shape = network.shape
        self.network = network
        self.scores = np.zeros((shape.layers, shape.experts), np.float32)  # log odds of decay^steps, phase left out
        self._known = known
        self._memory = RoutingMemory(shape.layers, shape.experts, min(MOST_SLOTS, MEMORY_BYTES // shape.total))
        self._places = shape.places
        self._keys = torch.zeros(len(self._places), self._memory.slots, shape.key)
        self._tracks: OrderedDict[Hashable, NetworkHistory] = OrderedDict()
        self._running: list[NetworkHistory] = []
        hidden, out, direct = network.hidden, network.hidden_out, network.direct
        self._weights = [
            part.detach().numpy()
            for part in (hidden.weight, hidden.bias, out.weight[0], direct.weight[0], out.bias + direct.bias)
        ]

    @torch.inference_mode()
    def begin(self, sequences: Sequence[Hashable]) -> None:
        """Begins a step in which each sequence decodes one token; sequences beyond TRACKS are ignored."""
        self._running = [self._track(name) for name in sequences[:TRACKS]]
        for track in self._running:
            track.history = self.network.history(track.past[None])
            track.hot.zero_()
            track.words[:] = 0
        self._update_forecasts(0)

    @torch.inference_mode()
    def see(self, layer: int, ids: npt.NDArray[np.integer]) -> None:
        """Adds a layer's choices of each sequence, [S, k]."""
        for track, row in zip(self._running, ids, strict=False):
            track.hot[0, row.astype(np.int64) + layer * self.shape.experts] = 1
            for expert in row.tolist():
                track.words[layer, expert >> 6] |= np.uint64(1 << (expert & 63))
        if layer + 1 in self._places[1:]:
            self._update_forecasts(self._places.index(layer + 1))
        else:
            self._score(layer, layer + 1, layer + 1)

    @torch.inference_mode()
    def end(self) -> None:
        """Ends the step, and adds it to the memory."""
        for track in self._running:
            slot = self._memory.append(track.words, track.last)
            for other in self._tracks.values():
                if other is not track and other.last == slot:
                    other.last = NONE
            self._keys[:, slot] = track.keys
            track.last = slot
            track.slots.append(slot)
            track.past = torch.cat([self.network.tokens(track.hot), track.past[:-1]])

    def _track(self, name: Hashable) -> NetworkHistory:
        track = self._tracks.pop(name, None) or NetworkHistory(self.network, len(self._places))
        self._tracks[name] = track
        if len(self._tracks) > TRACKS:
            self._tracks.popitem(last=False)
        return track

    def _update_forecasts(self, look: int) -> None:
        """Updates every sequence's forecast."""
        network, memory = self.network, self._memory
        for track in self._running:
            context = network.context(track.history, track.hot, look)
            track.keys[look] = network.key(context)[0]
            track.parametric[:] = network.parametric(context).view(2, -1).numpy()
            filled = memory.filled
            likeness = self._keys[look, :filled] @ network.asked(context)[0]
            likeness[torch.from_numpy(memory.before[:filled] == NONE)] = -math.inf
            likeness[list(track.slots)] = -math.inf
            best, slots = likeness.topk(min(NEIGHBOURS, filled))
            count = int((best > -math.inf).sum())
            weights = best[:count].softmax(0).numpy()
            _recall(track.recalled, memory.soon, memory.before, slots[:count].numpy(), weights)
        self._score(0, self.shape.layers, self._places[look])

    def _score(self, first: int, last: int, done: int) -> None:
        """Updates the scores of layers `first` to `last`; `done` layers have run."""
        experts = self.shape.experts
        rows = self.scores[first:last]
        if len(self._running) == 1:
            track = self._running[0]
            _weigh(rows, track.parametric, track.recalled, self._known, first, done, experts, *self._weights)
            return
        never = np.ones_like(rows)
        for track in self._running:
            _weigh(rows, track.parametric, track.recalled, self._known, first, done, experts, *self._weights)
            never *= 1 / (1 + np.exp(rows))
        never = np.clip(never, 1e-6, 1 - 1e-6)
        rows[:] = np.log((1 - never) / never)


class NetworkPolicy(LearnedPolicy):
    """`learned` mixed with a trained network. Steps must be bracketed by `begin` and `end`."""

    def __init__(self, network: NextUseNet, layers: int, experts: int, top_k: int) -> None:
        """Raises ConfigError if the network is for another model."""
        super().__init__(layers, experts, top_k)
        shape = network.shape
        if (shape.layers, shape.experts, shape.top_k) != (layers, experts, top_k):
            raise ConfigError(
                f"the next-use network is for {shape.layers} layers of {shape.experts} experts, {shape.top_k} each; "
                f"here are {layers} of {experts}, {top_k} each"
            )
        self.nextuse = NextUseNetwork(network, self.predictor.known)
        self._ranks = np.zeros((layers, experts), np.float32)

    def begin(self, sequences: Sequence[Hashable]) -> None:
        super().begin(sequences)
        self.nextuse.begin(sequences)

    def end(self, routing: StepRouting | None = None) -> None:
        super().end(routing)
        self.nextuse.end()

    def touch(self, layer: int, experts: IntArray) -> None:
        ids = experts[None, :] if self._routed is None else self._routed
        super().touch(layer, experts)
        self.predictor.update_ranks()  # the experts' own history
        self.nextuse.see(layer, ids)

    def rank(self, layer: int) -> FloatArray:
        online, phase = super().rank(layer), self.predictor.phase
        np.add(self.nextuse.scores, phase[:, None], out=self._ranks)
        self._ranks *= WEIGHT
        self._ranks += np.float32(1 - WEIGHT) * online
        return self._ranks


@njit(nogil=True, fastmath=True)
def _recall(
    out: FloatArray, soon: npt.NDArray[np.uint8], before: IntArray, slots: IntArray, weights: FloatArray
) -> None:
    """Computes recalled utility of each expert, [2, L * E]: from an aligned token on, and after it."""
    out[:] = 0
    for i in range(len(slots)):
        weight = weights[i] * np.float32(1 / 255)
        here, after = soon[before[slots[i]]], soon[slots[i]]
        for x in range(out.shape[1]):
            out[0, x] += weight * np.float32(here[x])
            out[1, x] += weight * np.float32(after[x])


@njit(nogil=True, fastmath=True)
def _weigh(
    rows: FloatArray,
    parametric: FloatArray,
    recalled: FloatArray,
    known: FloatArray,
    first: int,
    done: int,
    experts: int,
    hidden: FloatArray,
    hidden_bias: FloatArray,
    out: FloatArray,
    direct: FloatArray,
    bias: FloatArray,
) -> None:
    """Computes NextUseNet.weigh for layers from `first` on, [n, E]."""
    features = hidden.shape[1]
    x = np.empty((features, experts), np.float32)
    inner = np.empty(experts, np.float32)
    for row in range(rows.shape[0]):
        layer = first + row
        plane = AFTER if layer < done else FROM_HERE
        low = layer * experts
        for e in range(experts):
            utility = recalled[plane, low + e]
            x[0, e] = parametric[plane, low + e]
            x[1, e] = np.float32(0.5) * math.log((utility + np.float32(FLOOR)) / (np.float32(1 + FLOOR) - utility))
            x[features - 1, e] = np.float32(plane)
            rows[row, e] = bias[0]
        for f in range(6):
            x[2 + f] = known[layer, 1 + f]
        for f in range(features):
            for e in range(experts):
                rows[row, e] += direct[f] * x[f, e]
        for h in range(hidden.shape[0]):
            for e in range(experts):
                inner[e] = hidden_bias[h]
            for f in range(features):
                weight = hidden[h, f]
                for e in range(experts):
                    inner[e] += weight * x[f, e]
            for e in range(experts):
                rows[row, e] += out[h] * max(inner[e], np.float32(0))

"""Learns, while serving, how soon an expert is needed: each expert's own history, and one network for all experts.

The target is decay^steps to the next use. It trains by Adam [Adam] on minibatches of recent examples, and
scores with an average of its weights [Polyak].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.jit.intrinsics import carray, f32_at, i64_at, jit, record, u8_at
from edgemoe.kernels.cpu.vector import log32
from edgemoe.types.arrays import FloatArray, IntArray, fields, place_of

Bytes = npt.NDArray[np.uint8]

RATES = np.array([0.25, 0.05, 0.01], np.float32)  # of the EWMAs of needs, per visit of the layer
OWN = 6  # features: three EWMAs, age, used now, popularity
LONG_AGO = 1 << 20  # steps
MOST_VISITS = np.float32(1 << 22)  # at more, counts are halved, to which float32 can always add 1

# Arrays are addresses, see `OwnHistory`.
HISTORY = fields("experts", "rates", "count", "visits", "last")


class OwnHistory:
    """Owns the averages."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        each, share = (layers, experts), top_k / experts
        self.rates = np.full((layers, len(RATES), experts), share, np.float32)
        self.count = np.full(each, 4 * share, np.float32)
        self.visits = np.full(layers, 4.0, np.float32)
        self.last: IntArray = np.full(each, -1000, np.int64)  # step of the latest need
        arrays = (self.rates, self.count, self.visits, self.last)
        self._record = np.array([(experts, *(array.ctypes.data for array in arrays))], HISTORY)
        self.address = self._record.ctypes.data

    def learned(self, step: int) -> dict[str, Any]:
        """Returns the arrays to save, by name; `step` is the running one."""
        age = np.clip(step - self.last, 0, LONG_AGO)
        return {"rates": self.rates, "count": self.count, "visits": self.visits, "age": age}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Restores saved arrays, which must fit."""
        self.rates[:], self.count[:], self.visits[:] = saved["rates"], saved["count"], saved["visits"]
        self.last[:] = step - saved["age"]


@jit
def add(history: int, layer: int, needed: Bytes, step: int) -> None:
    """Adds a layer's run in a step, with its needed experts [E]."""
    h = record(history, HISTORY)
    experts, visits = h.experts, f32_at(h.visits)
    if visits[layer] >= MOST_VISITS:
        counted = f32_at(h.count + 4 * layer * experts)
        visits[layer] *= np.float32(0.5)
        for expert in range(experts):
            counted[expert] *= np.float32(0.5)
    visits[layer] += np.float32(1)
    for i in range(RATES.shape[0]):
        rates = f32_at(h.rates + 4 * (layer * RATES.shape[0] + i) * experts)
        for expert in range(experts):
            rates[expert] *= np.float32(1) - RATES[i]
            if needed[expert]:
                rates[expert] += RATES[i]
    count, last = f32_at(h.count + 4 * layer * experts), i64_at(h.last + 8 * layer * experts)
    for expert in range(experts):
        if needed[expert]:
            count[expert] += np.float32(1)
            last[expert] = max(last[expert], step)


@jit
def describe(history: int, layer: int, known: FloatArray, now: int) -> None:
    """Fills the features of one layer [OWN features, E] that change only when it runs, in step `now`."""
    h = record(history, HISTORY)
    experts, floor = h.experts, np.float32(3e-3)
    rates = carray(f32_at(h.rates + 4 * layer * RATES.shape[0] * experts), (RATES.shape[0], experts))
    for i in range(3):
        for expert in range(experts):
            known[i, expert] = logit(rates[i, expert], floor)
    last, count = i64_at(h.last + 8 * layer * experts), f32_at(h.count + 4 * layer * experts)
    for expert in range(experts):
        age = now - last[expert]
        known[3, expert] = np.float32(0.33) * log32(np.float32(1 + age)) - np.float32(0.6)
        known[4, expert] = np.float32(1) if age == 0 else np.float32(0)
    visits = f32_at(h.visits)[layer]
    for expert in range(experts):
        known[5, expert] = logit(count[expert] / visits, floor)


@jit
def logit(p: np.float32, floor: np.float32) -> np.float32:
    """Returns half the log odds of `p`, finite from 0 to 1."""
    return np.float32(0.5) * log32((p + floor) / (np.float32(1) + floor - p))  # type: ignore[no-any-return]


# One small network for all experts, learned while serving: from an expert's features to the time of its next need.


FEATURES = 4 + OWN  # recall, the expert's own history, best match, how many count, layer is done
HIDDEN = 16
DECAY = 0.85  # target: worth of being needed one step later
HORIZON_STEPS = 40  # beyond them "never"
WINDOW = 1 << 15  # examples kept
BATCH = 256
EXAMPLES = 64  # noted at once
LEARNING_RATE = 3e-3
AVERAGED = 0.003  # weight of each minibatch's weights in their average
START = (1.0, 0.2, 0.3, 0.3, -0.1, 0.0, 0.2, 0.0, 0.0, 0.0)  # weights of the direct path before anything is learned
FLAT = HIDDEN * FEATURES + 2 * HIDDEN + FEATURES

# The learner; arrays are addresses, see `OnlineMLP`. `noted` counts examples, `known` the examples with a known target.
LEARNER = fields(
    *("keys_in_all", "weights", "trained", "moments", "inputs", "targets", "keys", "since", "needed", "rows"),
    *("gradient", "noted", "known", "updates", "random"),
)
UPDATES_MADE = place_of(LEARNER, "updates")


class OnlineMLP:
    """Owns the network, its window of examples and its random numbers."""

    def __init__(self, layers: int, experts: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.weights = np.zeros(FLAT, np.float32)  # A [H, F], b [H], c [H], direct [F]
        self.weights[: HIDDEN * FEATURES] = random.normal(0, FEATURES**-0.5, HIDDEN * FEATURES)
        self.weights[HIDDEN * (FEATURES + 1) : HIDDEN * (FEATURES + 2)] = random.normal(0, 0.05, HIDDEN)
        self.weights[-FEATURES:] = START
        self.needed: Bytes = np.zeros((HORIZON_STEPS + 2, layers * experts), np.uint8)  # by step, the last ones
        self._trained = self.weights.copy()  # by the latest minibatch; `weights` is their average
        self._inputs, self._targets = np.zeros((WINDOW, FEATURES), np.float32), np.zeros(WINDOW, np.float32)
        self._arrays = (
            self.weights,
            self._trained,
            np.zeros((2, FLAT), np.float32),  # moments
            self._inputs,
            self._targets,
            np.zeros(WINDOW, np.int64),  # keys
            np.zeros(WINDOW, np.int64),  # first step in which the need counts
            self.needed,
            np.zeros(BATCH, np.int64),  # examples of a minibatch
            np.zeros(FLAT + HIDDEN, np.float32),  # its gradient
        )
        addresses = (array.ctypes.data for array in self._arrays)
        self._record = np.array([(layers * experts, *addresses, 0, 0, 0, int(random.integers(1 << 62)))], LEARNER)
        self.address = self._record.ctypes.data

    @property
    def updates(self) -> int:
        """Minibatches so far."""
        return int(self._record.view(np.int64)[UPDATES_MADE])

    def restore(self, weights: FloatArray) -> None:
        """Goes on from weights that were kept."""
        self.weights[:] = self._trained[:] = weights

    def examples(self) -> tuple[FloatArray, FloatArray]:
        """Returns the features [N, F] and targets [N] of the recent examples whose target is known."""
        known = min(int(self._record["known"][0]), WINDOW)
        return self._inputs[:known].copy(), self._targets[:known].copy()

    def needs(self, step: int) -> Bytes:
        """Returns the needs of a recent step, by key layer * E + expert."""
        needs: Bytes = self.needed[step % len(self.needed)]
        return needs


def odds(p: FloatArray) -> FloatArray:
    """Returns the transform of the recall feature."""
    return (np.log((p + 0.02) / (1.02 - p)) / 2).astype(np.float32)


@jit
def score(
    out: FloatArray,
    known: FloatArray,
    same: FloatArray,
    phase: np.float32,
    weights: FloatArray,
    odds: FloatArray,
    scratch: FloatArray,
) -> None:
    """Computes log odds of decay^steps for the experts of one layer [E], plus `phase`. Completes their features [F, E].

    `same` [3] are the last features: best match, how many count, and whether the layer is done. `scratch` [3, E] holds
    1 - recall first. `out` is written once, so that other threads may read it at any time.
    """
    n = known.shape[1]
    never, sums, hidden = scratch[0], scratch[1], scratch[2]
    constant = FEATURES - 3  # from here on features that are the same for all experts
    for expert in range(n):
        known[0, expert] = odds[int(never[expert] * np.float32(255.0) + np.float32(0.5))]
    direct, start = HIDDEN * (FEATURES + 2), np.float32(0)
    for f in range(3):
        known[constant + f, :] = same[f]
        start += weights[direct + constant + f] * same[f]
    for expert in range(n):
        sums[expert] = start
    for f in range(constant):
        weight = weights[direct + f]
        for expert in range(n):
            sums[expert] += weight * known[f, expert]
    for h in range(HIDDEN):
        bias, scale = weights[HIDDEN * FEATURES + h], weights[HIDDEN * (FEATURES + 1) + h]
        for f in range(3):
            bias += weights[h * FEATURES + constant + f] * same[f]
        for expert in range(n):
            hidden[expert] = bias
        for f in range(constant):
            weight = weights[h * FEATURES + f]
            for expert in range(n):
                hidden[expert] += weight * known[f, expert]
        for expert in range(n):
            sums[expert] += scale * max(hidden[expert], np.float32(0))
    for expert in range(n):
        out[expert] = sums[expert] + phase


@jit
def draw(learner: int, n: int) -> int:
    """Returns a random number from 0 to n - 1."""
    s = record(learner, LEARNER)
    s.random = s.random * 6364136223846793005 + 1442695040888963407
    return ((s.random >> 33) & 0x7FFFFFFF) % n  # type: ignore[no-any-return]


@jit
def note_examples(learner: int, known: FloatArray, step: int, ran: IntArray) -> None:
    """Stores EXAMPLES random features from `known` [L, F, E] of a step; later steps provide their targets.

    A need counts from the next visit of the layer on; `ran` [L] is the step in which each layer ran last.
    """
    s = record(learner, LEARNER)
    inputs = carray(f32_at(s.inputs), (WINDOW, FEATURES))
    keys, since = i64_at(s.keys), i64_at(s.since)
    for _ in range(EXAMPLES):
        at, key = s.noted % WINDOW, draw(learner, s.keys_in_all)
        layer, expert = key // known.shape[2], key % known.shape[2]
        for f in range(FEATURES):
            inputs[at, f] = known[layer, f, expert]
        keys[at] = key
        since[at] = step + 1 if ran[layer] == step else step
        s.noted += 1


@jit
def learn(learner: int, step: int, updates: int) -> None:
    """Fills in the targets that `step`, the latest whole one, makes known; then `updates` minibatches."""
    s = record(learner, LEARNER)
    needed = carray(u8_at(s.needed), (HORIZON_STEPS + 2, s.keys_in_all))
    _resolve(learner, step, needed)
    oldest = max(0, s.noted - WINDOW)
    if s.known - oldest < 2 * BATCH:
        return
    rows = carray(i64_at(s.rows), (BATCH,))
    for _ in range(updates):
        s.updates += 1
        for i in range(BATCH):
            rows[i] = (oldest + draw(learner, s.known - oldest)) % WINDOW
        _train(
            carray(f32_at(s.inputs), (WINDOW, FEATURES)),
            carray(f32_at(s.targets), (WINDOW,)),
            rows,
            carray(f32_at(s.trained), (FLAT,)),
            carray(f32_at(s.moments), (2, FLAT)),
            s.updates,
            carray(f32_at(s.gradient), (FLAT + HIDDEN,)),
        )
        _average(learner)


@jit
def _average(learner: int) -> None:
    """Adds the latest weights to the average; of the first ones each counts the same."""
    s = record(learner, LEARNER)
    weights, trained = f32_at(s.weights), f32_at(s.trained)
    share = np.float32(max(AVERAGED, 1 / (s.updates + 1)))
    for i in range(FLAT):
        weights[i] += share * (trained[i] - weights[i])


@jit
def _resolve(learner: int, step: int, needed: Bytes) -> None:
    """Fills in targets of examples, as far as the steps up to `step` tell."""
    s = record(learner, LEARNER)
    keys, since, targets = i64_at(s.keys), i64_at(s.since), f32_at(s.targets)
    s.known = max(s.known, s.noted - WINDOW)
    while s.known < s.noted:
        at = s.known % WINDOW
        if since[at] + HORIZON_STEPS > step + 1:
            break
        target = np.float32(1)
        for steps in range(HORIZON_STEPS):
            if needed[(since[at] + steps) % needed.shape[0], keys[at]]:
                break
            target *= np.float32(DECAY)
        else:
            target = np.float32(0)
        targets[at] = target
        s.known += 1


@jit
def _train(
    inputs: FloatArray,
    targets: FloatArray,
    rows: IntArray,
    weights: FloatArray,
    moments: FloatArray,
    update: int,
    scratch: FloatArray,
) -> None:
    """Makes one step of Adam on the cross-entropy of the examples `rows` [B].

    `scratch` is for gradient and hidden units.
    """
    gradient, inner = scratch[:FLAT], scratch[FLAT:]
    gradient[:] = 0
    bias, scale, direct = HIDDEN * FEATURES, HIDDEN * (FEATURES + 1), HIDDEN * (FEATURES + 2)
    for i in range(rows.shape[0]):
        x = inputs[rows[i]]
        out = np.float32(0)
        for f in range(FEATURES):
            out += weights[direct + f] * x[f]
        for h in range(HIDDEN):
            z = weights[bias + h]
            for f in range(FEATURES):
                z += weights[h * FEATURES + f] * x[f]
            inner[h] = max(z, np.float32(0))
            out += weights[scale + h] * inner[h]
        error = np.float32(1) / (np.float32(1) + np.float32(math.exp(-out))) - targets[rows[i]]
        for f in range(FEATURES):
            gradient[direct + f] += error * x[f]
        for h in range(HIDDEN):
            if inner[h] > 0:
                gradient[scale + h] += error * inner[h]
                back = error * weights[scale + h]
                gradient[bias + h] += back
                for f in range(FEATURES):
                    gradient[h * FEATURES + f] += back * x[f]
    first = np.float32(1.0 / (1.0 - 0.9**update))
    second = np.float32(1.0 / (1.0 - 0.99**update))
    for i in range(FLAT):
        g = gradient[i] / np.float32(rows.shape[0])
        moments[0, i] = np.float32(0.9) * moments[0, i] + np.float32(0.1) * g
        moments[1, i] = np.float32(0.99) * moments[1, i] + np.float32(0.01) * g * g
        spread = np.float32(math.sqrt(moments[1, i] * second)) + np.float32(1e-6)
        weights[i] -= np.float32(LEARNING_RATE) * moments[0, i] * first / spread

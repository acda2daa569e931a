"""One small network for all experts: from what is known of an expert to how soon it is needed, learned while serving.

Two layers over EWMAs at three rates, age, popularity and what follows what; its target is decay^steps to the next use.
"What follows what" is `recall`, and the network decides how far to believe it. It learns from a bounded window of the
recent past, by Adam [Adam] on minibatches.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

RATES = np.array([0.25, 0.05, 0.01], np.float32)  # of the EWMAs, per visit of the layer
FEATURES = 10  # recall, three EWMAs, age, used now, popularity, best match, how many count, layer is done
HIDDEN = 16
DECAY = 0.85  # target: worth of being needed one step later
HORIZON = 40  # steps; beyond them "never"
WINDOW = 1 << 15  # examples kept
BATCH = 256
EXAMPLES = 64  # noted at once
LEARNING_RATE = 3e-3
START = (1.0, 0.2, 0.3, 0.3, -0.1, 0.0, 0.2, 0.0, 0.0, 0.0)  # weights of the direct path before anything is learned
FLAT = HIDDEN * FEATURES + 2 * HIDDEN + FEATURES


class OnlineMLP:
    """Owns the network, its window of examples and its random numbers."""

    def __init__(self, layers: int, experts: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.weights = np.zeros(FLAT, np.float32)  # A [H, F], b [H], c [H], direct [F]
        self.weights[: HIDDEN * FEATURES] = self._random.normal(0, FEATURES**-0.5, HIDDEN * FEATURES)
        self.weights[HIDDEN * (FEATURES + 1) : HIDDEN * (FEATURES + 2)] = self._random.normal(0, 0.05, HIDDEN)
        self.weights[-FEATURES:] = START
        self.updates = 0
        self._moments = np.zeros((2, FLAT), np.float32)
        self._inputs = np.zeros((WINDOW, FEATURES), np.float32)
        self._targets = np.zeros(WINDOW, np.float32)
        self._keys: IntArray = np.zeros(WINDOW, np.int64)
        self._since: IntArray = np.zeros(WINDOW, np.int64)  # first step in which the need counts
        self._noted, self._known = 0, 0  # examples: written, of which targets are known
        self._needed = np.zeros((HORIZON + 2, layers * experts), np.bool_)  # by step, the last ones

    def begin(self, step: int) -> None:
        """A step begins that needs nothing yet."""
        self._needed[step % len(self._needed)] = False

    def needs(self, step: int) -> BoolArray:
        """Of each expert, layer * E + expert, whether the step needs it; to be written to."""
        needs: BoolArray = self._needed[step % len(self._needed)]
        return needs

    def note(self, known: FloatArray, step: int, done: int) -> None:
        """EXAMPLES at random of what is known [L, F, E] in a step of which `done` layers have run; the next steps will
        tell their targets."""
        keys = self._random.integers(0, known.shape[0] * known.shape[2], EXAMPLES)
        _note(known, keys, step, done, self._noted, self._inputs, self._keys, self._since)
        self._noted += EXAMPLES

    def learn(self, step: int, updates: int) -> None:
        """Fills in the targets that `step`, the latest whole one, makes known; then `updates` minibatches."""
        first = max(self._known, self._noted - WINDOW)
        self._known = _resolve(
            self._keys, self._since, self._targets, first, self._noted, step, self._needed, np.float32(DECAY)
        )
        oldest = max(0, self._noted - WINDOW)
        if self._known - oldest < 2 * BATCH:
            return
        for _ in range(updates):
            self.updates += 1
            rows = self._random.integers(oldest, self._known, BATCH) % WINDOW
            _train(self._inputs, self._targets, rows, self.weights, self._moments, self.updates)

    def compile(self) -> None:
        """Has numba compile the training step."""
        nothing = np.zeros((1, FEATURES), np.float32), np.zeros(1, np.float32), np.zeros(1, np.int64)
        _train(*nothing, self.weights.copy(), self._moments.copy(), 1)


def odds(p: FloatArray) -> FloatArray:
    """The recall feature's transform."""
    return (np.log((p + 0.02) / (1.02 - p)) / 2).astype(np.float32)


@njit(fastmath=True, nogil=True)
def logit(p: np.float32, floor: np.float32) -> np.float32:
    """Half the log odds of `p`, finite from 0 to 1."""
    return np.float32(0.5) * np.float32(math.log((p + floor) / (np.float32(1) + floor - p)))


@njit(fastmath=True, nogil=True)
def describe(known: FloatArray, rates: FloatArray, age: IntArray, count: FloatArray, visits: np.float32) -> None:
    """Fills the features of one layer [F, E] that change only when it runs. `rates` [3, E], `age` in steps."""
    floor = np.float32(3e-3)
    for expert in range(known.shape[1]):
        for i in range(3):
            known[1 + i, expert] = logit(rates[i, expert], floor)
        known[4, expert] = np.float32(0.33) * np.float32(math.log(1.0 + age[expert])) - np.float32(0.6)
        known[5, expert] = np.float32(1) if age[expert] == 0 else np.float32(0)
        known[6, expert] = logit(count[expert] / visits, floor)


@njit(fastmath=True, nogil=True)
def score(
    out: FloatArray,
    known: FloatArray,
    never: FloatArray,
    best: np.float32,
    spread: np.float32,
    done: np.float32,
    phase: np.float32,
    weights: FloatArray,
    odds: FloatArray,
) -> None:
    """Log odds of decay^steps for the experts of one layer [E], and `phase`; completes their features [F, E].

    `out` is written once, so that other threads may read it at any time.
    """
    n = known.shape[1]
    hidden, sums = np.empty(n, np.float32), np.empty(n, np.float32)
    constant = FEATURES - 3  # from here on features that are the same for all experts
    same = (np.float32(3) * (best - np.float32(0.5)), np.float32(0.4 * math.log(spread) - 0.6), done)
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


@njit(nogil=True)
def _note(
    known: FloatArray,
    keys: IntArray,
    step: int,
    done: int,
    noted: int,
    inputs: FloatArray,
    keys_noted: IntArray,
    since: IntArray,
) -> None:
    """Writes examples into the window, behind the `noted` ones; a need counts from the next visit of the layer on."""
    for i in range(len(keys)):
        at = (noted + i) % len(keys_noted)
        layer, expert = keys[i] // known.shape[2], keys[i] % known.shape[2]
        for f in range(FEATURES):
            inputs[at, f] = known[layer, f, expert]
        keys_noted[at] = keys[i]
        since[at] = step + 1 if layer < done else step


@njit(nogil=True)
def _resolve(
    keys: IntArray,
    since: IntArray,
    targets: FloatArray,
    first: int,
    last: int,
    step: int,
    needed: BoolArray,
    decay: np.float32,
) -> int:
    """Fills in targets of examples from `first` on, as far as the steps up to `step` tell; where that ends."""
    example = first
    while example < last:
        at = example % len(keys)
        if since[at] + HORIZON > step + 1:
            break
        target = np.float32(1)
        for tokens in range(HORIZON):
            if needed[(since[at] + tokens) % len(needed), keys[at]]:
                break
            target *= decay
        else:
            target = np.float32(0)
        targets[at] = target
        example += 1
    return example


@njit(fastmath=True, nogil=True)
def _train(
    inputs: FloatArray, targets: FloatArray, rows: IntArray, weights: FloatArray, moments: FloatArray, update: int
) -> None:
    """One step of Adam on the cross-entropy of the examples `rows` [B]."""
    gradient = np.zeros(FLAT, np.float32)
    inner = np.empty(HIDDEN, np.float32)
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

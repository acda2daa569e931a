"""Baselines for ScoutGate: forecasts that need no training run.

Before a token's first layer, all see the routes of every earlier token, as a server does. For horizon h they forecast
the token h later. Tokens count one after the other, as at batch 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from scoutgate.data import Recording, flat_ids

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Predictor = Callable[[IntArray, int], FloatArray]  # (positions [n] in order, horizon) -> p [n, sum E_l]
EWMA_RATES = (0.02, 0.05, 0.1, 0.2, 0.35)
CHUNK = 1024  # tokens whose routes are written out at a time


def routes(recording: Recording, positions: IntArray) -> FloatArray:
    """Returns the tokens' experts as k-hot rows [n, sum E_l]."""
    hot = np.zeros((len(positions), sum(recording.meta.experts)), np.float32)
    np.put_along_axis(hot, flat_ids(recording.ids[positions], recording.meta.experts), 1.0, axis=1)
    return hot


def popularity(recording: Recording) -> Predictor:
    """Forecasts the frequency of each expert in the training split."""
    share = _counts(recording, recording.positions("train")) / max(len(recording.positions("train")), 1)
    return lambda positions, horizon: np.broadcast_to(share.astype(np.float32), (len(positions), len(share)))


def _counts(recording: Recording, positions: IntArray) -> npt.NDArray[np.float64]:
    flat = flat_ids(recording.ids[positions], recording.meta.experts)
    return np.bincount(flat.ravel(), minlength=sum(recording.meta.experts)).astype(np.float64)


def ewma(recording: Recording, rate: float) -> Predictor:
    """Forecasts by the EWMA of [Two-Tier, 4.1] on the layer-local clock, over the requests of the split in order."""

    def predict(positions: IntArray, horizon: int) -> FloatArray:
        every = np.flatnonzero(np.isin(recording.request, np.unique(recording.request[positions])))
        start = np.repeat(np.array(recording.meta.experts), recording.meta.experts)
        state = ((1 - rate) * recording.meta.top_k / start)[None]
        result = np.empty((len(positions), len(start)), np.float32)
        for part in np.split(every, range(CHUNK, len(every), CHUNK)):
            after, ends = lfilter([rate], [1.0, rate - 1.0], routes(recording, part), axis=0, zi=state)
            before = np.concatenate([state / (1 - rate), after[:-1]])
            wanted = slice(*np.searchsorted(positions, (part[0], part[-1] + 1)))
            result[wanted] = before[np.searchsorted(part, positions[wanted])]
            state = ends
        return result

    return predict


def transition(recording: Recording, horizons: int) -> Predictor:
    """Forecasts successions: P(f at t + h | e at t - 1) in the same layer, mean over the token's k experts."""
    train = recording.positions("train")
    begins = recording.starts[recording.request[train]]
    tables = [_follow(recording, train[train - begins > h], h + 1) for h in range(horizons)]
    start = popularity(recording)

    def predict(positions: IntArray, horizon: int) -> FloatArray:
        p = np.array(start(positions, horizon))
        first = positions == recording.starts[recording.request[positions]]
        known = np.flatnonzero(~first)
        ids = recording.ids[positions[known] - 1]
        low = 0
        for layer, size in enumerate(recording.meta.experts):
            p[known, low : low + size] = tables[horizon][layer][ids[:, layer]].mean(1)
            low += size
        return p

    return predict


def _follow(recording: Recording, positions: IntArray, lag: int) -> list[FloatArray]:
    """Computes, for each layer, P(f at a position | e `lag` before), [E, E], with a weak prior of its popularity."""
    tables = []
    for layer, size in enumerate(recording.meta.experts):
        now, before = recording.ids[positions, layer].astype(np.int64), recording.ids[positions - lag, layer]
        pairs = (before.astype(np.int64)[:, :, None] * size + now[:, None, :]).ravel()
        counts = np.bincount(pairs, minlength=size * size).reshape(size, size).astype(np.float64)
        seen = np.bincount(before.ravel(), minlength=size).astype(np.float64)
        prior = np.bincount(now.ravel(), minlength=size) / max(len(positions), 1)
        tables.append(((counts + 8 * prior) / (seen[:, None] + 8)).astype(np.float32))
    return tables


def next_layer_gate(recording: Recording) -> Predictor | None:
    """Forecasts by each layer's own gate, applied one layer early; None if that was not recorded.

    It knows the layers before. For layer 0 it forecasts the layer's popularity.
    """
    if recording.gate is None:
        return None
    start, experts, gate = popularity(recording), recording.meta.experts, recording.gate

    def predict(positions: IntArray, horizon: int) -> FloatArray:
        p, low = np.array(start(positions, horizon)), 0
        at = np.minimum(positions + horizon, recording.count - 1)
        for layer, size in enumerate(experts):
            if layer:
                p[:, low : low + size] = np.minimum(1, recording.meta.top_k * gate[at, layer, :size].astype(np.float32))
            low += size
        return p

    return predict

"""Logistic regression by Newton's method: calibrates one predictor [Platt], or fuses several."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
CLIP = 12.0  # logits beyond this say nothing more


def logits(p: npt.NDArray[np.float32] | Array) -> Array:
    """Returns log p / (1 - p), within +-CLIP."""
    floor = 1 / (1 + np.exp(CLIP))
    safe = np.clip(p.astype(np.float64), floor, 1 - floor)
    return np.asarray(np.log(safe / (1 - safe)))


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -60, 60))))


def fit(features: Array, happened: npt.NDArray[np.bool_], ridge: float = 1.0, rounds: int = 12) -> Array:
    """Fits weights [F + 1], the bias last, that minimise the log-loss of `features` [n, F]."""
    x = np.concatenate([features, np.ones((len(features), 1))], 1)
    y = happened.astype(np.float64)
    w = np.zeros(x.shape[1])
    w[:-1] = 1.0 / features.shape[1]
    penalty = np.diag([ridge] * features.shape[1] + [0.0])
    centre = w * (np.arange(len(w)) < features.shape[1])  # towards the mean of the inputs
    for _ in range(rounds):
        p = sigmoid(x @ w)
        gradient = x.T @ (p - y) + penalty @ (w - centre)
        curvature = (x * (p * (1 - p))[:, None]).T @ x + penalty + 1e-6 * np.eye(len(w))
        step = np.linalg.solve(curvature, gradient)
        w = w - step * min(1.0, 4.0 / max(np.abs(step).max(), 1e-9))
        if np.abs(step).max() < 1e-6:
            break
    return np.asarray(w)


def apply(weights: Array, features: Array) -> npt.NDArray[np.float32]:
    """Returns the probabilities [...] of features [..., F] by logistic regression."""
    return sigmoid(features @ weights[:-1] + weights[-1]).astype(np.float32)

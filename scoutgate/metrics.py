"""Measures forecasts: recall, precision, log-loss and calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
BINS = 10
EDGE = 1e-6  # probabilities are kept away from 0 and 1 by this much


def within_top(scores: FloatArray, count: int) -> BoolArray:
    """Marks each row's `count` highest scores; [B, E] -> [B, E]."""
    top = np.argpartition(-scores, min(count, scores.shape[-1]) - 1, axis=-1)[..., :count]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, top, True, axis=-1)
    return mask


@dataclass
class Score:
    """Sums over tokens of one layer's (and horizon's) forecasts."""

    top_k: int
    tokens: int = 0
    hits: int = 0  # chosen experts among the k likeliest
    hits_2k: int = 0
    chosen: int = 0
    loss: float = 0.0  # nats, summed over experts
    experts: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    forecast: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))
    happened: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, p: FloatArray, target: BoolArray) -> None:
        """Adds probabilities `p` [B, E] and their outcomes `target` [B, E]."""
        self.tokens += len(p)
        self.chosen += int(target.sum())
        self.experts = p.shape[-1]
        self.hits += int((within_top(p, self.top_k) & target).sum())
        self.hits_2k += int((within_top(p, 2 * self.top_k) & target).sum())
        safe = np.clip(p.astype(np.float64), EDGE, 1 - EDGE)
        self.loss -= float(np.log(np.where(target, safe, 1 - safe)).sum())
        bins = np.minimum((p * BINS).astype(int), BINS - 1).ravel()
        self.counts += np.bincount(bins, minlength=BINS)
        self.forecast += np.bincount(bins, p.ravel(), minlength=BINS)
        self.happened += np.bincount(bins, target.ravel(), minlength=BINS).astype(np.int64)

    def __add__(self, other: Score) -> Score:
        both = Score(self.top_k, experts=max(self.experts, other.experts))
        for name in ("tokens", "hits", "hits_2k", "chosen", "loss", "counts", "forecast", "happened"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def metrics(self) -> dict[str, float]:
        """Returns recall@k and @2k, precision@k, log-loss per expert (nats), and expected calibration error."""
        tokens = max(self.tokens, 1)
        seen = np.maximum(self.counts, 1)
        gaps = np.abs(self.forecast / seen - self.happened / seen)
        return {
            "recall_at_k": self.hits / max(self.chosen, 1),
            "recall_at_2k": self.hits_2k / max(self.chosen, 1),
            "precision_at_k": self.hits / (tokens * self.top_k),
            "log_loss": self.loss / max(int(self.counts.sum()), 1),
            "calibration_error": float((gaps * self.counts).sum() / max(int(self.counts.sum()), 1)),
        }

    def reliability(self) -> list[tuple[float, float, int]]:
        """Returns (mean forecast, share that happened, count) of each bin that is not empty."""
        full = self.counts > 0
        forecast, happened = self.forecast[full] / self.counts[full], self.happened[full] / self.counts[full]
        return list(zip(forecast.tolist(), happened.tolist(), self.counts[full].tolist(), strict=True))

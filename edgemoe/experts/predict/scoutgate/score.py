"""Keeps score of what came true of ScoutGate's forecasts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgemoe.types.arrays import FloatArray

DECAY = 0.998  # of the live score, per forecast


@dataclass(slots=True)
class ForecastScore:
    """Decayed score of one horizon's forecasts."""

    weight: float = 1e-9
    hits: float = 0.0
    loss: float = 0.0
    said: float = 0.0
    happened: float = 0.0

    def add(self, p: FloatArray, hot: FloatArray, top_k: int) -> None:
        """One sequence's forecast and outcome, [L, E] each."""
        safe = np.clip(p, 1e-6, 1 - 1e-6)
        top = np.argpartition(-p, top_k - 1, axis=1)[:, :top_k]
        hits = np.take_along_axis(hot, top, 1).mean()
        loss = -np.where(hot > 0, np.log(safe), np.log1p(-safe)).mean()
        for name, value in (
            ("weight", 1.0),
            ("hits", hits),
            ("loss", loss),
            ("said", p.sum()),
            ("happened", hot.sum()),
        ):
            setattr(self, name, getattr(self, name) * DECAY + float(value))

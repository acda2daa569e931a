"""Keeps score of what came true of ScoutGate's forecasts, also in a file, for the next start."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgemoe.durable import replace_file
from edgemoe.types.arrays import FloatArray

log = logging.getLogger(__name__)

DECAY = 0.998  # of the live score, per forecast


@dataclass(slots=True)
class ForecastScore:
    """Decayed score of one horizon's forecasts."""

    weight: float = 1e-9
    hits: float = 0.0
    loss: float = 0.0
    forecast: float = 0.0
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
            ("forecast", p.sum()),
            ("happened", hot.sum()),
        ):
            setattr(self, name, getattr(self, name) * DECAY + float(value))


def write_scores(file: Path, export: str, scores: Sequence[ForecastScore]) -> None:
    """Keeps the scores of an export, which its hash names. Logs where that fails."""
    try:
        replace_file(file, json.dumps({"export": export, "scores": [asdict(score) for score in scores]}).encode())
    except OSError as error:
        log.warning(f"how good forecasts were is not kept: {error}")


def read_scores(file: Path, export: str, horizons: int) -> list[ForecastScore]:
    """Returns what was kept of this export, by horizon; fresh scores where the file is of another one, or none."""
    try:
        kept = json.loads(file.read_text())
        scores = [ForecastScore(**{name: float(value) for name, value in each.items()}) for each in kept["scores"]]
        usable = all(math.isfinite(value) and value >= 0 for each in scores for value in asdict(each).values())
        if usable and kept["export"] == export and len(scores) == horizons and all(each.weight for each in scores):
            return scores
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass  # it begins anew: nothing but the trust in an export is lost
    return [ForecastScore() for _ in range(horizons)]

"""What ScoutGate's forecasts are computed from: tables that no token changes, and each sequence's last tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from edgemoe.experts.predict.scoutgate.export import Export, promised_loss
from edgemoe.types.arrays import FloatArray, IntArray

CHUNK = 8192  # rows of the embedding projected at once


class TokenEmbedding(Protocol):
    """The main model's embedding [V, H], as its decoder has it, encoded or not."""

    columns: int  # H

    def __len__(self) -> int:
        """Returns V."""

    def rows_at(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these numbers [n], float32 [n, H]."""


@dataclass(slots=True)
class TokenWindow:
    """One sequence: its last tokens, and the experts of the very last."""

    tokens: deque[int]
    end: int = 0  # position after the last token
    previous: IntArray | None = None  # [L * k], counted through all layers


@dataclass(frozen=True, slots=True)
class ForecastTables:
    """What no token changes, worked out once. `projected` [V, d_proj] is step 3 of the whole vocabulary."""

    export: Export
    projected: torch.Tensor
    towers: torch.Tensor  # [rank, horizons * L * E], calibration's scale included
    own: torch.Tensor  # [horizons * L * E]
    experts: int = field(default=0)

    @classmethod
    def of(cls, export: Export, embedding: TokenEmbedding) -> ForecastTables:
        """Works them out from the embedding on any device, of which it decodes or copies a chunk at a time."""
        gate, experts = export.gate, export.shape.experts[0]
        with torch.inference_mode():
            projected = torch.empty(len(embedding), gate.shape.projection, dtype=torch.float16)
            for numbers in torch.split(torch.arange(len(embedding)), CHUNK):
                projected[numbers] = gate.project(embedding.rows_at(numbers).cpu()).half()
            towers, own = gate.towers()
            scale = export.scale.repeat_interleave(experts)
            towers, own = towers * scale[:, None], own * scale + export.shift.repeat_interleave(experts)
            return cls(export, projected, towers.T.contiguous(), own, experts)

    @property
    def promised_loss(self) -> float:
        return promised_loss(self.export.record)

    def probs(self, tracks: list[TokenWindow]) -> FloatArray:
        """Calibrated forecasts for each sequence, [S, horizons, L, E]."""
        shape = self.export.shape
        window = torch.full((len(tracks), shape.window), -1)
        previous = torch.full((len(tracks), shape.layers * shape.top_k), shape.total)
        for row, track in enumerate(tracks):
            window[row, shape.window - len(track.tokens) :] = torch.tensor(list(track.tokens))
            if track.previous is not None:
                previous[row] = torch.from_numpy(track.previous)
        z = self.projected[window.clamp_min(0)].float()
        summary = self.export.gate.summary(z, window >= 0, previous, None)
        logits = torch.addmm(self.own, summary, self.towers)
        probs: FloatArray = logits.sigmoid().view(len(tracks), shape.horizons, shape.layers, self.experts).numpy()
        return probs

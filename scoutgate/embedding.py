"""The main model's token embedding, for training."""

from __future__ import annotations

from pathlib import Path

import torch

from edgemoe.experts.predict.scoutgate.embedding import load_embedding
from scoutgate.data import Recording


def embedding_for(recording: Recording, model: Path | None) -> torch.Tensor:
    """The embedding to train with; a single zero where the recording has no token ids. Raises ValueError."""
    if not recording.has_tokens:
        return torch.zeros(1, 1)
    if model is None:
        raise ValueError("this recording has token ids: say with --model whose they are (a checkpoint or a store)")
    table = load_embedding(model)
    if int(recording.tokens.max()) >= len(table):
        raise ValueError(f"{model} has a vocabulary of {len(table)}, but the recording names larger token ids")
    return table

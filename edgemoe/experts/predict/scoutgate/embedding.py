"""Reads the main model's token embedding, which ScoutGate shares, from a checkpoint or a packed store."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


def load_embedding(directory: Path) -> torch.Tensor:
    """Returns the embedding [V, H] in the model's dtype. Raises ValueError where the directory holds none."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if name.endswith("embed_tokens.weight"):
                        found: torch.Tensor = tensors.get_tensor(name)
                        return found
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
    raise ValueError(f"no token embedding in {directory}; give a checkpoint or a packed store of the recorded model")

"""The main model's token embedding, which ScoutGate shares, from a checkpoint or a packed store, for training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from edgemoe.encodings.codec import unpack
from edgemoe.errors import EdgemoeError
from edgemoe.store.manifest import Manifest, spec_of
from edgemoe.types.encoding import ENCODINGS
from scoutgate.data import Recording


def embedding_for(recording: Recording, model: Path | None) -> torch.Tensor:
    """Returns the embedding to train with; a single zero if the recording has no token ids. Raises ValueError."""
    if not recording.has_tokens:
        return torch.zeros(1, 1)
    if model is None:
        raise ValueError("this recording has token ids: name their model with --model (a checkpoint or a store)")
    table = load_embedding(model)
    if int(recording.tokens.max()) >= len(table):
        raise ValueError(f"{model} has a vocabulary of {len(table)}, but the recording names larger token ids")
    return table


def load_embedding(directory: Path) -> torch.Tensor:
    """Returns the embedding [V, H] in the model's dtype. Raises ValueError where the directory holds none."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if name.endswith("embed_tokens.weight"):
                        found: torch.Tensor = tensors.get_tensor(name)
                        return _decoded(found, directory) if found.dtype == torch.uint8 else found
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
    raise ValueError(f"no token embedding in {directory}; give a checkpoint or a packed store of the recorded model")


def _decoded(rows: torch.Tensor, directory: Path) -> torch.Tensor:
    """Returns the weights of a store whose dense matrices are encoded."""
    try:
        spec = spec_of(Manifest.read(directory))
    except EdgemoeError as error:
        raise ValueError(str(error)) from error
    weights = unpack(rows.numpy(), ENCODINGS[spec.dense_encoding], spec.geometry.hidden)
    return torch.from_numpy(weights).to(torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32)

"""Decodes a store's weights into a plain checkpoint: the oracle of a store in few bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from edgemoe.encodings.codec import pack, unpack
from edgemoe.store.layout import MATRICES, WantedEncodings
from edgemoe.types.encoding import ENCODINGS


def in_float32(checkpoint: Path, directory: Path) -> Path:
    """Copies a checkpoint, with all weights in float32."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text()) | {"torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    return directory


def dequantised(checkpoint: Path, directory: Path, experts: str, dense: str = "keep") -> Path:
    """Copies a checkpoint with one float32 tensor for each matrix; its weights are encoded and decoded again.

    Encodings are stated as for `edgemoe pack`; all layers have experts.
    """
    shutil.copytree(checkpoint, directory)
    tensors, wanted = load_file(directory / "model.safetensors"), WantedEncodings.parse(experts, dense)
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    for name, tensor in tensors.items():
        layer = re.search(r"layers\.(\d+)\..*experts\.", name)
        encoding = ENCODINGS.get(wanted.of_layer(int(layer[1]), layers) if layer else wanted.dense)
        if encoding is not None and name.endswith(MATRICES):
            flat = tensor.reshape(-1, tensor.shape[-1]).numpy()
            decoded = unpack(pack(flat, encoding), encoding, flat.shape[1])
            tensors[name] = torch.from_numpy(decoded).view(tensor.shape)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory

"""The demo model in float32, whose greedy tokens do not depend on the way of computing experts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from edgemoe.demo import model_path
from edgemoe.store.manifest import MANIFEST, Manifest
from edgemoe.store.packer import ensure_store


def float32_demo(folder: Path, width: int = 0) -> Path:
    """Packs the model into `folder` unless it is there already. Returns the store.

    With a `width`, its experts are padded with zeros to that width: larger and slower, with the same results.
    """
    checkpoint = folder / (f"demo-float32-{width}" if width else "demo-float32")
    if not checkpoint.exists():
        fresh = checkpoint.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(model_path(), fresh)
        config = json.loads((fresh / "config.json").read_text())
        config["torch_dtype"] = "float32"
        if width:
            config["moe_intermediate_size"] = config["intermediate_size"] = width
        (fresh / "config.json").write_text(json.dumps(config, indent=1))
        weights = {
            name: _wide(name, tensor.to(torch.float32), width)
            for name, tensor in load_file(fresh / "model.safetensors").items()
        }
        save_file(weights, fresh / "model.safetensors", {"format": "pt"})
        fresh.rename(checkpoint)
    return ensure_store(checkpoint, folder / "stores")


def _wide(name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Pads an expert's matrix with zeros up to `width`."""
    if not width or ".experts." not in name:
        return tensor
    rows, columns = tensor.shape
    wide = torch.zeros((rows, width) if name.endswith("down_proj.weight") else (width, columns))
    wide[:rows, :columns] = tensor
    return wide


def part_of(store: Path, folder: Path, keep: Callable[[int, int], bool]) -> Path:
    """Copies the store to `folder` with the experts for which `keep(layer, expert)` holds. Replaces the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(store, folder, copy_function=os.link)
    manifest = Manifest.load(folder)
    layers = tuple(
        msgspec.structs.replace(layer, experts=tuple(e for e in layer.experts if keep(n, e.expert)))
        for n, layer in enumerate(manifest.layers)
    )
    (folder / MANIFEST).unlink()  # the hard link, and not its target
    msgspec.structs.replace(manifest, layers=layers).save(folder)
    return folder

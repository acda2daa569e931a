"""A data set whose routes follow from the last two tokens, so that the best forecast is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from scoutgate.data import Meta, Routes, write

VOCAB, EMBEDDING, TOP_K = 24, 16, 2
EXPERTS = (6, 8, 8)  # layers of different sizes


def routes_of(tokens: np.ndarray) -> np.ndarray:
    """Returns routes [n, L, k] of tokens [n]: one expert by this token, one by the token before."""
    before = np.concatenate([[0], tokens[:-1]])
    layers = []
    for layer, size in enumerate(EXPERTS):
        first = (tokens * 3 + layer) % size
        second = (first + 1 + (before + layer) % (size - 1)) % size
        layers.append(np.stack([first, second], -1))
    return np.stack(layers, 1).astype(np.int16)


def requests(count: int, seed: int = 0) -> Iterator[Routes]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, int(rng.integers(12, 40))).astype(np.int32)
        decode = np.arange(len(tokens)) >= 6
        yield Routes(tokens, routes_of(tokens), decode)


def dataset(directory: Path, count: int = 120) -> Path:
    write(directory, Meta("tests/synthetic", EXPERTS, TOP_K, digest="d1", tokenizer="t1"), requests(count))
    return directory


def checkpoint(directory: Path) -> Path:
    """Makes a directory with only a token embedding."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, EMBEDDING, generator=generator).to(torch.bfloat16)
    save_file({"model.embed_tokens.weight": table}, directory / "model.safetensors")
    return directory

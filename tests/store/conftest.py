"""Checkpoints that the store's tests share; never written to after they are made."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import tiny_checkpoint

from edgemoe.store.packer import pack

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`tiny_checkpoint`, made once for each set of arguments."""
    made: dict[tuple[object, ...], Path] = {}

    def make(
        family: str = "qwen3_moe",
        dtype: torch.dtype = torch.float32,
        stacked: bool = False,
        sharded: bool = False,
        **overrides: object,
    ) -> Path:
        key = (family, dtype, stacked, sharded, *sorted(overrides.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
            made[key] = tiny_checkpoint(family, directory, dtype, stacked, sharded, **overrides)
        return made[key]

    return make


@pytest.fixture
def own_checkpoint(checkpoint: Make, tmp_path: Path) -> Make:
    """As `checkpoint`, but a copy that the test may damage."""

    def make(**kinds: object) -> Path:
        return shutil.copytree(checkpoint(**kinds), tmp_path / "source")

    return make


@pytest.fixture
def store(checkpoint: Make, tmp_path: Path) -> Path:
    """A packed store that the test may damage."""
    pack(checkpoint(), tmp_path / "store")
    return tmp_path / "store"

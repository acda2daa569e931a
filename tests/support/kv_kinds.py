"""Models of each kind of cache: keys and values in float32 and in int8, states beside them, and windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgemoe.kernels.cpu.runtime import Kernels
from support.checkpoints import tiny_checkpoint
from support.engine_kit import Model, plain_model
from support.family_kit import family_model
from support.kept import KERNELS
from support.states_kit import stateful_model

KV_KINDS = ("float32", "states", "int8", "windows")


@contextmanager
def kv_kind(kind: str, folder: Path) -> Iterator[Callable[[], Model]]:
    """Yields a maker of models of one kind."""
    if kind in ("float32", "states"):
        yield plain_model if kind == "float32" else stateful_model
        return
    kernels = Kernels(1, bf16=False, directory=KERNELS)
    family = "deepseek_v3" if kind == "int8" else "gpt_oss"
    checkpoint = tiny_checkpoint(family, folder / "hf", stacked=True)
    with family_model(checkpoint, folder / "store", kernels, 18, kv_int8=kind == "int8") as model:
        yield lambda: model
    kernels.close()

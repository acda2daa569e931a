"""Opens a checkpoint: a folder of safetensors, a GGUF file, or a folder with one GGUF model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgemoe.errors import CheckpointError
from edgemoe.store.checkpoint import CONFIG, Checkpoint, file_stat, fingerprint_of
from edgemoe.store.gguf.gguf_file import GgufModel, is_gguf, open_gguf, refuse_other
from edgemoe.store.gguf.gguf_models import config_of
from edgemoe.store.gguf.gguf_tokenizer import tokenizer_files

BESIDE = ("mmproj", "mtp-", "imatrix")  # beginnings of the names of files that are no language model


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufCheckpoint(Checkpoint):
    """A checkpoint with the tensors of GGUF files, under GGUF's names."""

    model: GgufModel


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Returns the checkpoint of a folder or a GGUF file. Raises CheckpointError and UnsupportedModel."""
    path = Path(path)
    file = gguf_at(path)
    return Checkpoint.open(path) if file is None else _open_gguf(file)


def gguf_at(path: Path) -> Path | None:
    """Returns the GGUF file that a path names, or that is the only model of a folder without a config.json.

    Raises CheckpointError where a folder has the files of several models, or one that is no file, or no GGUF.
    """
    if path.is_file():
        if path.suffix == ".gguf" and not is_gguf(path):
            refuse_other(path)
        return path if is_gguf(path) else None
    if not path.is_dir() or (path / CONFIG).is_file():
        return None
    models: dict[str, Path] = {}
    for file in sorted(path.glob("*.gguf")):
        if not file.name.startswith(BESIDE):
            models.setdefault(re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-\1", file.name), file)
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise CheckpointError(f"{path} has the GGUF files of {len(models)} models; name one of {names[:400]}")
    for file in models.values():
        if not file.is_file():
            raise CheckpointError(f"{file} is no file, or a link to a missing one; fetch it again")
    return next(iter(models.values()), None)


def _open_gguf(file: Path) -> GgufCheckpoint:
    model = open_gguf(file)
    config = config_of(model)
    files = {CONFIG: msgspec.json.format(msgspec.json.encode(config), indent=2), **tokenizer_files(model)}
    return GgufCheckpoint(
        directory=model.files[0],
        config=config,
        tensors=model.tensors,
        copied=(),
        fingerprint=fingerprint_of([file_stat(each) for each in model.files], model.tensors),
        made=tuple(files.items()),
        model=model,
    )

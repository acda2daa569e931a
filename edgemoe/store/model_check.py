"""Tells from names and config.json alone whether a path has a model that can be read, and what to do where not.

What is cheap is checked before what is dear: nothing here opens weights, and `plan`, `pack` and `serve` ask in the same
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec
from edgemoe.store.checkpoint import CONFIG, read_json
from edgemoe.store.layout import precision
from edgemoe.store.sources import check_method, quantisation

GGUF_MAGIC = b"GGUF"
GGUF_HEAD_BYTES = 1 << 16  # of the file, in which the first keys lie
GGUF_ARCHITECTURE = b"general.architecture" + (8).to_bytes(4, "little")  # a key, and the type of a string
MOST_NAME_BYTES = 64
CHECKPOINT = "fetch the model's safetensors instead (`edgemoe pull OWNER/NAME`); `--experts int4` makes them as small"
KEPT = {"mxfp4": "mxfp4", "fp8": "fp8"}  # quant_method -> what its experts are kept in


def spec_at(path: Path) -> ModelSpec:
    """Returns the spec of a checkpoint's folder, or of a config.json, without a look at its weights.

    Raises CheckpointError and UnsupportedModel, saying what lies there instead and what to do.
    """
    demand_path(path)
    if path.is_file() and gguf_architecture(path) is not None:
        raise UnsupportedModel(_gguf(path, path))
    if path.is_dir() and not (path / CONFIG).is_file():
        found = next(iter(sorted(path.glob("*.gguf"))), None)
        if found is not None:
            raise UnsupportedModel(_gguf(path, found))
        raise CheckpointError(f"{path} has no {CONFIG}: is this a model's folder?")
    config = read_json(path / CONFIG if path.is_dir() else path)
    check_method(config)
    spec = spec_from_config({**config, "dtype": precision(config)})
    kept = _kept(config)
    return replace(spec, encodings=(kept,) * spec.geometry.layers) if kept else spec


def missing_part(path: Path) -> Path | None:
    """Returns the first folder or file of a path that is not there; None where all is."""
    return next((each for each in (*reversed(path.parents), path) if not each.exists()), None)


def demand_path(path: Path) -> None:
    """Raises CheckpointError where a path is not there."""
    if missing := missing_part(path):
        raise CheckpointError(f"{path} is not there: {missing} is missing; is the path right, and its disk mounted?")


def gguf_architecture(path: Path) -> str | None:
    """Returns what a GGUF file says its architecture is, "" where its head does not say; None of another file."""
    try:
        with path.open("rb") as file:
            head = file.read(GGUF_HEAD_BYTES)
    except OSError:
        return None
    if not head.startswith(GGUF_MAGIC):
        return None
    _, key, rest = head.partition(GGUF_ARCHITECTURE)
    length = int.from_bytes(rest[:8], "little")
    return rest[8 : 8 + length].decode("ascii", "replace") if key and length <= MOST_NAME_BYTES else ""


def _gguf(named: Path, file: Path) -> str:
    of = gguf_architecture(file)
    what = f"{named} is a GGUF" if named == file else f"{named} has GGUF files only"
    return f"{what}{f' of {of}' if of else ''}, which cannot be read yet; {CHECKPOINT}"


def _kept(config: Mapping[str, Any]) -> str:
    """Returns the encoding in which a quantised checkpoint keeps its experts; "" where it is not quantised."""
    given = quantisation(config)
    if (method := given.get("quant_method")) in KEPT:
        return KEPT[method]
    weights = [(group.get("weights") or {}) for group in (given.get("config_groups") or {}).values()]
    kinds = {f"{about.get('type', 'int')}{about.get('num_bits', '')}" for about in weights}
    return {"int4": "int4", "int8": "int8", "float8": "fp8"}.get(min(kinds, default=""), "")

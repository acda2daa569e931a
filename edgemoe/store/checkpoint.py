"""A Hugging Face checkpoint directory: its configuration, and where each tensor's bytes lie.

Nothing in the directory is trusted: every header, offset and name is checked before a byte of a tensor is read.
Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON header, the tensors without holes).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from edgemoe import demo
from edgemoe.errors import CheckpointError, ShardCutShort
from edgemoe.types.json_object import Json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_JSON_BYTES = 64 << 20
TOKENIZER = "tokenizer.json"
LFS_POINTER = b"version https://git-lfs.github.com/"
WEB_PAGE = (b"<!doctype html", b"<html")
START_BYTES = 64  # by which such a file is told
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"
COPIED_FILES = (
    CONFIG,
    "generation_config.json",
    "hf_quant_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a safetensors file: `bytes` from `offset` of the file."""

    file: Path
    name: str
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files have been found whole. `fingerprint` changes when any of them does."""

    directory: Path
    config: Json
    tensors: dict[str, CheckpointTensor]
    copied: tuple[Path, ...]  # files that the store keeps as they are
    fingerprint: str
    made: tuple[tuple[str, bytes], ...] = ()  # names and contents of files that the store keeps besides

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Raises CheckpointError, saying which file is wrong and why."""
        directory = Path(directory)
        config = read_config(directory)
        weights, weight_map = weight_files(directory)
        for path in weights:
            if not path.is_file():
                remedy = "fetch it, or name the store where shards were deleted as they were packed"
                raise CheckpointError(f"{path}, which {INDEX} names, is missing; {remedy}")
        headers = {path: read_header(path) for path in weights}
        tensors = _merge(headers)
        check_index(weight_map, tensors)
        copied = copied_files(directory)
        stats = [file_stat(path) for path in (*weights, *copied)]
        return cls(directory, config, tensors, copied, fingerprint_of(stats, tensors))

    @property
    def name(self) -> str:
        """Returns the directory's name; the repository's where it is a snapshot in the hub's cache; the demo's own."""
        path = self.directory.resolve()
        if path == demo.FOLDER.resolve():
            return demo.NAME
        if path.suffix == ".gguf":
            return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return path.parent.parent.name.split("--")[-1]
        return path.name


def check_tokenizer(directory: Path) -> None:
    """Raises CheckpointError before packing if a checkpoint lacks its tokenizer, or a file beside it cannot be read."""
    if (directory / CONFIG).is_file() and not (directory / TOKENIZER).is_file():
        raise CheckpointError(
            f"{directory} has no {TOKENIZER}, without which its model cannot be served; transformers can make one of "
            "most other tokenizers: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
        )
    for path in copied_files(directory):
        if path.suffix == ".json":
            read_json(path)


def read_config(directory: Path) -> Json:
    """Returns config.json, with modelopt's separate quantisation file merged in.

    Raises CheckpointError.
    """
    config = read_json(directory / CONFIG)
    if config.get("quantization_config") or not (directory / MODELOPT).is_file():
        return config
    given = read_json(directory / MODELOPT).get("quantization")
    return {**config, "quantization_config": {"quant_method": "modelopt", **(given if isinstance(given, dict) else {})}}


def read_json(path: Path) -> Json:
    """Returns a JSON object from a file of the checkpoint. Raises CheckpointError."""
    try:
        _demand_small(path)
        written = path.read_bytes()
        refuse_substitute(path, written)
        found = json.loads(written, object_pairs_hook=_unique)
    except NotADirectoryError as error:
        raise CheckpointError(f"{path.parent} is a file; name the folder that it lies in") from error
    except OSError as error:
        remedy = "; is this a model's directory?" if isinstance(error, FileNotFoundError) else ""
        raise CheckpointError(f"{path} cannot be read: {error.strerror}{remedy}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(found).__name__}")
    return found


def refuse_substitute(path: Path, start: bytes) -> None:
    """Raises CheckpointError for a Git LFS pointer or a web page in place of a file."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file; fetch the files with `git lfs pull`")
    if start[:START_BYTES].lstrip().lower().startswith(WEB_PAGE):
        raise CheckpointError(f"{path} is a web page, not the file; fetch it again, with a token if it asks for one")


def read_header(path: Path) -> dict[str, CheckpointTensor]:
    """Returns the tensors of one safetensors file, by name. Raises CheckpointError."""
    header, size = header_of(path)
    return parse_header(header, path, size)


def header_of(path: Path) -> tuple[bytes, int]:
    """Returns the header of a safetensors file, and the size of the file. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
                file.seek(0)
                refuse_substitute(path, file.read(START_BYTES))
                cut = len(prefix) < 8 or 2 <= header_bytes <= MAX_HEADER_BYTES
                kind = ShardCutShort if cut else CheckpointError
                raise kind(f"{path} is no safetensors file, or cut short ({size} bytes)")
            return file.read(header_bytes), size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def parse_header(header: bytes, path: Path, file_bytes: int) -> dict[str, CheckpointTensor]:
    """Checks a safetensors header against the size of its file. Raises CheckpointError."""
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    entries.pop("__metadata__", None)
    start = 8 + len(header)
    tensors = [_tensor(path, name, entry, start) for name, entry in entries.items()]
    end = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} overlaps another or leaves a hole before it")
        end += tensor.bytes
    if end > file_bytes:
        raise ShardCutShort(f"{path} is cut short: {file_bytes} bytes of {end}; fetch it again")
    if end < file_bytes:
        raise CheckpointError(f"{path} has {file_bytes - end} bytes that belong to no tensor")
    return {tensor.name: tensor for tensor in tensors}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor in a safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _tensor(path: Path, name: str, raw: Any, start: int) -> CheckpointTensor:
    try:
        entry = msgspec.convert(raw, _Entry)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise CheckpointError(f"{path}: tensor {name!r}: {error}") from error
    begin, end = entry.data_offsets
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name!r} is of type {entry.dtype}, which is not supported")
    if len(entry.shape) > 8 or min(entry.shape, default=0) < 0 or not 0 <= begin <= end:
        raise CheckpointError(f"{path}: tensor {name!r} has an impossible shape or place")
    if math.prod(entry.shape) * ITEM_BYTES[entry.dtype] != end - begin:
        what = f"tensor {name!r} of shape {list(entry.shape)} and type {entry.dtype}"
        raise CheckpointError(f"{path}: {what} cannot take {end - begin} bytes")
    return CheckpointTensor(path, name, entry.dtype, entry.shape, start + begin, end - begin)


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found: Json = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found


def weight_files(directory: Path) -> tuple[list[Path], Json]:
    """Returns the safetensors files of the checkpoint and the index's map from tensor to file ({} without one).

    Files that the index names need not be there. Raises CheckpointError.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], {}
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{directory / INDEX} has no weight_map")
        return [_shard(directory, name) for name in sorted(set(map(str, weight_map.values())))], weight_map
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found, {}
    if found:
        raise CheckpointError(f"{directory} has {len(found)} safetensors files but no {INDEX}")
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory} has only pickled weights ({pickles[0]}), which can run code when they are loaded; "
            "save the model as safetensors (transformers: save_pretrained) and pack that"
        )
    raise CheckpointError(f"{directory} has no safetensors files")


def _shard(directory: Path, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", name):
        raise CheckpointError(f"{directory / INDEX} points at {name!r}, which is no safetensors file of the directory")
    return directory / name


def _merge(headers: dict[Path, dict[str, CheckpointTensor]]) -> dict[str, CheckpointTensor]:
    tensors: dict[str, CheckpointTensor] = {}
    for path, found in headers.items():
        for name, tensor in found.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is both in {tensors[name].file.name} and in {path.name}")
            tensors[name] = tensor
    return tensors


def check_index(weight_map: Json, tensors: dict[str, CheckpointTensor]) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{INDEX} says that tensor {name!r} is in {file}; it is not there")


def copied_files(directory: Path) -> tuple[Path, ...]:
    """Returns the files that a store keeps as they are. Raises CheckpointError where one is no file, or too large."""
    found = tuple(path for name in COPIED_FILES if os.path.lexists(path := directory / name))
    for path in found:
        if not path.is_file():
            raise CheckpointError(f"{path} is no file, or a link to a missing one; fetch it again")
        _demand_small(path)
    return found


def _demand_small(path: Path) -> None:
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, and {MAX_JSON_BYTES >> 20} MiB are the most; fetch it again")


class FileStat(NamedTuple):
    """Identifies one version of a file of the checkpoint."""

    name: str
    bytes: int
    mtime_ns: int


def file_stat(path: Path) -> FileStat:
    found = path.stat()
    return FileStat(path.name, found.st_size, found.st_mtime_ns)


def fingerprint_of(files: Iterable[FileStat], tensors: dict[str, CheckpointTensor]) -> str:
    """Returns a digest that changes when any of the files does, or the place of their tensors."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name} {file.bytes} {file.mtime_ns}\n".encode())
    for tensor in tensors.values():
        place = f"{tensor.file.name} {tensor.name!a} {tensor.dtype} {tensor.shape} {tensor.offset}\n"
        digest.update(place.encode())
    return digest.hexdigest()

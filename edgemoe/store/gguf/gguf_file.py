"""Reads the head of GGUF files: metadata, and where each tensor's bytes lie.

Nothing in a file is trusted. Every count, length, type and offset is checked against a bound and the file's size before
memory is allocated. No weight is read. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from edgemoe.errors import CheckpointError, ShardCutShort, UnsupportedModel
from edgemoe.store.checkpoint import START_BYTES, CheckpointTensor, refuse_substitute

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEAD_BYTES = 256 << 20  # metadata and tensor table of one file; vocabularies of 256 k tokens take some 15 MB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 512  # of a key or a tensor
MAX_ITEMS = 1 << 24  # of one array
MAX_FILES = 1024  # of one model
ALIGNMENT = 32  # the default of general.alignment
MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class ValueType:
    """How one type of tensor lies in bytes: `block` values in a row take `bytes`."""

    name: str
    block: int
    bytes: int


VALUE_TYPES = {  # number in the file -> type
    0: ValueType("F32", 1, 4),
    1: ValueType("F16", 1, 2),
    2: ValueType("Q4_0", 32, 18),
    3: ValueType("Q4_1", 32, 20),
    6: ValueType("Q5_0", 32, 22),
    7: ValueType("Q5_1", 32, 24),
    8: ValueType("Q8_0", 32, 34),
    10: ValueType("Q2_K", 256, 84),
    11: ValueType("Q3_K", 256, 110),
    12: ValueType("Q4_K", 256, 144),
    13: ValueType("Q5_K", 256, 176),
    14: ValueType("Q6_K", 256, 210),
    16: ValueType("IQ2_XXS", 256, 66),
    17: ValueType("IQ2_XS", 256, 74),
    18: ValueType("IQ3_XXS", 256, 98),
    19: ValueType("IQ1_S", 256, 50),
    20: ValueType("IQ4_NL", 32, 18),
    21: ValueType("IQ3_S", 256, 110),
    22: ValueType("IQ2_S", 256, 82),
    23: ValueType("IQ4_XS", 256, 136),
    29: ValueType("IQ1_M", 256, 56),
    30: ValueType("BF16", 1, 2),
    34: ValueType("TQ1_0", 256, 54),
    35: ValueType("TQ2_0", 256, 66),
    39: ValueType("MXFP4", 32, 17),
}
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0"}
STRING, ARRAY = 8, 9
NUMBERS = {  # type of a metadata value -> NumPy's name of it
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",  # truth values
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOLEAN = 7

Value = int | float | bool | str | list[str] | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Metadata of the first file, and the tensors of all files of a model."""

    files: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, CheckpointTensor]

    @property
    def architecture(self) -> str:
        """Returns the value of general.architecture, "" if the file has none."""
        found = self.metadata.get("general.architecture", "")
        return found if isinstance(found, str) else ""


def is_gguf(path: Path) -> bool:
    """Returns whether a file begins as a GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def refuse_other(path: Path) -> NoReturn:
    """Raises CheckpointError for a file that only has the name of a GGUF."""
    with path.open("rb") as file:
        refuse_substitute(path, file.read(START_BYTES))
    raise CheckpointError(f"{path} is no GGUF file, which would begin with GGUF; fetch it again")


def open_gguf(path: Path) -> GgufModel:
    """Reads the heads of a model's files; `path` is its only file, or any of several that are numbered.

    Raises CheckpointError and UnsupportedModel, naming the file and the field.
    """
    files = model_files(path)
    heads = [read_head(file) for file in files]
    metadata, tensors = heads[0][0], dict(heads[0][1])
    for file, (_, others) in zip(files[1:], heads[1:], strict=True):
        for name, tensor in others.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is both in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    said = metadata.get("split.tensors.count")
    if isinstance(said, int) and len(files) > 1 and said != len(tensors):
        raise CheckpointError(f"{path}: its {len(files)} files hold {len(tensors)} tensors, and should hold {said}")
    return GgufModel(files, metadata, tensors)


def model_files(path: Path) -> tuple[Path, ...]:
    """Returns all files of the model that `path` belongs to. Raises CheckpointError where one is missing."""
    found = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not found:
        return (path,)
    stem, _, count = found.groups()
    if not 1 <= int(count) <= MAX_FILES:
        raise CheckpointError(f"{path} says that it is one of {int(count)} files; {MAX_FILES} is the most")
    files = tuple(path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{path} is one of {int(count)} files, of which {missing[0]} is missing; fetch it, too")
    return files


def read_head(path: Path) -> tuple[dict[str, Value], dict[str, CheckpointTensor]]:
    """Returns a file's metadata and tensors. Raises CheckpointError and UnsupportedModel."""
    try:
        with path.open("rb") as file:
            return _Head(path, file).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


class _Head:
    """One pass over a file's head, of which at most `MAX_HEAD_BYTES` are read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file, self._at = path, file, 0
        self._file_bytes = os.fstat(file.fileno()).st_size

    def read(self) -> tuple[dict[str, Value], dict[str, CheckpointTensor]]:
        if self._read_bytes(len(MAGIC)) != MAGIC:
            refuse_other(self._path)
        version = self._integer("<I")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise UnsupportedModel(f"{self._path} is a GGUF for big-endian machines, which cannot be read")
            raise UnsupportedModel(f"{self._path} is a GGUF of version {version}; versions 2 and 3 can be read")
        tensors, keys = self._integer("<Q"), self._integer("<Q")
        self._demand(keys <= MAX_KEYS, f"{keys} keys; {MAX_KEYS} is the most")
        self._demand(tensors <= MAX_TENSORS, f"{tensors} tensors; {MAX_TENSORS} is the most")
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = self._name("a key")
            self._demand(key not in metadata, f"the key {key!r} twice")
            metadata[key] = self._value(key)
        table = [self._tensor_entry() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise CheckpointError(f"{self._path}: general.alignment = {str(alignment)[:40]} is impossible")
        start = -(-self._at // alignment) * alignment
        return metadata, self._placed(table, start, alignment)

    def _value(self, key: str) -> Value:
        kind = self._integer("<I")
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(key)
        self._demand(kind in NUMBERS, f"a value of type {kind}, which does not exist, for {key!r}")
        found = np.frombuffer(self._read_bytes(np.dtype(NUMBERS[kind]).itemsize), NUMBERS[kind])[0]
        plain: int | float = found.item()
        return bool(plain) if kind == BOOLEAN else plain

    def _array(self, key: str) -> list[str] | npt.NDArray[np.generic]:
        kind, count = self._integer("<I"), self._integer("<Q")
        self._demand(count <= MAX_ITEMS, f"{count} items for {key!r}; {MAX_ITEMS} is the most")
        if kind == STRING:
            self._demand(8 * count <= self._left(), f"{count} texts for {key!r}, more than its bytes hold")
            return [self._text() for _ in range(count)]
        self._demand(kind in NUMBERS, f"an array of type {kind} for {key!r}, which cannot be read")
        found = np.frombuffer(self._read_bytes(np.dtype(NUMBERS[kind]).itemsize * count), NUMBERS[kind])
        return found.astype(bool) if kind == BOOLEAN else found

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a tensor")
        dimensions = self._integer("<I")
        self._demand(1 <= dimensions <= MAX_DIMENSIONS, f"{dimensions} dimensions of {name!r}; 1 to 4 are possible")
        sizes = [self._integer("<Q") for _ in range(dimensions)]
        kind, offset = self._integer("<I"), self._integer("<Q")
        self._demand(all(1 <= size < 1 << 40 for size in sizes), f"the sizes {sizes} of {name!r}")
        return name, tuple(reversed(sizes)), kind, offset

    def _placed(
        self, table: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, CheckpointTensor]:
        """Returns the tensors with their places in the file, none of which overlap."""
        found: dict[str, CheckpointTensor] = {}
        for name, shape, kind, offset in table:
            self._demand(name not in found, f"the tensor {name!r} twice")
            value_type = VALUE_TYPES.get(kind)
            if value_type is None:
                called = OTHER_TYPES.get(kind, f"number {kind}")
                known = ", ".join(each.name for each in VALUE_TYPES.values())
                raise UnsupportedModel(f"{self._path}: tensor {name!r} is of type {called}; supported are {known}")
            fits = shape[-1] % value_type.block == 0 and offset % alignment == 0
            self._demand(fits, f"tensor {name!r} of shape {list(shape)} at {offset}, impossible for {value_type.name}")
            size = math.prod(shape) // value_type.block * value_type.bytes
            if start + offset + size > self._file_bytes:
                raise ShardCutShort(
                    f"{self._path} is cut short: tensor {name!r} ends at {start + offset + size} of "
                    f"{self._file_bytes} bytes; fetch it again"
                )
            found[name] = CheckpointTensor(self._path, name, value_type.name, shape, start + offset, size)
        end = start
        for tensor in sorted(found.values(), key=lambda each: each.offset):
            self._demand(tensor.offset >= end, f"tensor {tensor.name!r}, which overlaps another")
            end = tensor.offset + tensor.bytes
        return found

    def _name(self, of: str) -> str:
        length = self._integer("<Q")
        self._demand(1 <= length <= MAX_NAME_BYTES, f"a name of {length} bytes for {of}")
        return self._decoded(self._read_bytes(length), of)

    def _text(self) -> str:
        return self._read_bytes(self._integer("<Q")).decode("utf-8", "replace")

    def _decoded(self, raw: bytes, of: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: the name of {of} is no UTF-8: {raw[:40]!r}") from None

    def _integer(self, form: str) -> int:
        found: int = struct.unpack(form, self._read_bytes(struct.calcsize(form)))[0]
        return found

    def _read_bytes(self, size: int) -> bytes:
        if size > self._left():
            if self._at + size <= self._file_bytes:
                raise CheckpointError(f"{self._path}: its head is longer than {MAX_HEAD_BYTES >> 20} MiB")
            raise ShardCutShort(f"{self._path} is cut short, or says wrong lengths; fetch it again")
        self._at += size
        return self._file.read(size)

    def _left(self) -> int:
        return min(self._file_bytes, MAX_HEAD_BYTES) - self._at

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise CheckpointError(f"{self._path} has {what}")

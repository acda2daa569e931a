"""No header, however wrong, does more than raise CheckpointError."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save

from edgemoe.errors import CheckpointError
from edgemoe.store.checkpoint import parse_header, read_header, read_json

HERE = Path("x.safetensors")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OFFSET = st.integers(-3, 40)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I64", "U8", "Q9", ""]) | JSON,
        "shape": st.lists(st.integers(-2, 9) | st.integers(), max_size=3) | JSON,
        "data_offsets": st.tuples(OFFSET, OFFSET).map(list) | JSON,
    },
    optional={"more": JSON},
)


def header_of(raw: bytes) -> bytes:
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


@given(st.dictionaries(st.text(), ENTRY | JSON, max_size=4), st.integers(0, 200))
@example({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "\ud800": {}}, 64)
def test_a_nonsensical_header_is_refused_or_is_consistent(entries: dict[str, object], data_bytes: int) -> None:
    header = json.dumps(entries).encode()
    size = 8 + len(header) + data_bytes
    try:
        tensors = parse_header(header, HERE, size)
    except CheckpointError:
        return
    spans = sorted((tensor.offset, tensor.offset + tensor.bytes) for tensor in tensors.values())
    ends = [8 + len(header), *(end for _, end in spans)]
    assert [begin for begin, _ in spans] == ends[:-1]
    assert ends[-1] == size


@given(st.binary(max_size=64))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}')
def test_bytes_that_are_no_header_are_refused(raw: bytes) -> None:
    with suppress(CheckpointError):
        assert parse_header(raw, HERE, 8 + len(raw)) == {}


@given(st.data())
def test_a_flipped_bit_in_a_header_never_crashes(data: st.DataObject) -> None:
    raw = save({"weight": np.ones((3, 5), np.float32), "bias": np.ones(7, np.float16)})
    header = bytearray(header_of(raw))
    header[data.draw(st.integers(0, len(header) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CheckpointError):
        parse_header(bytes(header), HERE, len(raw))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 60])
def test_a_file_cut_within_its_header_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(save({"weight": np.ones((3, 5), np.float32)})[:length])
    with pytest.raises(CheckpointError, match="cut short"):
        read_header(path)


def test_a_header_length_beyond_the_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="cut short"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "cannot take 4 bytes"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, "leaves a hole"),
        ({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}, "impossible"),
        ({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, "type F4"),
        ({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, "cut short"),
        ({}, "belong to no tensor"),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]},
            },
            "overlaps",
        ),
    ],
)
def test_a_refusal_names_the_fault(header: dict[str, object], why: str) -> None:
    raw = json.dumps(header).encode()
    with pytest.raises(CheckpointError, match=why):
        parse_header(raw, HERE, 8 + len(raw) + 8)


def test_a_tensor_listed_twice_in_one_header_is_refused() -> None:
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    with pytest.raises(CheckpointError, match="'a' stands there twice"):
        parse_header(b"{" + entry + b"," + entry + b"}", HERE, 1000)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\n  <HTML lang=en>", "web page"),
    ],
)
def test_a_file_of_another_kind_in_the_files_place_is_named(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is a {why}"):
        (read_header if name.endswith("safetensors") else read_json)(tmp_path / name)

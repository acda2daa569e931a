"""Encodings against their definitions, against torch, and against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgemoe.encodings.codec import E4M3, pack, place, unpack
from edgemoe.encodings.rows import join, split
from edgemoe.types.encoding import ENCODINGS, FP8, INT4, INT8, MXFP4, Encoding

SCALED = [INT8, INT4, MXFP4, FP8]
COLUMNS = [32, 64, 96, 512, 768, 1312, 2880]


def _weights(rows: int, columns: int) -> np.ndarray:
    random = np.random.default_rng(columns)
    return (random.standard_t(5, (rows, columns)) * 0.02).astype(np.float32)


def _groups(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1, 32)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_row_has_the_bytes_that_its_encoding_says(encoding: Encoding, columns: int) -> None:
    rows = pack(_weights(3, columns), encoding)
    assert rows.shape == (3, encoding.row_bytes(columns))
    assert unpack(rows, encoding, columns).shape == (3, columns)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("name", "error"), [("float32", 0), ("bfloat16", 2**-8), ("int8", 0.008), ("fp8", 0.07)])
def test_unpacking_comes_near(name: str, error: float, columns: int) -> None:
    weights = _weights(5, columns)
    back = unpack(pack(weights, ENCODINGS[name]), ENCODINGS[name], columns)
    largest = np.abs(_groups(weights)).max(2)[:, :, None] if name == "int8" else np.abs(_groups(weights)) + 2e-5
    assert (np.abs(_groups(back - weights)) <= error / (2 if name == "int8" else 1) * largest).all()


def test_searched_scales_have_a_smaller_error_than_scales_by_the_largest_weight() -> None:
    weights = _weights(64, 1024)
    scales = np.abs(_groups(weights)).max(2, keepdims=True) / 7
    plain = _groups(weights) - np.rint(_groups(weights) / scales) * scales
    searched = unpack(pack(weights, INT4), INT4, 1024) - weights
    assert (searched**2).mean() < 0.8 * (plain**2).mean()


@pytest.mark.parametrize("encoding", SCALED, ids=lambda each: each.name)
@pytest.mark.parametrize("columns", COLUMNS)
def test_decoded_values_encode_to_themselves(encoding: Encoding, columns: int) -> None:
    once = unpack(pack(_weights(4, columns), encoding), encoding, columns)
    again = unpack(pack(once, encoding), encoding, columns)
    if encoding in (MXFP4, FP8):
        np.testing.assert_array_equal(again, once)
    else:  # a group may have no code at either end
        np.testing.assert_allclose(again, once, atol=np.abs(once).max() / (7 if encoding is INT4 else 127))


@pytest.mark.parametrize("encoding", SCALED, ids=lambda each: each.name)
@pytest.mark.parametrize("columns", COLUMNS)
def test_codes_and_scales_come_back_from_rows(encoding: Encoding, columns: int) -> None:
    random = np.random.default_rng(1)
    codes = random.integers(0, 1 << encoding.bits, (3, columns)).astype(np.uint8)
    scales = random.integers(0, 256, (3, encoding.scales(columns) * encoding.scale_bytes)).astype(np.uint8)
    rows = join(codes, scales, encoding)
    assert rows.shape[1] == encoding.row_bytes(columns)
    for was, now in zip((codes, scales), split(rows, encoding, columns), strict=True):
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("encoding", SCALED, ids=lambda each: each.name)
def test_nothing_but_zeros_stays_zero(encoding: Encoding) -> None:
    assert not unpack(pack(np.zeros((2, 64), np.float32), encoding), encoding, 64).any()


def test_e4m3_is_that_of_torch() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, theirs)


def test_fp8_rounds_as_torch_does() -> None:
    weights = _weights(8, 512)
    scales = np.abs(weights.reshape(8, 4, 128)).max(2) / np.float32(448)
    scaled = torch.from_numpy(weights.reshape(8, 4, 128) / scales[:, :, None])
    theirs = scaled.to(torch.float8_e4m3fn).float().numpy() * scales[:, :, None]
    np.testing.assert_array_equal(unpack(pack(weights, FP8), FP8, 512), theirs.reshape(8, 512))


def test_mxfp4_decodes_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 6, 5, 16)).astype(np.uint8)  # experts, rows, groups, bytes
    scales = random.integers(0, 254, (2, 6, 5)).astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    codes = np.stack([blocks & 15, blocks >> 4], axis=4).reshape(12, 160)
    ours = unpack(join(codes, scales.reshape(12, 5), MXFP4), MXFP4, 160)
    np.testing.assert_array_equal(ours.reshape(2, 6, 160), theirs.transpose(1, 2).numpy())


def test_scales_that_an_encoding_can_hold_are_kept() -> None:
    codes = np.full((1, 256), 9, np.uint8)
    for encoding, scales, value in ((INT4, [0.375] * 8, 1), (INT8, [0.625] * 8, 9), (MXFP4, [4.0] * 8, -0.5)):
        rows = place(codes, np.array([scales], np.float32), encoding)
        np.testing.assert_array_equal(unpack(rows, encoding, 256), np.full((1, 256), value * scales[0], np.float32))
    rows = place(codes, np.array([[0.1, 0.7]], np.float32), FP8)
    expected = np.repeat(np.array([0.1, 0.7], np.float32), 128)[None] * E4M3[9]
    np.testing.assert_array_equal(unpack(rows, FP8, 256), expected)


def test_columns_that_fill_no_lane_do_not_fit() -> None:
    assert not any(encoding.fits(columns) for encoding in SCALED for columns in (0, 8, 33, 100))
    assert ENCODINGS["bfloat16"].fits(33)

"""Quantises weights to GGUF's types, K-quants too, which the library of the format's authors only decodes."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantised(weights: Floats, kind: str) -> Bytes:
    """Returns weights [..., C] in blocks of a type, uint8 [..., bytes], each rounded to the nearest code."""
    if not kind.endswith("_K"):
        return gguf.quantize(weights, gguf.GGMLQuantizationType[kind])
    blocks = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}[kind](weights.reshape(-1, 256))
    return blocks.reshape(*weights.shape[:-1], -1)


def random_blocks(kind: str, rows: int, blocks: int) -> Bytes:
    """Returns rows of random bytes whose 16-bit numbers are finite, of either sign, and some of them subnormal."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    random = np.random.default_rng(len(kind) + size)
    made = random.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    for at in NUMBERS.get(kind, (0,)):
        spread = random.choice([1e-6, 1e-2, 1.0], (rows, blocks, 1))
        numbers = (random.standard_normal((rows, blocks, 1)) * spread).astype(np.float16)
        made[:, :, at : at + 2] = numbers.view(np.uint8).reshape(rows, blocks, 2)
    return made.reshape(rows, -1)


NUMBERS = {  # the places of a block's 16-bit numbers, where they are not its first two bytes alone
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
}


def _halves(numbers: Floats) -> Bytes:
    return np.ascontiguousarray(numbers.astype(np.float16))[:, None].view(np.uint8)


def _divided(values: Floats, by: Floats) -> Floats:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _line(weights: Floats, most: int) -> tuple[Bytes, Bytes]:
    """Returns codes [b, 8, 32] and the first 16 bytes of blocks: scale, minimum and their 6-bit parts."""
    groups = weights.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0)
    scale, minimum = (groups.max(2) - low) / most, -low
    numbers, parts = [], []
    for values in (scale, minimum):
        number = (values.max(1) / 63).astype(np.float16).astype(np.float32)
        numbers.append(number)
        parts.append(np.clip(np.rint(_divided(values, number[:, None] + 0 * values)), 0, 63).astype(np.uint8))
    (d, dmin), (s, m) = numbers, parts
    steps, below = d[:, None] * s, dmin[:, None] * m
    above = _divided(groups + below[:, :, None], steps[:, :, None] + 0 * groups)
    codes = np.clip(np.rint(above), 0, most).astype(np.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return codes, np.concatenate([_halves(d), _halves(dmin), first, second, third], axis=1)


def _paired(codes: Bytes) -> Bytes:
    return (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(len(codes), -1)


def _q4_k(weights: Floats) -> Bytes:
    codes, head = _line(weights, 15)
    return np.concatenate([head, _paired(codes)], axis=1)


def _q5_k(weights: Floats) -> Bytes:
    codes, head = _line(weights, 31)
    above = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([head, above, _paired(codes)], axis=1)


def _q6_k(weights: Floats) -> Bytes:
    groups = weights.reshape(-1, 16, 16)
    scale = np.abs(groups).max(2) / 31
    number = (scale.max(1) / 127).astype(np.float16).astype(np.float32)
    parts = np.clip(np.rint(_divided(scale, number[:, None] + 0 * scale)), -128, 127).astype(np.int8)
    steps = number[:, None] * parts
    codes = np.clip(np.rint(_divided(groups, steps[:, :, None] + 0 * groups)), -32, 31) + 32
    runs = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce((runs >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    rest = (low.reshape(len(low), -1), high.reshape(len(low), -1), parts.view(np.uint8), _halves(number))
    return np.concatenate(rest, axis=1)

"""The inline code that decodes words on a GPU: the numbers of the reference, rounded once, in the stated order."""

from __future__ import annotations

import numpy as np
import pytest
from support import ptx

from edgemoe.encodings.bfloat import from_bf16, to_bf16
from edgemoe.encodings.codec import place, unpack
from edgemoe.encodings.rows import order
from edgemoe.types.encoding import ENCODINGS

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from edgemoe.kernels.gpu import expert_tiles

CODES = {  # the code, and the order of a word's columns that it makes
    "int8": (expert_tiles.INT8_PAIRS, range(4)),
    "int4": (expert_tiles.INT4_PAIRS, (0, 2, 4, 6, 1, 3, 5, 7)),
    "mxfp4": (expert_tiles.MXFP4_PAIRS, (0, 2, 4, 6, 1, 3, 5, 7)),
    "fp8": (expert_tiles.FP8_PAIRS, range(4)),
}


@pytest.mark.parametrize("kind", CODES)
def test_words_decode_to_the_reference_s_numbers_rounded_once(kind: str) -> None:
    encoding, columns, rng = ENCODINGS[kind], 512, np.random.default_rng(0)
    text, within = CODES[kind]
    codes = rng.integers(0, 1 << encoding.bits, (64, columns)).astype(np.uint8)
    if kind == "fp8":
        codes[codes & 127 == 127] = 0  # no numbers
    scales = np.exp2(rng.integers(-20, 20, (64, encoding.scales(columns)))).astype(np.float32)
    if kind != "mxfp4":
        scales *= rng.uniform(1, 2, scales.shape).astype(np.float32)
    if kind in ("int8", "int4"):
        scales = from_bf16(to_bf16(scales))
    rows = place(codes, scales, encoding)
    words = rows[:, : encoding.code_bytes(columns)].copy().view("<u4")  # [R, w]
    each = columns // words.shape[1]
    columns_of = order(columns, 1 if kind == "fp8" else each).reshape(-1, each)[:, within]  # [w, each]
    scale = np.repeat(scales, encoding.group, axis=1)[:, columns_of[:, 0]].view(np.uint32)
    if kind != "fp8":
        scale |= scale >> ptx.HALVES
    pairs = each // 2
    made = ptx.run(text.value, {pairs: words.ravel(), pairs + 1: scale.ravel()}, pairs)
    found = np.stack([ptx.halves(pair) for pair in made], axis=1).reshape(len(rows), columns)
    want = from_bf16(to_bf16(unpack(rows, encoding, columns)[:, columns_of.ravel()]))
    np.testing.assert_array_equal(found, want)

"""Runs straight PTX code that decodes words, in NumPy: the few instructions that the GPU's kernels use inline."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
HALVES = np.uint32(16)


def run(code: str, given: dict[int, Words], results: int) -> list[Words]:
    """Returns registers $0 to $(results - 1) after the code, whose other numbered registers are `given`, [n] each."""
    registers = {f"${number}": words for number, words in given.items()}
    count = len(next(iter(given.values())))
    for line in code.strip().strip("{}").split(";"):
        if not (words := line.split(None, 1)) or words[0] == ".reg":
            continue
        into, *operands = re.split(r"\s*,\s*", words[1].strip())
        values = [
            registers[each] if each in registers else np.full(count, int(each, 0), np.uint32) for each in operands
        ]
        registers[into] = _instruction(words[0], values)
    return [registers[f"${number}"] for number in range(results)]


def halves(words: Words) -> npt.NDArray[np.float32]:
    """Returns the two bfloat16 of each word, the low one first, float32 [n, 2]."""
    return np.stack([words << HALVES, words & np.uint32(0xFFFF0000)], axis=1).view(np.float32)


def _instruction(name: str, values: list[Words]) -> Words:
    match name:
        case "mov.b32":
            return values[0]
        case "and.b32":
            return values[0] & values[1]
        case "shl.b32":
            return values[0] << values[1]
        case "shr.u32":
            return values[0] >> values[1]
        case "lop3.b32":
            assert values[3][0] == 0xEA, "(a & b) | c"
            return values[0] & values[1] | values[2]
        case "prmt.b32":
            return _permuted(*values)
        case "mul.f32":
            with np.errstate(over="ignore"):
                return (values[0].view(np.float32) * values[1].view(np.float32)).view(np.uint32)
        case "cvt.rn.bf16x2.f32":
            return _joined(_rounded(values[1].view(np.float32)), _rounded(values[0].view(np.float32)))
        case "fma.rn.bf16x2":
            a, b, c = (halves(each).astype(np.float64) for each in values)
            made = (a * b + c).astype(np.float32)  # products of bfloat16 are exact, and the sums here fit a float32
            return _joined(_rounded(made[:, 0]), _rounded(made[:, 1]))
    raise NotImplementedError(name)


def _permuted(low: Words, high: Words, selector: Words) -> Words:
    both = np.stack([low, high], axis=1).astype("<u4").view(np.uint8)  # [n, 8]
    picks = int(selector[0])
    chosen = [both[:, picks >> 4 * byte & 7] for byte in range(4)]
    return np.ascontiguousarray(np.stack(chosen, axis=1)).view("<u4")[:, 0]


def _rounded(values: npt.NDArray[np.float32]) -> Words:
    """Returns the bits of bfloat16 nearest to the values, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> HALVES & np.uint32(1))) >> HALVES


def _joined(low: Words, high: Words) -> Words:
    return low & np.uint32(0xFFFF) | high << HALVES

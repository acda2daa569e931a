"""Fuzzes GGUF files: their numbers, lengths, types, names and tensor tables lie, or bytes of them change.

For any contents, `pack` raises a typed error or makes a store that can be read, within bounded memory and time.
"""

from __future__ import annotations

import math
import random
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from tools.fuzzing.store import GROWTH_MB
from tools.fuzzing.trials import memory_folder, run_trials

WHATS = ("lies", "bytes")
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q", 11: "<q", 12: "<d"}
HIDDEN, LAYERS, HEADS, EXPERTS, WIDTH = 32, 2, 2, 4, 32
COUNTS = (0, 1, 2**16, 2**24, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
ODD: tuple[tuple[int, Any], ...] = (
    *((U32, number) for number in (0, 1, 2, 3, 7, 2**12, 2**16, 2**31, 2**32 - 1)),
    *((U64, number) for number in (2**33, 2**62, 2**64 - 1)),
    *((I32, number) for number in (-1, -(2**31))),
    *((F32, number) for number in (0.0, -1.0, 1e-38, 3e38, math.inf, math.nan)),
    *((STRING, text) for text in ("", "x", "llama", "../../etc/passwd", "a\0b", "{{" * 2000, "x" * 70_000)),
    *((ARRAY, (U32, [number] * 3)) for number in (0, 2**32 - 1)),
    *((ARRAY, (STRING, texts)) for texts in ([], [""], ["x"] * 1000)),
    (BOOL, True),
)
Key = list[Any]  # name, type, value
Tensor = list[Any]  # name, dimensions (the innermost first), type, values


def good() -> tuple[list[Key], list[Tensor]]:
    """Returns metadata and tensors of a small Qwen3-MoE with a tokenizer of bytes."""
    a = "qwen3moe"
    numbers = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": WIDTH,
        "attention.key_length": 16,
        "attention.value_length": 16,
    }
    tokens = [chr(number) for number in (*range(33, 127), *range(161, 173), *range(174, 324))]
    keys: list[Key] = [["general.architecture", STRING, a], ["general.alignment", U32, 32]]
    keys += [[f"{a}.{name}", U32, number] for name, number in numbers.items()]
    keys += [[f"{a}.rope.freq_base", F32, 1e4], [f"{a}.attention.layer_norm_rms_epsilon", F32, 1e-6]]
    keys += [["tokenizer.ggml.model", STRING, "gpt2"], ["tokenizer.ggml.pre", STRING, "qwen2"]]
    keys += [["tokenizer.ggml.tokens", ARRAY, (STRING, tokens)], ["tokenizer.ggml.eos_token_id", U32, 2]]
    keys += [["tokenizer.ggml.token_type", ARRAY, (I32, [1] * len(tokens))]]
    keys += [["tokenizer.ggml.merges", ARRAY, (STRING, ["a b", "c d"])], ["tokenizer.chat_template", STRING, "{{ x }}"]]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (HIDDEN, len(tokens)), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q_norm": (16,),
            "attn_k_norm": (16,),
            "attn_q": (HIDDEN, 32),
            "attn_k": (HIDDEN, 16),
            "attn_v": (HIDDEN, 16),
            "attn_output": (32, HIDDEN),
            "ffn_gate_inp": (HIDDEN, EXPERTS),
            "ffn_gate_exps": (HIDDEN, WIDTH, EXPERTS),
            "ffn_up_exps": (HIDDEN, WIDTH, EXPERTS),
            "ffn_down_exps": (WIDTH, HIDDEN, EXPERTS),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    draw = np.random.default_rng(1)
    return keys, [[name, list(of), 0, draw.standard_normal(math.prod(of), np.float32)] for name, of in shapes.items()]


def file_of(keys: list[Key], tensors: list[Tensor], rng: random.Random, lies: int) -> bytes:
    """Returns a file, of whose counts, lengths, types and places that many are wrong."""
    places = iter(sorted(rng.sample(range(len(keys) * 3 + len(tensors) * 5), lies)))
    lying, at = next(places, -1), -1

    def count(right: int, form: str = "<Q") -> bytes:
        nonlocal lying, at
        at += 1
        if at == lying:
            lying = next(places, -1)
            right = rng.choice((*COUNTS, right + 1, max(0, right - 1)))
        return struct.pack(form, right & (1 << 8 * struct.calcsize(form)) - 1)

    def text(said: str) -> bytes:
        raw = said.encode("utf-8", "surrogatepass")
        return count(len(raw)) + raw

    def value(kind: int, held: Any) -> bytes:
        if kind == STRING:
            return text(held)
        if kind == ARRAY:
            inner, items = held
            said = (struct.pack("<Q", len(one := each.encode())) + one for each in items) if inner == STRING else ()
            return (
                struct.pack("<I", inner)
                + count(len(items))
                + (b"".join(said) if inner == STRING else b"".join(struct.pack(FORMS[inner], each) for each in items))
            )
        return struct.pack(FORMS[kind], held)

    head = b"GGUF" + struct.pack("<I", 3) + count(len(tensors)) + count(len(keys))
    for name, kind, held in keys:
        head += text(name) + count(kind, "<I") + value(kind, held)
    data = b""
    for name, dimensions, kind, values in tensors:
        head += text(name) + count(len(dimensions), "<I") + b"".join(count(each) for each in dimensions)
        head += count(kind, "<I") + count(len(data))
        data += values.tobytes() + bytes(-values.nbytes % 32)
    return head + bytes(-len(head) % 32) + data


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Packs `count` wrong files of each kind."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-fuzz-", dir=memory_folder()) as name:
        file, made = Path(name) / "model.gguf", Path(name) / "made"

        def trial(part: str, rng: random.Random) -> str:
            file.write_bytes(lying(rng) if part == "lies" else damaged(rng))
            _use(file, made)
            return "packed"

        file.write_bytes(file_of(*good(), random.Random(0), 0))
        _use(file, made)
        return run_trials((what,) if what else WHATS, count, seed, trial, GROWTH_MB)


def lying(rng: random.Random) -> bytes:
    """Returns a well-formed file with wrong values, names or shapes, or one that is not well-formed."""
    keys, tensors = good()
    for _ in range(rng.choice((0, 1, 1, 2))):
        match rng.choice(("value", "value", "value", "name", "gone", "twice", "shape", "type", "tensor", "numbers")):
            case "value":
                key = rng.choice(keys)
                key[1:] = rng.choice(ODD)
            case "name":
                rng.choice(keys)[0] = rng.choice(("", "general.architecture", "x" * 600, "a\0b", "split.count"))
            case "gone":
                part = rng.choice((keys, tensors))
                part.pop(rng.randrange(len(part)))
            case "twice":
                part = rng.choice((keys, tensors))
                part.append(list(rng.choice(part)))
            case "shape":
                dimensions = rng.choice(tensors)[1]
                dimensions[rng.randrange(len(dimensions))] = rng.choice((*COUNTS, 31, 33))
            case "type":
                rng.choice(tensors)[2] = rng.choice((1, 2, 3, 8, 12, 14, 20, 30, 39, 40, 255, 2**31))
            case "tensor":
                rng.choice(tensors)[0] = rng.choice(("", "blk.0.ffn_gate_exps.weight", "blk.99.x", "x" * 600))
            case "numbers":
                rng.choice(tensors)[3][:] = rng.choice((math.nan, math.inf, 3e38))
    return file_of(keys, tensors, rng, rng.choice((0, 1, 1, 2)))


def damaged(rng: random.Random) -> bytes:
    """Returns a good file with some bytes changed, cut off or repeated."""
    data = bytearray(file_of(*good(), rng, 0))
    head = 4096 if rng.random() < 0.8 else len(data)
    at = rng.randrange(head)
    match rng.choice(("flip", "flip", "flip", "cut", "repeat", "grow")):
        case "flip":
            for _ in range(rng.choice((1, 1, 2, 20))):
                data[rng.randrange(head)] ^= 1 << rng.randrange(8)
        case "cut":
            del data[at:]
        case "repeat":
            data[at:at] = data[at : at + 64]
        case "grow":
            data += rng.randbytes(4096)
    return bytes(data)


def _use(file: Path, made: Path) -> None:
    """Packs a file, and opens the store that it makes."""
    try:
        pack(file, made)
        with ExpertStore(made, Manifest.load(made), threads=1):
            pass
    finally:
        shutil.rmtree(made, ignore_errors=True)

"""Fuzzes recordings of routing: their headers, blocks and arrays lie, or bytes of them change.

They are read as `edgemoe replay` and the training script do. That raises a typed error, or gives steps whose parts fit
together, within bounded memory.
"""

from __future__ import annotations

import random
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgemoe.replay.trace import load
from edgemoe.telemetry.routing_recording import LENGTH, MAGIC, SUFFIX, RecordingHeader, RoutingBlock, read_recording
from scoutgate.convert import requests_of
from tools.fuzzing.trees import ODDITIES
from tools.fuzzing.trials import memory_folder, run_trials

WHATS = ("lies", "bytes")
GROWTH_MB = 600.0  # of the process, at its largest: a block may hold 256 MiB, and its parts again
LAYERS, EXPERTS, TOP_K, STEPS = 2, 8, 2, 12
NUMBERS = [each for each in ODDITIES if isinstance(each, int) and -(2**63) <= each < 2**64]


def good() -> tuple[list[Any], list[Any]]:
    """Returns a header and a block of steps of one sequence, as arrays."""
    draw = np.random.default_rng(1)
    ids = np.argsort(draw.random((LAYERS, STEPS, EXPERTS)), axis=2)[..., :TOP_K].astype("<i2")
    block = RoutingBlock(
        requests=(("r",),) * STEPS,
        query_lens=np.ones(STEPS, "<i4").tobytes(),
        decode=np.ones(STEPS, np.bool_).tobytes(),
        tokens=np.arange(STEPS, dtype="<i4").tobytes(),
        positions=np.arange(STEPS, dtype="<i4").tobytes(),
        ids=ids.tobytes(),
        weights=np.ones(ids.shape, "<f2").tobytes(),
        conversations=np.zeros(STEPS, "<i8").tobytes(),
        hinted=np.ones(STEPS, np.bool_).tobytes(),
        hints=np.ones((LAYERS, STEPS, EXPERTS), "<f2").tobytes(),
    )
    header = RecordingHeader("digest", LAYERS, EXPERTS, TOP_K, hints=True)
    return list(msgspec.structs.astuple(header)), list(msgspec.structs.astuple(block))


def file_of(rng: random.Random, *parts: list[Any]) -> bytes:
    """Returns a file of a header and blocks, one in eight of which lies about its length or is no whole stream."""
    data = MAGIC
    for part in parts:
        stream = zlib.compress(msgspec.msgpack.encode(part))
        length = len(stream)
        match rng.randrange(24):
            case 0:
                length = rng.choice((0, length - 1, length + 1, 2**31, 2**32 - 1))
            case 1:
                stream = stream[: rng.randrange(len(stream))]
            case 2:
                stream = zlib.compress(bytes(rng.choice((10_000, 300 << 20))))
                length = len(stream)
        data += LENGTH.pack(length) + stream
    return data


def lying(rng: random.Random) -> bytes:
    """Returns a file of which some fields are odd."""
    header, block = good()
    for _ in range(rng.choice((1, 1, 2))):
        part = rng.choice((header, block))
        at = rng.randrange(len(part))
        if isinstance(part[at], bytes):
            part[at] = rng.choice((b"", part[at][:-1], part[at][:-4], part[at] * 2, rng.randbytes(len(part[at]))))
            if rng.random() < 0.5:
                part[at] = struct.pack("<i", rng.choice((-1, 0, 2**31 - 1, -(2**31)))) + part[at][4:]
        else:
            part[at] = rng.choice((*NUMBERS, *NUMBERS, "", "x", None, [], (("r", "s"),) * STEPS, ((),) * STEPS))
    return file_of(rng, header, block, block)


def damaged(rng: random.Random) -> bytes:
    """Returns a good file with some bytes changed or cut off."""
    data = bytearray(file_of(random.Random(0), *good()))
    for _ in range(rng.choice((1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Reads `count` wrong files of each kind."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-fuzz-", dir=memory_folder()) as name:
        file = Path(name) / f"recording{SUFFIX}"

        def trial(part: str, rng: random.Random) -> str:
            file.write_bytes(lying(rng) if part == "lies" else damaged(rng))
            _use(file)
            return "read"

        file.write_bytes(file_of(random.Random(0), *good()))
        _use(file)
        return run_trials((what,) if what else WHATS, count, seed, trial, GROWTH_MB)


def _use(file: Path) -> None:
    header, steps = read_recording(file)
    for request in requests_of(steps, header.experts if header.hints else 0, header.hidden):
        assert len(request.tokens) == len(request.ids)
    load([file])

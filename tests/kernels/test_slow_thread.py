"""Chunks of published models are small enough that slow cores, as of a hybrid processor, do not set the pace.

Threads claim chunks one by one (tests/jit/test_thread_pool.py), so the times of a step follow from its chunks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.gate import in_gate
from support.kept import KERNELS
from support.packed_experts import slab_of, work
from support.published import CONFIGURATIONS

from edgemoe.encodings.codec import pack
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.kernels.cpu import experts_prefill
from edgemoe.kernels.cpu.expert_math import ExpertMath, ExpertSlab, WayLimits
from edgemoe.kernels.cpu.experts_decode import ExpertLayout, rows_in_chunks
from edgemoe.kernels.cpu.gemv import rows_in_chunk
from edgemoe.kernels.cpu.linear import many_rows
from edgemoe.kernels.cpu.prefill_attention import span_tokens
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.store.catalog import spec_at
from edgemoe.types.encoding import BFLOAT16, ENCODINGS, FLOAT32, INT4, Q6_K, Encoding
from edgemoe.types.experts import ExpertGeometry

SLOW = 0.5  # of the others' speed
THREADS = [2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24]
PROMPT = 512  # tokens
IN_GATE = (BFLOAT16, FLOAT32, INT4, Q6_K)


def claimed_s(chunks: int, speeds: list[float]) -> float:
    """Returns when the last of `chunks` equal chunks ends, each claimed by the first thread that is free."""
    free = sorted((0.0, speed) for speed in speeds)
    ends_s = 0.0
    for _ in range(chunks):
        at_s, speed = heapq.heappop(free)
        ends_s = max(ends_s, at_s + 1 / speed)
        heapq.heappush(free, (at_s + 1 / speed, speed))
    return ends_s


def chunks_of(rows: int, each: int) -> int:
    return -(-rows // each)


def products(spec: ModelSpec, threads: int) -> Iterator[tuple[int, int]]:
    """Yields the weights and the chunks of each product of a decode step's layer."""
    layer, geometry = spec.expert_layers[-1], spec.geometry
    for name, (rows, *columns) in dense_shapes(spec).items():
        if f".layers.{layer}." in name and len(columns) == 1:
            yield rows * columns[0], chunks_of(rows, rows_in_chunk(rows, BFLOAT16.row_bytes(columns[0]), threads))
    gate_rows, down_rows = rows_in_chunks(geometry.hidden, threads)
    first, down = geometry.gate_up_shape[0], geometry.down_shape[0]
    yield first * geometry.hidden * geometry.top_k, chunks_of(geometry.width, gate_rows) * geometry.top_k
    yield down * geometry.width * geometry.top_k, chunks_of(down, down_rows)


def prompt_products(spec: ModelSpec, threads: int) -> Iterator[tuple[int, int]]:
    """Yields the same of a layer that computes a prompt, which calls every expert."""
    layer, geometry = spec.expert_layers[-1], spec.geometry
    for name, (rows, *columns) in dense_shapes(spec).items():
        if f".layers.{layer}." in name and len(columns) == 1:
            yield rows * columns[0] * PROMPT, chunks_of(rows, many_rows(threads))
    first, down, calls = geometry.gate_up_shape[0], geometry.down_shape[0], geometry.top_k * PROMPT
    yield first * geometry.hidden * calls, chunks_of(geometry.width, experts_prefill.GATE_ROWS) * geometry.experts
    yield down * geometry.width * calls, chunks_of(down, experts_prefill.down_rows(threads))


def step_s(parts: Iterable[tuple[int, int]], speeds: list[float]) -> tuple[float, float]:
    """Returns the time of a step, and of one whose work is split ideally, in that of a weight at full speed."""
    parts = list(parts)
    whole = sum(weights for weights, _ in parts)
    return sum(weights / chunks * claimed_s(chunks, speeds) for weights, chunks in parts), whole / sum(speeds)


@pytest.mark.parametrize("kind", [products, prompt_products])
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_threads_at_half_speed_cost_a_step_less_than_thirty_percent_of_the_ideal(
    name: str, threads: int, kind: type[Iterable[tuple[int, int]]]
) -> None:
    spec = spec_at(Path(CONFIGURATIONS[name]))
    for slow in {1, threads // 2}:
        took_s, ideal_s = step_s(kind(spec, threads), [SLOW] * slow + [1.0] * (threads - slow))
        assert ideal_s <= took_s < 1.3 * ideal_s
        equal_s = sum(speed for speed in [SLOW] * slow + [1.0] * (threads - slow)) * ideal_s / threads / SLOW
        assert took_s < equal_s, "were all threads given the same"


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (64, 8), (16, 16), (128, 128), (16, 2), (96, 8)])
def test_threads_at_half_speed_cost_a_prompts_attention_less_than_thirty_percent(
    heads: int, kv_heads: int, threads: int
) -> None:
    pieces = kv_heads * chunks_of(PROMPT, span_tokens(heads, kv_heads, PROMPT, threads))  # equal in a long context
    for slow in {1, threads // 2}:
        took_s, ideal_s = step_s([(PROMPT, pieces)], [SLOW] * slow + [1.0] * (threads - slow))
        assert ideal_s <= took_s < 1.3 * ideal_s


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "bfloat16"])
def pools(request: pytest.FixtureRequest) -> Iterator[list[Kernels]]:
    """Kernels with two threads, and with many, whose chunks are small."""
    made = [Kernels(threads, request.param, KERNELS) for threads in (2, 24)]
    yield made
    for kernels in made:
        kernels.close()


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("encoding", in_gate(ENCODINGS.values(), IN_GATE), ids=ENCODINGS)
def test_experts_have_the_same_bits_with_any_number_of_threads(
    pools: list[Kernels], encoding: Encoding, tokens: int
) -> None:
    dtype, rng = "bfloat16" if pools[0].bf16 else "float32", np.random.default_rng(tokens)
    if encoding in (BFLOAT16, FLOAT32) and encoding.name != dtype:
        pytest.skip("no model of one type has experts of the other")
    geometry = ExpertGeometry(1, 3, 2, 512, 768, dtype, encodings=(encoding.name,))
    slab = ExpertSlab(slab_of(geometry, rng), ExpertLayout.of(geometry, 0), pools[0].bf16)
    group, x = work(geometry, tokens, rng)
    for tiles in (0.0, np.inf):
        sums = [torch.zeros(tokens, 512) for _ in pools]
        for kernels, out in zip(pools, sums, strict=True):
            calls = (group.experts, group.offsets, group.tokens, group.weights)
            ExpertMath(kernels, WayLimits(tiles)).add(slab, *calls, x, out)
        assert sums[0].abs().sum() > 0
        assert all(out.equal(sums[0]) for out in sums[1:])


@pytest.mark.parametrize("rows", [1000])
@pytest.mark.parametrize("encoding", in_gate(ENCODINGS.values(), IN_GATE), ids=ENCODINGS)
def test_products_have_the_same_bits_with_any_number_of_threads(
    pools: list[Kernels], encoding: Encoding, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    weight = pack(rng.normal(0, 0.1, (rows, 256)).astype(np.float32), encoding)
    x = rng.normal(size=(40, 256)).astype(np.float32)
    for name, tokens in (("linear", 3), ("product", 40)):
        found = []
        for kernels in pools:
            code, out = kernels.row_code(encoding), np.zeros((tokens, rows), np.float32)
            if name == "product" and code.unpack is None and code.byte_rows is None:
                continue
            call = getattr(kernels, name)
            call(weight.ctypes.data, rows, 256, x.ctypes.data, False, tokens, out.ctypes.data, code)
            found.append(out)
        assert all(np.array_equal(out, found[0]) for out in found[1:])

"""Chunks of published models are small enough that a slow core, as of a hybrid processor, does not set the pace.

Threads claim chunks one by one (tests/jit/test_thread_pool.py), so the times of a step follow from its chunks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.published import CONFIGURATIONS

from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.kernels.cpu.decode_stages import rows_in_chunk
from edgemoe.kernels.cpu.experts_decode import GATE_ROWS, MOST_DOWN_ROWS
from edgemoe.store.catalog import spec_at
from edgemoe.types.encoding import BFLOAT16

SLOW = 0.5  # of the others' speed


def claimed_s(chunks: int, speeds: list[float]) -> float:
    """Returns when the last of `chunks` equal chunks ends, each claimed by the first thread that is free."""
    free = [(0.0, speed) for speed in speeds]
    ends_s = 0.0
    for _ in range(chunks):
        at_s, speed = heapq.heappop(free)
        ends_s = max(ends_s, at_s + 1 / speed)
        heapq.heappush(free, (at_s + 1 / speed, speed))
    return ends_s


def products(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """Yields the weights and the chunks of each product of a decode step's layer."""
    layer, geometry = spec.expert_layers[-1], spec.geometry
    for name, shape in dense_shapes(spec).items():
        if f".layers.{layer}." in name and len(shape) == 2:
            yield shape[0] * shape[1], -(-shape[0] // rows_in_chunk(shape[0], BFLOAT16.row_bytes(shape[1])))
    rows = (geometry.gate_up_shape[0], geometry.down_shape[0])
    yield rows[0] * geometry.hidden * geometry.top_k, -(-geometry.width // GATE_ROWS) * geometry.top_k
    yield rows[1] * geometry.width * geometry.top_k, -(-rows[1] // MOST_DOWN_ROWS)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_thread_at_half_speed_costs_a_step_less_than_thirty_percent_of_the_ideal(name: str, threads: int) -> None:
    spec, speeds = spec_at(Path(CONFIGURATIONS[name])), [SLOW] + [1.0] * (threads - 1)
    parts = list(products(spec))
    step_s = sum(weights / chunks * claimed_s(chunks, speeds) for weights, chunks in parts)
    ideal_s = sum(weights for weights, _ in parts) / sum(speeds)
    equal_s = sum(weights for weights, _ in parts) / threads / SLOW  # were all threads given the same
    assert ideal_s <= step_s < min(1.3 * ideal_s, equal_s)

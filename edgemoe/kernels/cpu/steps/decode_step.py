"""Computes all layers of a step of single new tokens in one call, where every expert is in the CPU's memory.

A step goes through Python once, not twice a layer: it costs the interpreter 90 us for each layer, which is more than
reading a layer of a small model takes. A layer whose experts have so many tokens each that another kernel is faster
stops the call; whoever called computes its experts and goes on.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import INT, address_of, call_chunk, code, f32_at, fields, i64_at, jit, record
from edgemoe.jit.object_cache import Code
from edgemoe.kernels.cpu.experts_decode import EXPERTS, run_experts
from edgemoe.kernels.cpu.steps.decode_layer import LAYER, STEP, make_layer

# Where the experts of a layer are: `job` an EXPERTS record without what a step brings, `where` [experts] int64 the slot
# of each, which lies `first` slots after the slab's; `most` tokens per expert, from which on another kernel is faster.
PLACES = np.dtype([*fields("job", "where", "first").descr, ("most", np.float64)])
# The record of one step; arrays are addresses. `layers` [count] LAYER and `places` [count] PLACES records; `next` the
# layer to begin with, and where the call stopped, `count` at the end; `ids` [count, tokens, k] int64 and `weights`
# likewise float32 take what is chosen; `out` [tokens, width] float32 the experts' sum; `served` counts the distinct
# experts of layers. Scratch for the calls of a layer: `slots`, `offsets` and `index` [tokens * k + 1] int64, `shares`
# [tokens * k] float32, `counts` [experts] int64.
WHOLE_STEP = fields(
    *("step", "layers", "places", "count", "next", "ids", "weights", "out", "served"),
    *("slots", "offsets", "index", "shares", "counts"),
)
_LAYER_BYTES, _PLACES_BYTES = LAYER.itemsize, PLACES.itemsize


@jit
def _one_each(job: int) -> int:
    """Groups the calls of one token, whose experts are distinct. Returns how many they are."""
    w = record(job, WHOLE_STEP)
    s = record(w.step, STEP)
    ids, weights = i64_at(s.ids), f32_at(s.weights)
    slots, offsets, index, shares = i64_at(w.slots), i64_at(w.offsets), i64_at(w.index), f32_at(w.shares)
    for pair in range(s.k):
        slots[pair], offsets[pair], index[pair], shares[pair] = ids[pair], pair, 0, weights[pair]
    offsets[s.k] = s.k
    return s.k  # type: ignore[no-any-return]


@jit
def _by_expert(job: int) -> int:
    """Groups the calls of several tokens by expert, in the order of experts and then of tokens. Returns how many."""
    w = record(job, WHOLE_STEP)
    s = record(w.step, STEP)
    ids, weights, counts, pairs = i64_at(s.ids), f32_at(s.weights), i64_at(w.counts), s.tokens * s.k
    slots, offsets, index, shares = i64_at(w.slots), i64_at(w.offsets), i64_at(w.index), f32_at(w.shares)
    for expert in range(s.experts):
        counts[expert] = 0
    for pair in range(pairs):
        counts[ids[pair]] += 1
    n = at = 0
    for expert in range(s.experts):
        if counts[expert]:
            slots[n], offsets[n] = expert, at
            n, at, counts[expert] = n + 1, at + counts[expert], at
    offsets[n] = at
    for pair in range(pairs):
        to = counts[ids[pair]]
        counts[ids[pair]] += 1
        index[to], shares[to] = pair // s.k, weights[pair]
    return n


@jit
def _prepare(job: int, layer: int, n: int) -> int:
    """Fills the EXPERTS record of a layer's `n` experts, and clears their sum. Returns the record's address."""
    w = record(job, WHOLE_STEP)
    s, p = record(w.step, STEP), record(w.places + layer * _PLACES_BYTES, PLACES)
    e, slots, where, out = record(p.job, EXPERTS), i64_at(w.slots), i64_at(p.where), f32_at(w.out)
    for i in range(n):
        slots[i] = where[slots[i]] - p.first
    for i in range(s.tokens * s.width):
        out[i] = 0
    e.slots, e.count, e.offsets, e.index, e.weights = w.slots, n, w.offsets, w.index, w.shares
    e.x, e.out, e.tokens = s.hidden, w.out, s.tokens
    return p.job  # type: ignore[no-any-return]


@cache
def make_step(bf16: bool) -> tuple[Code, Code, Code, tuple[Code, ...]]:
    """Makes the kernels whole_step(control, WHOLE_STEP record), layer and head. Returns all code that they refer to."""
    layer, head, layer_code = make_layer(bf16)
    one_layer, experts = address_of(layer), address_of(run_experts)

    @code(INT, INT)
    def whole_step(control: int, job: int) -> None:
        w = record(job, WHOLE_STEP)
        s = record(w.step, STEP)
        pairs = s.tokens * s.k
        while w.next < w.count:
            number = w.next
            s.ids, s.weights = w.ids + number * pairs * 8, w.weights + number * pairs * 4
            call_chunk(one_layer(), control, w.layers + number * _LAYER_BYTES)
            n = _one_each(job) if s.tokens == 1 else _by_expert(job)
            if pairs >= record(w.places + number * _PLACES_BYTES, PLACES).most * n:
                return
            call_chunk(experts(), control, _prepare(job, number, n))
            s.delta = w.out
            w.served += n
            w.next = number + 1

    return whole_step, layer, head, (*layer_code, run_experts, whole_step)

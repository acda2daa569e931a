"""Runs a plan of stages: a decode step of single new tokens of any model, in one call or a few.

One call for all layers needs every expert in the CPU's memory. It saves the interpreter's 90 us a layer. A layer stops
the call where some experts are elsewhere, or have so many tokens that another kernel is faster. Its experts are then
computed by the caller, which goes on.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import INT, call_chunk, f32_at, i64_at, jit, record
from edgemoe.jit.object_cache import Code, address_of, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.decode_attention import make_attention
from edgemoe.kernels.cpu.decode_stages import STEP_TOKENS, make_stages
from edgemoe.kernels.cpu.experts_decode import EXPERTS, run_experts
from edgemoe.types.arrays import fields

# One stage.
# * CHUNKS: runs the chunk `code` with the record `job`, `each` times for each token and `fixed` times more
# * ATTENTION: runs attention from the ATTENTION record `job`
# * EXPERTS: computes the experts of layer `job`, or stops
STAGE = fields("kind", "code", "job", "each", "fixed")
CHUNKS, ATTENTION, EXPERTS_OF = 0, 1, 2
# The experts of a layer; arrays are addresses.
# * `job` an EXPERTS record, whose fields of a step are filled later
# * `where` [experts] int64, the slot of each expert; slot `first` is the slab's first
# * `most` tokens per expert; with more, another kernel is faster
PLACES = np.dtype([*fields("job", "where", "first").descr, ("most", np.float64)])
# The record of one step; arrays are addresses.
# * `stages` [stage_count] STAGE records; `next` the stage to begin with, afterwards the one that stopped the call
# * `places` [layers] PLACES records, or 0 where every layer stops the call; `layer` the one that stopped it
# * `hidden` [tokens, width] in the model's type, the experts' input; `mixed` [tokens, width] float32, their sum
# * `served` counts the distinct experts of layers
# * scratch for the calls of a layer: `slots`, `offsets` and `index` [tokens * k + 1] int64
# * more of it: `shares` [tokens * k] float32, `counts` [experts] int64
STEP = np.dtype(
    [
        *STEP_TOKENS.descr,
        *fields(
            *("width", "experts", "k", "stages", "stage_count", "next", "places", "layer", "hidden", "mixed"),
            *("served", "slots", "offsets", "index", "shares", "counts"),
        ).descr,
    ]
)
_STAGE_BYTES, _PLACES_BYTES = STAGE.itemsize, PLACES.itemsize


@jit
def _one_each(job: int, layer: int) -> int:
    """Groups the calls of one token, whose experts are distinct. Returns how many they are."""
    s = record(job, STEP)
    ids, weights = i64_at(s.ids + layer * s.k * 8), f32_at(s.weights + layer * s.k * 4)
    slots, offsets, index, shares = i64_at(s.slots), i64_at(s.offsets), i64_at(s.index), f32_at(s.shares)
    for pair in range(s.k):
        slots[pair], offsets[pair], index[pair], shares[pair] = ids[pair], pair, 0, weights[pair]
    offsets[s.k] = s.k
    return s.k  # type: ignore[no-any-return]


@jit
def _by_expert(job: int, layer: int) -> int:
    """Groups the calls of several tokens by expert, in the order of experts and then of tokens. Returns how many."""
    s = record(job, STEP)
    pairs = s.tokens * s.k
    ids, weights, counts = i64_at(s.ids + layer * pairs * 8), f32_at(s.weights + layer * pairs * 4), i64_at(s.counts)
    slots, offsets, index, shares = i64_at(s.slots), i64_at(s.offsets), i64_at(s.index), f32_at(s.shares)
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
def _prepare(job: int, places: int, n: int) -> int:
    """Fills the EXPERTS record of a layer's `n` experts, and clears their sum. Returns the record's address."""
    s, p = record(job, STEP), record(places, PLACES)
    e, slots, where, out = record(p.job, EXPERTS), i64_at(s.slots), i64_at(p.where), f32_at(s.mixed)
    for i in range(n):
        slots[i] = where[slots[i]] - p.first
    for i in range(s.tokens * s.width):
        out[i] = 0
    e.slots, e.count, e.offsets, e.index, e.weights = s.slots, n, s.offsets, s.index, s.shares
    e.x, e.out, e.tokens = s.hidden, s.mixed, s.tokens
    return p.job  # type: ignore[no-any-return]


_running_experts = address_of(run_experts)


@jit
def _run_experts(control: int, job: int, layer: int) -> bool:
    """Computes a layer's experts. Returns False where the caller has to."""
    s = record(job, STEP)
    if not s.places:
        return False
    places = s.places + layer * _PLACES_BYTES
    n = _one_each(job, layer) if s.tokens == 1 else _by_expert(job, layer)
    if s.tokens * s.k >= record(places, PLACES).most * n:
        return False
    call_chunk(_running_experts(), control, _prepare(job, places, n))
    s.served += n
    return True


@cache
def make_step(bf16: bool) -> tuple[Code, tuple[Code, ...]]:
    """Makes the kernel step(control, STEP record). Returns it and the code that every plan and it refer to."""
    attention, _, attention_code = make_attention(bf16)

    @code(INT, INT)
    def step(control: int, job: int) -> None:
        s = record(job, STEP)
        while s.next < s.stage_count:
            stage = record(s.stages + s.next * _STAGE_BYTES, STAGE)
            if stage.kind == CHUNKS:
                parallel(control, stage.code, stage.job, s.tokens * stage.each + stage.fixed)
            elif stage.kind == ATTENTION:
                attention(control, stage.job)
            elif not _run_experts(control, job, stage.job):
                s.layer = stage.job
                return
            s.next += 1

    return step, (*attention_code, *make_stages(bf16), run_experts, step)

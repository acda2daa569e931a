"""The stages of a decode step that all families share. A stage is a chunk and its record; most compute one token.

`decode_step` runs a plan of stages. Vectors between stages are float32 [tokens, n], one buffer each. A record's arrays
are addresses; 0 stands for an array that a model lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import call_rows, f32_at, i64_at, jit, record, store_bf16, store_f32
from edgemoe.jit.object_cache import Code, chunk
from edgemoe.kernels.cpu.encoded.kv_codes import store_codes
from edgemoe.kernels.cpu.paged_cache import ATTENTION, BLOCK
from edgemoe.kernels.cpu.vector import (
    activate,
    add_vector,
    exp32,
    make_place,
    normalise,
    pack_vector,
    softmax,
    softplus,
    turn,
    widen,
)
from edgemoe.types.arrays import fields

# The part of a step's record that all stages read.
# * `positions` [tokens] int64
# * `iota` 0, 1, 2, ... int64
# * `rows` [count] int64, the tokens that get `logits` [count, vocab] float32
# * `ids` [layers, tokens, k] int64 and `weights` [layers, tokens, k] float32: results, the chosen experts
STEP_TOKENS = fields("tokens", "positions", "iota", "rows", "count", "logits", "ids", "weights")
_ONE, _TWO = np.float32(1), np.float32(2)


# --- products -------------------------------------------------------------------------------------------------------

# The record of products that run side by side, out[t] = weight [rows, n] . x[t].
# * `step` STEP_TOKENS; `of_rows` 1 if the step's `rows` are multiplied, into its `logits`
# * `parts` [count] PART records; `threads` of the pool
PRODUCTS = fields("step", "of_rows", "parts", "count", "threads")
# * `line` bytes of a row, `multiply` the code that multiplies rows
# * `x` [tokens, n] packed for it, `out` [tokens, rows]; `x_stride` and `out_stride` bytes from token to token
# * `some` rows in one chunk, `first` the number of the part's first chunk
PART = fields("weight", "line", "rows", "n", "multiply", "x", "x_stride", "out", "out_stride", "some", "first")
_PART_BYTES = PART.itemsize


@chunk
def multiply_parts(job: int, number: int) -> None:
    """Multiplies some rows of one matrix with all vectors."""
    p = record(job, PRODUCTS)
    s, at = record(p.step, STEP_TOKENS), p.parts + (p.count - 1) * _PART_BYTES
    while record(at, PART).first > number:
        at -= _PART_BYTES
    a = record(at, PART)
    row = (number - a.first) * a.some
    count, out, w = min(a.some, a.rows - row), a.out, a.weight + row * a.line
    following = w + p.threads * a.some * a.line  # the other threads take the chunks between
    index, tokens = s.iota, s.tokens
    if p.of_rows:
        index, tokens, out = s.rows, s.count, s.logits
    out += 4 * row
    call_rows(a.multiply, w, a.line, count, following, a.x, a.x_stride, index, tokens, a.n, out, a.out_stride)


@jit
def sigmoid(x: float) -> float:
    return _ONE / (_ONE + exp32(-x))  # type: ignore[no-any-return]


# The record of a sum that joins the residual, and of the residual's norm.
# * `residual` [tokens, width], to which `sources` [count] are added: residual = (residual + factor * sum) * scalar
# * `after` the norm of the sum; `norm` that of the residual
# * `plain` [tokens, width] the result; `hidden` the same in the model's type, which `plain` is rounded to then
# * `packs` [pack_count] PACK records
JOIN = np.dtype(
    [
        *fields(
            *("residual", "width", "sources", "count", "after", "norm", "centred"),
            *("plain", "hidden", "packs", "pack_count"),
        ).descr,
        ("factor", np.float64),
        ("scalar", np.float64),
        ("eps", np.float64),
    ]
)
# `factor` * sigmoid(`gate` [tokens]) * norm(`x` [tokens, width] + `bias` [width])
SOURCE = np.dtype([*fields("x", "bias", "norm", "gate").descr, ("factor", np.float64)])
_SOURCE_BYTES = SOURCE.itemsize


@jit
def _add_sources(job: int, token: int) -> None:
    """Adds the sources to one token's residual, by way of `plain`."""
    j = record(job, JOIN)
    n = j.width
    residual, sums = f32_at(j.residual + token * n * 4), f32_at(j.plain + token * n * 4)
    for number in range(j.count):
        source = record(j.sources + number * _SOURCE_BYTES, SOURCE)
        x, factor = source.x + token * n * 4, np.float32(source.factor)
        values = f32_at(x)
        if source.bias:
            add_vector(x, source.bias, n)
        if source.norm:
            normalise(x, source.norm, n, j.eps, j.centred, x)
        if source.gate:
            factor *= sigmoid(f32_at(source.gate)[token])
        if number:
            for k in range(n):
                sums[k] += factor * values[k]
        else:
            for k in range(n):
                sums[k] = factor * values[k]
    if j.after:
        normalise(j.plain + token * n * 4, j.after, n, j.eps, j.centred, j.plain + token * n * 4)
    factor, scalar = np.float32(j.factor), np.float32(j.scalar)
    for k in range(n):
        residual[k] = (residual[k] + factor * sums[k]) * scalar


@cache
def make_join(bf16: bool) -> Code:
    """Makes the chunk that adds to one token's residual and reads it, normalised."""
    size, model_bf16, store = (2, 1, store_bf16) if bf16 else (4, 0, store_f32)

    @chunk
    def join(job: int, token: int) -> None:
        j = record(job, JOIN)
        n = j.width
        residual, plain = j.residual + token * n * 4, j.plain + token * n * 4
        if j.count:
            _add_sources(job, token)
        if j.norm:
            normalise(residual, j.norm, n, j.eps, j.centred, plain)
        else:
            widen(residual, 0, n, plain)
        if j.hidden:
            values, hidden = f32_at(plain), j.hidden + token * n * size
            for k in range(n):
                store(hidden, k, values[k])
            widen(hidden, model_bf16, n, plain)
        pack_vector(j.packs, j.pack_count, plain, n, token)

    return join


# The record of outputs weighted by gates, and packed.
# * `x` [tokens, n]; `gates` [tokens, line], one for each `share` elements of x
# * `by_softplus` 1 if they weigh by a softplus, else by a sigmoid
WEIGH = fields("x", "n", "gates", "line", "share", "by_softplus", "packs", "pack_count")


@chunk
def weigh(job: int, token: int) -> None:
    """Applies the gates to one token's outputs, and packs them."""
    w = record(job, WEIGH)
    x = w.x + token * w.n * 4
    if w.gates:
        values, gates = f32_at(x), f32_at(w.gates + token * w.line * 4)
        if w.by_softplus:
            for k in range(w.n):
                values[k] *= softplus(gates[k // w.share])
        elif w.share == 1:
            for k in range(w.n):
                values[k] *= sigmoid(gates[k])
        else:
            for k in range(w.n):
                values[k] *= sigmoid(gates[k // w.share])
    pack_vector(w.packs, w.pack_count, x, w.n, token)


# The record of a network's middle: out = packed(activation(gate, up)), or of up alone.
# * `x` [tokens, line]: gate, up, each of `width`
# * `activation` as in `vector.activate`
ACTIVATE = np.dtype(
    [
        *fields("x", "line", "width", "activation", "packs", "pack_count").descr,
        ("alpha", np.float64),
        ("limit", np.float64),
    ]
)


@chunk
def activate_token(job: int, token: int) -> None:
    """Applies the activation to one token's gate and up, or to up alone, and packs the result."""
    a = record(job, ACTIVATE)
    gate = a.x + token * a.line * 4
    activate(a.activation, gate, gate + a.width * 4, a.width, _ONE, a.alpha, a.limit)
    pack_vector(a.packs, a.pack_count, gate, a.width, token)


# --- attention ------------------------------------------------------------------------------------------------------

# The record of heads before attention.
# * `x` [tokens, line]: queries, keys, values, and gates if any; `bias` [line]
# * `dims` of a head turn, by the angles `cos` and `sin` [tokens, dims / 2]
# * `q_norm` and `k_norm`, of a head, or where `full` of all heads together; `late` 1 if after rotary embedding
# * `v_norm` 1 if values are normalised, without weights; `v_is_k` 1 if a value is its key before all this
# * `clip` bounds them, 0: none; `scale` of scores
# * `values` scratch [tokens, kv_heads * head_dim]; `attention` the ATTENTION record, whose queries are written
HEADS = np.dtype(
    [
        *fields(
            *("step", "x", "line", "bias", "heads", "kv_heads", "head_dim", "dims", "cos", "sin"),
            *("q_norm", "k_norm", "full", "late", "centred", "v_norm", "v_is_k", "values", "attention"),
        ).descr,
        ("clip", np.float64),
        ("scale", np.float64),
        ("eps", np.float64),
    ]
)


@jit
def _bound(values: int, n: int, clip: float) -> None:
    v, most = f32_at(values), np.float32(clip)
    for k in range(n):
        v[k] = min(max(v[k], -most), most)


@jit
def _normalise_heads(at: int, norm: int, count: int, job: int) -> None:
    """Normalises `count` heads in place, each by itself or all together."""
    h = record(job, HEADS)
    if h.full:
        normalise(at, norm, count * h.head_dim, h.eps, h.centred, at)
    else:
        for head in range(count):
            line = at + head * h.head_dim * 4
            normalise(line, norm, h.head_dim, h.eps, h.centred, line)


@jit
def _place_heads(job: int, token: int, at: int, norm: int, count: int) -> None:
    """Applies norm, bound and rotary embedding to `count` heads in place."""
    h = record(job, HEADS)
    if norm and not h.late:
        _normalise_heads(at, norm, count, job)
    if h.clip > 0:
        _bound(at, count * h.head_dim, h.clip)
    if h.dims:
        for head in range(count):
            half = h.dims // 2
            turn(at + head * h.head_dim * 4, h.cos + token * half * 4, h.sin + token * half * 4, h.dims)
    if norm and h.late:
        _normalise_heads(at, norm, count, job)


@cache
def make_to_cache(bf16: bool) -> Callable[[int, int, int, int, int, int], None]:
    """Makes to_cache(job, token, queries, values, block, inside), which takes one token's heads to the cache.

    It normalises and rotates queries and the keys behind them in place, and writes keys and values as line `inside` of
    a block. `values` is scratch for values that are keys.
    """
    size, store = (2, store_bf16) if bf16 else (4, store_f32)

    @jit
    def to_cache(job: int, token: int, queries: int, values: int, block: int, inside: int) -> None:
        h = record(job, HEADS)
        a, n = record(h.attention, ATTENTION), h.head_dim
        keys = queries + h.heads * n * 4
        if h.v_is_k:
            widen(keys, 0, h.kv_heads * n, values)
        else:
            values = keys + h.kv_heads * n * 4
        _place_heads(job, token, queries, h.q_norm, h.heads)
        _place_heads(job, token, keys, h.k_norm, h.kv_heads)
        if h.clip > 0:
            _bound(values, h.kv_heads * n, h.clip)
        into = block * a.block_stride + inside * n * size
        for head in range(h.kv_heads):
            from_key, from_value = keys + head * n * 4, values + head * n * 4
            if h.v_norm:
                normalise(from_value, 0, n, h.eps, 0, from_value)
            if a.codes:
                lines = block * a.block_stride + head * a.head_stride
                codes, scales = lines + inside * n, lines + BLOCK * n + inside * 4
                store_codes(from_key, n, a.keys + codes, a.keys + scales)
                store_codes(from_value, n, a.values + codes, a.values + scales)
            else:
                key, value = f32_at(from_key), f32_at(from_value)
                for k in range(n):
                    store(a.keys + into + head * a.head_stride, k, key[k])
                    store(a.values + into + head * a.head_stride, k, value[k])

    return to_cache  # type: ignore[no-any-return]


@cache
def make_heads(bf16: bool) -> Code:
    """Makes the chunk that takes one token from the q/k/v product to attention."""
    place, to_cache = make_place(bf16), make_to_cache(bf16)

    @chunk
    def place_heads(job: int, token: int) -> None:
        """Takes the token's heads to the cache, and packs its queries, scaled."""
        h = record(job, HEADS)
        a, n, queries = record(h.attention, ATTENTION), h.head_dim, h.x + token * h.line * 4
        if h.bias:
            add_vector(queries, h.bias, h.line)
        position = i64_at(record(h.step, STEP_TOKENS).positions)[token]
        block = i64_at(a.tables)[token * a.table_width + position // BLOCK]
        to_cache(job, token, queries, h.values + token * h.kv_heads * n * 4, block, position % BLOCK)
        scale = np.float32(h.scale)
        for head in range(h.heads):
            q, to = f32_at(queries + head * n * 4), f32_at(a.queries + (token * h.heads + head) * n * 4)
            for k in range(n):
                to[place(k, n)] = q[k] * scale

    return place_heads


# --- routing --------------------------------------------------------------------------------------------------------

# The record of a gate.
# * `scores` [tokens, experts]: the gate's product; `selection` [tokens, experts] and `best` [tokens, groups] scratch
# * `logit_bias`, `selection_bias` and `expert_scale` [experts]
# * the rest as in `RouterSpec`; `layer` is counted among layers with experts
ROUTER = np.dtype(
    [
        *fields(
            *("step", "layer", "experts", "k", "scores", "selection", "best", "logit_bias", "selection_bias"),
            *("expert_scale", "by_sigmoid", "renormalise", "groups", "top_groups", "by_two"),
        ).descr,
        ("cap", np.float64),
        ("least_mass", np.float64),
        ("added_mass", np.float64),
        ("scale", np.float64),
    ]
)
_NOTHING = np.float32(-np.inf)


@jit
def _score(job: int, scores: int) -> None:
    """Turns logits [experts] into scores in place."""
    g = record(job, ROUTER)
    v, n = f32_at(scores), g.experts
    if g.logit_bias:
        add_vector(scores, g.logit_bias, n)
    if g.cap > 0:
        cap = np.float32(g.cap)
        for k in range(n):
            v[k] = cap * (_ONE - _TWO / (_ONE + exp32(_TWO * v[k] / cap)))  # tanh
    if g.by_sigmoid:
        for k in range(n):
            v[k] = sigmoid(v[k])
    else:
        _, mass = softmax(scores, n)
        for k in range(n):
            v[k] /= mass


@jit
def _close_groups(job: int, selection: int, best: int) -> None:
    """Sets the experts of all but the best groups to minus infinity."""
    g = record(job, ROUTER)
    v, b, size = f32_at(selection), f32_at(best), g.experts // g.groups
    for group in range(g.groups):
        first = second = _NOTHING
        for k in range(group * size, (group + 1) * size):
            if v[k] > first:
                first, second = v[k], first
            elif v[k] > second:
                second = v[k]
        b[group] = first + second if g.by_two else first
    for group in range(g.groups):
        before = 0  # groups that are better, or equal and first
        for other in range(g.groups):
            before += b[other] > b[group] or (b[other] == b[group] and other < group)
        if before >= g.top_groups:
            for k in range(group * size, (group + 1) * size):
                v[k] = _NOTHING


@jit
def _pick(selection: int, n: int, k: int, ids: int) -> None:
    """Writes the places of the `k` largest of `selection` [n] to `ids`; of equal ones the first. Empties these."""
    v, chosen = f32_at(selection), i64_at(ids)
    for place in range(k):
        best, largest = -1, _NOTHING
        for expert in range(n):
            if v[expert] > largest:
                best, largest = expert, v[expert]
        if best < 0:  # only NaN is left: any that is not chosen
            taken = True
            while taken:
                best += 1
                taken = False
                for earlier in range(place):
                    taken |= chosen[earlier] == best
        chosen[place] = best
        v[best] = _NOTHING


@chunk
def choose(job: int, token: int) -> None:
    """Chooses one token's experts and their weights."""
    g = record(job, ROUTER)
    s, n, k = record(g.step, STEP_TOKENS), g.experts, g.k
    at = (g.layer * s.tokens + token) * k
    scores, selection, ids = g.scores + token * n * 4, g.selection + token * n * 4, s.ids + at * 8
    _score(job, scores)
    widen(scores, 0, n, selection)
    if g.selection_bias:
        add_vector(selection, g.selection_bias, n)
    if g.top_groups != g.groups:
        _close_groups(job, selection, g.best + token * g.groups * 4)
    _pick(selection, n, k, ids)
    v, chosen, w, mass = f32_at(scores), i64_at(ids), f32_at(s.weights + at * 4), np.float32(0)
    for place in range(k):
        w[place] = v[chosen[place]]
        mass += w[place]
    if g.renormalise:
        mass = max(mass, np.float32(g.least_mass)) + np.float32(g.added_mass)
        for place in range(k):
            w[place] /= mass
    if g.expert_scale:
        for place in range(k):
            w[place] *= f32_at(g.expert_scale)[chosen[place]]
    for place in range(k):
        w[place] *= np.float32(g.scale)


@cache
def make_stages(bf16: bool) -> tuple[Code, ...]:
    """Returns the code of all stages."""
    return multiply_parts, make_join(bf16), weigh, activate_token, make_heads(bf16), choose

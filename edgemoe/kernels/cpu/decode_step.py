"""Computes a decode step of single new tokens: the dense part of one layer a call, or all layers in one call.

One call for all layers needs every expert in the CPU's memory. It saves the interpreter's 90 us a layer. A layer whose
experts have so many tokens that another kernel is faster stops the call; the caller computes its experts and goes on.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from edgemoe.jit.intrinsics import INT, call_chunk, call_pack, f32_at, i64_at, jit, record, store_bf16, store_f32
from edgemoe.jit.object_cache import Code, address_of, chunk, code
from edgemoe.jit.thread_pool import parallel
from edgemoe.kernels.cpu.decode_attention import ATTENTION, BLOCK, make_attention
from edgemoe.kernels.cpu.encoded.kv_codes import store_codes
from edgemoe.kernels.cpu.experts_decode import EXPERTS, run_experts
from edgemoe.kernels.cpu.linear import LINEAR, LINEAR_CODE, MATRIX, multiply_matrix
from edgemoe.kernels.cpu.vector import make_place, norm_scale, softmax, top_k, widen
from edgemoe.types.arrays import fields

# The record of one step; arrays are addresses. `width` is the hidden size.
# * `residual` and `delta` [tokens, width] float32; `delta`, unless it is 0, is added to `residual` first
# * `positions` [tokens] int64
# * `cos` and `sin` [tokens, head_dim / 2] float32
# * `attention` and `linear` records that the kernel fills and uses
# * results: `hidden` [tokens, width] in the model's type, `ids` [tokens, k] int64
# * results, float32: `weights` [tokens, k] and `probs` [tokens, experts]
# * scratch, float32: `packed` and `mixed` [tokens, width], `qkv` [tokens, (heads + 2 * kv_heads) * head_dim]
# * scratch, float32: `attended` and `turned` [tokens, heads * head_dim]
STEP = np.dtype(
    [
        *fields(
            *("tokens", "width", "heads", "kv_heads", "head_dim", "experts", "k", "renormalise"),
            *("residual", "delta", "positions", "cos", "sin", "attention", "linear", "iota"),
            *("hidden", "ids", "weights", "probs", "packed", "qkv", "attended", "turned", "mixed"),
        ).descr,
        ("eps", np.float64),
    ]
)
# The records of a layer and of the head. Both begin with the STEP record, a norm's weight [width] float32 and the next
# matrix, so that one chunk reads either. `q_norm` and `k_norm` [head_dim] are float32, or 0 where the model
# has none; `post_norm` [width] is float32. `qkv`, `o`, `gate` and `head` are MATRIX records; `qkv_bias`, `o_bias` and
# `gate_bias` are float32, as long as their matrices have rows, or 0. `keys`, `values`, `window`, `sinks`, `tables` and
# `block_stride` as in ATTENTION; `rows` [count] int64 are the tokens that get `logits` [count, vocab] float32.
LAYER = fields(
    *("step", "norm", "qkv", "q_norm", "k_norm", "o", "post_norm", "gate", "keys", "values"),
    *("qkv_bias", "o_bias", "gate_bias", "window", "sinks", "tables", "block_stride"),
)
HEAD = fields("step", "norm", "head", "rows", "count", "logits")


@jit
def _add(residual: int, delta: int, n: int) -> None:
    """Computes residual [n] += delta [n], float32."""
    r, d = f32_at(residual), f32_at(delta)
    for k in range(n):
        r[k] += d[k]


@jit
def _add_bias(values: int, bias: int, n: int) -> None:
    """Computes values [n] += bias [n], float32; does nothing where `bias` is 0."""
    if bias:
        _add(values, bias, n)


@jit
def _normalise(vector: int, norm: int, n: int, eps: float) -> None:
    """Applies RMSNorm with the weight `norm` [n] to `vector` [n] in place; does nothing where `norm` is 0."""
    if norm:
        v, w, scale = f32_at(vector), f32_at(norm), norm_scale(vector, n, eps)
        for k in range(n):
            v[k] = v[k] * scale * w[k]


@jit
def _turn(vector: int, cos: int, sin: int, n: int) -> None:
    """Rotates `vector` [n] in place by the angles whose `cos` and `sin` [n / 2] are given."""
    v, c, s, half = f32_at(vector), f32_at(cos), f32_at(sin), n // 2
    for k in range(half):
        low, high = v[k], v[k + half]
        v[k], v[k + half] = low * c[k] - high * s[k], high * c[k] + low * s[k]


@chunk
def enter(job: int, token: int) -> None:
    """Adds `delta` to one token's residual, normalises the sum and packs it."""
    l = record(job, LAYER)  # noqa: E741
    s = record(l.step, STEP)
    residual, norm = s.residual + token * s.width * 4, f32_at(l.norm)
    if s.delta:
        _add(residual, s.delta + token * s.width * 4, s.width)
    plain = s.mixed + token * s.width * 4
    r, to = f32_at(residual), f32_at(plain)
    scale = norm_scale(residual, s.width, s.eps)
    for k in range(s.width):
        to[k] = r[k] * scale * norm[k]
    call_pack(record(l.qkv, MATRIX).pack, plain, 0, s.width, s.width, s.packed + token * s.width * 4)


def _make_rotate(bf16: bool) -> Code:
    """Makes the chunk that takes one token from the q/k/v product to attention."""
    place = make_place(bf16)
    size, store = (2, store_bf16) if bf16 else (4, store_f32)

    @chunk
    def rotate(job: int, token: int) -> None:
        """Normalises and rotates queries and keys; packs the queries, scaled; writes keys and values to the cache."""
        l = record(job, LAYER)  # noqa: E741
        s = record(l.step, STEP)
        a = record(s.attention, ATTENTION)
        n, position = s.head_dim, i64_at(s.positions)[token]
        cos, sin = s.cos + token * n // 2 * 4, s.sin + token * n // 2 * 4
        width = (s.heads + 2 * s.kv_heads) * n
        at = s.qkv + token * width * 4
        _add_bias(at, l.qkv_bias, width)
        scale = np.float32(1.0 / np.sqrt(n))
        for head in range(s.heads):
            _normalise(at, l.q_norm, n, s.eps)
            _turn(at, cos, sin, n)
            q, to = f32_at(at), f32_at(a.queries + (token * s.heads + head) * n * 4)
            for k in range(n):
                to[place(k, n)] = q[k] * scale
            at += n * 4
        block = i64_at(a.tables)[token * a.table_width + position // BLOCK]
        into = block * a.block_stride + position % BLOCK * n * size
        for head in range(s.kv_heads):
            _normalise(at, l.k_norm, n, s.eps)
            _turn(at, cos, sin, n)
            other = at + s.kv_heads * n * 4
            key, value = f32_at(at), f32_at(other)
            if a.codes:
                lines = block * a.block_stride + head * a.head_stride
                codes, scale = lines + position % BLOCK * n, lines + BLOCK * n + position % BLOCK * 4
                store_codes(at, n, l.keys + codes, l.keys + scale)
                store_codes(other, n, l.values + codes, l.values + scale)
            else:
                for k in range(n):
                    store(l.keys + into + head * a.head_stride, k, key[k])
                    store(l.values + into + head * a.head_stride, k, value[k])
            at += n * 4

    return rotate


@chunk
def turn_out(job: int, token: int) -> None:
    """Packs attention's output for a matrix that is encoded."""
    l = record(job, LAYER)  # noqa: E741
    s, o = record(l.step, STEP), record(l.o, MATRIX)
    call_pack(o.pack, s.attended + token * o.n * 4, 0, o.n, o.n, s.turned + token * o.n * 4)


def _make_prepare(bf16: bool) -> Code:
    """Makes the chunk that takes one token from attention's output to the gate."""
    size, model_bf16, store = (2, 1, store_bf16) if bf16 else (4, 0, store_f32)

    @chunk
    def prepare(job: int, token: int) -> None:
        """Adds attention's output to the residual, and writes its norm as the input of experts and gate."""
        l = record(job, LAYER)  # noqa: E741
        s = record(l.step, STEP)
        plain = s.mixed + token * s.width * 4
        residual, norm = s.residual + token * s.width * 4, f32_at(l.post_norm)
        _add_bias(plain, l.o_bias, s.width)
        _add(residual, plain, s.width)
        r, hidden = f32_at(residual), s.hidden + token * s.width * size
        scale = norm_scale(residual, s.width, s.eps)
        for k in range(s.width):
            store(hidden, k, r[k] * scale * norm[k])
        widen(hidden, model_bf16, s.width, plain)
        call_pack(record(l.gate, MATRIX).pack, plain, 0, s.width, s.width, s.packed + token * s.width * 4)

    return prepare


@chunk
def choose(job: int, token: int) -> None:
    """Chooses one token's experts."""
    l = record(job, LAYER)  # noqa: E741
    s = record(l.step, STEP)
    at = s.probs + token * s.experts * 4
    _add_bias(at, l.gate_bias, s.experts)
    _, mass = softmax(at, s.experts)
    probs = f32_at(at)
    for expert in range(s.experts):
        probs[expert] /= mass
    ids, weights = s.ids + token * s.k * 8, s.weights + token * s.k * 4
    top_k(at, s.experts, s.k, s.renormalise, ids, weights)


@cache
def make_layer(bf16: bool) -> tuple[Code, Code, tuple[Code, ...]]:
    """Makes the kernels layer(control, LAYER record) and head(control, HEAD record).

    Returns both, and all code that they refer to.
    """
    attention, _, attention_code = make_attention(bf16)
    rotate, prepare = _make_rotate(bf16), _make_prepare(bf16)
    entering, rotating, turning = address_of(enter), address_of(rotate), address_of(turn_out)
    preparing, choosing = address_of(prepare), address_of(choose)

    @jit
    def multiply(control: int, step: int, matrix: int, x: int, out: int) -> None:
        s = record(step, STEP)
        a = record(s.linear, LINEAR)
        a.index, a.tokens, a.out = s.iota, s.tokens, out
        multiply_matrix(control, s.linear, matrix, x)

    @code(INT, INT)
    def layer(control: int, job: int) -> None:
        l = record(job, LAYER)  # noqa: E741
        s = record(l.step, STEP)
        a = record(s.attention, ATTENTION)
        a.keys, a.values, a.plain = l.keys, l.values, 1 - record(l.o, MATRIX).plain
        a.window, a.sinks, a.tables, a.block_stride = l.window, l.sinks, l.tables, l.block_stride
        parallel(control, entering(), job, s.tokens)
        multiply(control, l.step, l.qkv, s.packed, s.qkv)
        parallel(control, rotating(), job, s.tokens)
        attention(control, s.attention)
        attended = s.attended
        if a.plain:
            parallel(control, turning(), job, s.tokens)
            attended = s.turned
        multiply(control, l.step, l.o, attended, s.mixed)
        parallel(control, preparing(), job, s.tokens)
        multiply(control, l.step, l.gate, s.packed, s.probs)
        parallel(control, choosing(), job, s.tokens)

    @code(INT, INT)
    def head(control: int, job: int) -> None:
        h = record(job, HEAD)
        s = record(h.step, STEP)
        parallel(control, entering(), job, s.tokens)
        a = record(s.linear, LINEAR)
        a.index, a.tokens, a.out = h.rows, h.count, h.logits
        multiply_matrix(control, s.linear, h.head, s.packed)

    return layer, head, (*LINEAR_CODE, *attention_code, enter, rotate, turn_out, prepare, choose, layer, head)


# The experts of a layer; arrays are addresses.
# * `job` an EXPERTS record, whose fields of a step are filled later
# * `where` [experts] int64, the slot of each expert; slot `first` is the slab's first
# * `most` tokens per expert; with more, another kernel is faster
PLACES = np.dtype([*fields("job", "where", "first").descr, ("most", np.float64)])
# The record of one step; arrays are addresses.
# * `layers` [count] LAYER and `places` [count] PLACES records
# * `next` the layer to begin with; afterwards the layer at which the call stopped, `count` at the end
# * `ids` [count, tokens, k] int64 and `weights` [count, tokens, k] float32: results, the chosen experts
# * `out` [tokens, width] float32, the experts' sum
# * `served` counts the distinct experts of layers
# * scratch for the calls of a layer: `slots`, `offsets` and `index` [tokens * k + 1] int64
# * more of it: `shares` [tokens * k] float32, `counts` [experts] int64
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

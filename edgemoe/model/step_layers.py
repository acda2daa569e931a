"""Adds the layers of a model to the plan of its decode step: attention and its replacements, gates and networks."""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch

from edgemoe.kernels.cpu.decode_stages import HEADS, ROUTER, choose, make_heads
from edgemoe.kernels.cpu.latent_step import LATENT, make_latent
from edgemoe.kernels.cpu.state_step import (
    CONV,
    CONVOLUTION,
    DELTA,
    MAMBA,
    PARTS,
    advance_delta,
    advance_mamba,
    convolve_token,
    gate_mamba,
    mix_channels,
    scratch_floats,
)
from edgemoe.model.attention import AttentionScores
from edgemoe.model.convolution import ShortConvolution
from edgemoe.model.decoder_layers import (
    AttentionMechanism,
    DecoderLayer,
    NormedLayer,
    OnceNormedLayer,
    ParallelLayer,
    SerialLayer,
)
from edgemoe.model.delta_net import DeltaNet
from edgemoe.model.dense_attention import DenseAttention
from edgemoe.model.dense_weights import DenseMatrix, Norm
from edgemoe.model.feed_forward import ExpertLayer, Gate, Mlp
from edgemoe.model.kv import LayerStates
from edgemoe.model.latent_attention import LatentAttention, SparseLatentAttention
from edgemoe.model.layer_inputs import InputGate
from edgemoe.model.mamba import Mamba
from edgemoe.model.step_plan import Packed, Part, Record, Source, StepPlan, plain_matrix


class AttendingLayer(NamedTuple):
    """A layer that reads keys and values, and its ATTENTION record."""

    layer: int
    heads: int
    scores: AttentionScores
    record: Record


class StatefulLayer(NamedTuple):
    """A layer with states, counted among these, and its record."""

    number: int
    record: Record

    def fill(self, states: LayerStates) -> None:
        """Writes the addresses of the layer's states into the record."""
        record = self.record
        record["tails"], record["slot_stride"] = states.tails.data_ptr(), states.tails.stride(0) * 4
        if "matrices" in (record.dtype.names or ()):
            record["matrices"] = states.matrices.data_ptr()


class LayerPlanner:
    """Adds layers to a plan."""

    def __init__(self, plan: StepPlan, first_expert_layer: int = 0) -> None:
        self.plan = plan
        self.attending: list[AttendingLayer] = []
        self.stateful: list[StatefulLayer] = []
        self._expert_layers = first_expert_layer

    def add(self, layer: DecoderLayer) -> None:
        """Adds one layer's stages to the plan."""
        _add_layer(layer, self)

    def attention_record(self, layer: int, heads: int, scores: AttentionScores, queries: int, out: int) -> Record:
        """Returns the ATTENTION record of a layer, less the fields of step and cache."""
        plan, number = self.plan, len(self.attending)
        record = plan.attention[number : number + 1]
        record["queries"], record["out"], record["iota"] = queries, out, plan.kernels.iota
        self.attending.append(AttendingLayer(layer, heads, scores, record))
        return record

    def state_record(self, number: int, record: Record) -> None:
        """Writes the slots' addresses into the record of a layer with states."""
        record["reads"], record["writes"] = self.plan.reads.ctypes.data, self.plan.writes.ctypes.data
        self.stateful.append(StatefulLayer(number, record))

    def mechanism(self, attention: AttentionMechanism, given: Packed | None = None, norm: Norm | None = None) -> Source:
        """Adds a layer's attention, which reads `given`, or else the norm of the residual."""
        if given is None:
            given = self.plan.join(norm, "input", _read_first(attention))
        return _add_attention(attention, self, given)

    def feed(self, part: ExpertLayer | Mlp, given: Packed) -> list[Source]:
        """Adds experts, or a dense network. Returns their outputs."""
        if isinstance(part, Mlp):
            return [self.network("dense", part, given)]
        plan, scores = self.plan, self._scores(part.gate)
        products = [plan.part(plain_matrix(part.gate.weight), given, scores)]
        sources = [Source(plan.mixed.data_ptr())]
        if part.shared_mlp is not None:
            both = plan.buffer("shared.both", len(part.shared_mlp.gate_up))
            products.append(plan.part(part.shared_mlp.gate_up, given, both))
            shared = Source(plan.buffer("shared", plan.spec.hidden), factor=part.factor)
            if part.shared_gate is not None:
                weight = plain_matrix(part.shared_gate)
                shared = shared._replace(gate=plan.buffer("shared.gate", 1))
                products.append(plan.part(weight, given, shared.gate))
            sources.append(shared)
        if part.latent_in is not None:
            narrowed = plan.buffer("experts.in", len(part.latent_in))
            products.append(plan.part(part.latent_in, given, narrowed))
        plan.multiply(products)
        if part.latent_in is not None:
            plan.give(narrowed)
        if part.shared_mlp is not None:
            plan.network("shared", part.shared_mlp, both)
        self._route(part.gate)
        if part.latent_out is not None:
            sources[0] = self._widened(part.latent_out)
        return sources

    def _widened(self, matrix: DenseMatrix) -> Source:
        """Adds the product of the experts' sum with a matrix."""
        plan, packed = self.plan, self.plan.packed("experts.mixed", matrix.columns, [matrix])
        plan.weigh(plan.mixed.data_ptr(), matrix.columns, packed)
        result = plan.buffer("experts.out", len(matrix))
        plan.multiply([plan.part(matrix, packed, result)])
        return Source(result)

    def experts(self, gate: Gate, chosen_by: Packed) -> Source:
        """Adds experts whose gate has an input of its own."""
        self.plan.multiply([self.plan.part(plain_matrix(gate.weight), chosen_by, self._scores(gate))])
        self._route(gate)
        return Source(self.plan.mixed.data_ptr())

    def network(self, name: str, mlp: Mlp, given: Packed) -> Source:
        """Adds a dense network."""
        both = self.plan.buffer(f"{name}.both", len(mlp.gate_up))
        self.plan.multiply([self.plan.part(mlp.gate_up, given, both)])
        self.plan.network(name, mlp, both)
        return Source(self.plan.buffer(name, self.plan.spec.hidden))

    def own_input(self, part: InputGate) -> Source:
        """Adds a layer's own input, weighted by its gate."""
        plan, width = self.plan, len(part.gate)
        both = plan.inputs[part.layer].data_ptr()
        gates = plan.part(part.gate, plan.join(None, "inputs", [part.gate]), both)
        plan.multiply([gates._replace(out_stride=4 * 2 * width)])
        plan.activate("inputs", part.activation, part.out, both, 2 * width)
        return Source(plan.buffer("inputs", plan.spec.hidden))

    def _scores(self, gate: Gate) -> int:
        return self.plan.buffer("scores", gate.router.experts)

    def _route(self, gate: Gate) -> None:
        """Adds the choice of experts, and these."""
        plan, router, scores = self.plan, gate.router, self._scores(gate)
        job = plan.record(ROUTER, step=plan.step.ctypes.data, layer=self._expert_layers, scores=scores)
        job["experts"], job["k"], job["selection"] = (
            router.experts,
            router.top_k,
            plan.buffer("selection", router.experts),
        )
        job["best"], job["groups"], job["top_groups"] = (
            plan.buffer("best", router.groups),
            router.groups,
            router.top_groups,
        )
        job["logit_bias"], job["selection_bias"] = plan.vector(gate.logit_bias), plan.vector(gate.selection_bias)
        job["expert_scale"], job["by_sigmoid"] = plan.vector(gate.expert_scale), router.score == "sigmoid"
        job["renormalise"], job["by_two"] = router.renormalise, router.group_score == "top2"
        job["cap"], job["scale"] = router.logit_cap, router.scale
        job["least_mass"], job["added_mass"] = router.least_mass, router.added_mass
        plan.chunks(choose, job)
        plan.experts(self._expert_layers)
        self._expert_layers += 1


def _fed(part: ExpertLayer | Mlp, plan: StepPlan) -> list[DenseMatrix]:
    """Returns the matrices that read the input of a layer's second part."""
    if isinstance(part, Mlp):
        return [part.gate_up]
    networks = [] if part.shared_mlp is None else [part.shared_mlp.gate_up]
    networks += [] if part.latent_in is None else [part.latent_in]
    small = [part.gate.weight] if part.shared_gate is None else [part.gate.weight, part.shared_gate]
    return [*networks, *map(plain_matrix, small)]


# --- layers ---------------------------------------------------------------------------------------------------------


@singledispatch
def _add_layer(layer: DecoderLayer, planner: LayerPlanner) -> None:
    raise NotImplementedError(f"no plan for a {type(layer).__name__}")


@_add_layer.register
def _(layer: SerialLayer, planner: LayerPlanner) -> None:
    plan, part = planner.plan, layer.feed_forward
    if layer.attention is not None:
        plan.pend(planner.mechanism(layer.attention, norm=layer.norm), factor=layer.factor)
    if part is not None:
        given = plan.join(layer.post_norm, "hidden", _fed(part, plan), experts=isinstance(part, ExpertLayer))
        plan.pend(*planner.feed(part, given), factor=layer.factor)


@_add_layer.register
def _(layer: NormedLayer, planner: LayerPlanner) -> None:
    plan, part = planner.plan, layer.feed_forward
    plan.pend(planner.mechanism(layer.attention, norm=layer.before[0]), after=layer.after[0], factor=layer.factor)
    given = plan.join(layer.before[1], "hidden", _fed(part, plan), experts=isinstance(part, ExpertLayer))
    plan.pend(*planner.feed(part, given), after=layer.after[1], factor=layer.factor)


@_add_layer.register
def _(layer: OnceNormedLayer, planner: LayerPlanner) -> None:
    plan, part = planner.plan, layer.feed_forward
    reading = [*_read_first(layer.attention), *_fed(part, plan)]
    given = plan.join(layer.norm, "hidden", reading, experts=isinstance(part, ExpertLayer))
    attended = planner.mechanism(layer.attention, given)
    plan.pend(attended, *planner.feed(part, given), factor=layer.factor)


@_add_layer.register
def _(layer: ParallelLayer, planner: LayerPlanner) -> None:
    plan, gate = planner.plan, layer.gate
    plan.pend(planner.mechanism(layer.attention, norm=layer.before_attention), after=layer.after_attention)
    dense = planner.network("dense", layer.dense, plan.join(layer.before_dense, "dense", [layer.dense.gate_up]))
    plan.join(layer.before_experts, "hidden", [], experts=True)
    scaled = None if gate.input_scale is None else Norm(gate.input_scale, plan.spec.block.eps)
    chosen_by = plan.join(scaled, "chosen_by", [plain_matrix(gate.weight)])
    dense = dense._replace(norm=layer.after_dense.weight.data_ptr())
    mixed = planner.experts(gate, chosen_by)._replace(norm=layer.after_experts.weight.data_ptr())
    if layer.input_gate is None:
        plan.pend(dense, mixed, after=layer.after_both, scalar=float(layer.scalar))
        return
    plan.pend(dense, mixed, after=layer.after_both)
    plan.pend(planner.own_input(layer.input_gate), after=layer.input_gate.norm, scalar=float(layer.scalar))


# --- attention ------------------------------------------------------------------------------------------------------


@singledispatch
def _read_first(attention: AttentionMechanism) -> list[DenseMatrix]:
    """Returns the matrices that read a mechanism's input."""
    raise NotImplementedError(f"no plan for a {type(attention).__name__}")


@singledispatch
def _add_attention(attention: AttentionMechanism, planner: LayerPlanner, given: Packed) -> Source:
    """Adds a mechanism to the plan. Returns its output."""
    raise NotImplementedError(f"no plan for a {type(attention).__name__}")


@_read_first.register
def _(attention: DenseAttention) -> list[DenseMatrix]:
    return [attention.qkv] if attention.gate is None else [attention.qkv, attention.gate]


@_add_attention.register
def _(attention: DenseAttention, planner: LayerPlanner, given: Packed) -> Source:
    plan, heads, width = planner.plan, attention.heads, attention.heads.count * attention.heads.dim
    line = len(attention.qkv)
    qkv, queries, attended = plan.buffer("qkv", line), plan.buffer("queries", width), plan.buffer("attended", width)
    products, gates = [plan.part(attention.qkv, given, qkv)], dict[str, int]()
    if heads.output_gate:
        gates = {"gates": qkv + 4 * attention.ends[-1] * heads.dim, "line": line, "share": 1}
        gates["by_softplus"] = int(heads.gate_softplus)
    if attention.gate is not None:
        gates["gates"], gates["line"] = plan.buffer("gates", len(attention.gate)), len(attention.gate)
        gates["share"] = width // len(attention.gate)
        products.append(plan.part(attention.gate, given, gates["gates"]))
    plan.multiply(products)
    packed = plan.packed("turned", width, [attention.o])
    straight = attention.o.encoding == plan.kernels.dtype and not gates  # attention packs its output
    out = next(iter(packed.places.values())) if straight else attended
    record = planner.attention_record(attention.number, heads.count, attention.scores, queries, out)
    record["plain"] = not straight
    plan.chunks(make_heads(plan.kernels.bf16), _heads(attention, plan, qkv, record))
    plan.attend(record)
    if not straight:
        plan.weigh(attended, width, packed, **gates)
    return _projected(plan, attention.o, packed, attention.o_bias)


def _heads(attention: DenseAttention, plan: StepPlan, qkv: int, record: Record) -> Record:
    """Returns the HEADS record."""
    heads = attention.heads
    job = plan.record(HEADS, step=plan.step.ctypes.data, x=qkv, line=len(attention.qkv), attention=record.ctypes.data)
    attention.describe_heads(job)
    job["bias"] = plan.vector(attention.qkv_bias)
    if attention.rope is not None:
        job["cos"], job["sin"] = plan.rotation(attention.rope)
    job["values"] = plan.buffer("values", heads.kv_count * heads.dim)
    return job


def _projected(plan: StepPlan, out: DenseMatrix, packed: Packed, bias: torch.Tensor | None = None) -> Source:
    """Adds the last product of a mechanism."""
    result = plan.buffer("projected", plan.spec.hidden)
    plan.multiply([plan.part(out, packed, result)])
    return Source(result, plan.vector(bias))


@_read_first.register
def _(attention: LatentAttention) -> list[DenseMatrix]:
    return [attention.query_latent or attention.query, *_to_line(attention)]


def _to_line(attention: LatentAttention) -> list[DenseMatrix]:
    """Returns the matrices whose products are a token's line in the cache, side by side."""
    indexer = attention.indexer if isinstance(attention, SparseLatentAttention) else None
    return [attention.latent] if indexer is None else [attention.latent, indexer.key]


def _lines(plan: StepPlan, attention: LatentAttention, given: Packed, lines: int) -> list[Part]:
    """Returns the products that are written to the tokens' lines."""
    matrices, parts = _to_line(attention), list[Part]()
    width, first = sum(map(len, matrices)), lines
    for matrix in matrices:
        parts.append(plan.part(matrix, given, first)._replace(out_stride=4 * width))
        first += 4 * len(matrix)
    return parts


@_add_attention.register
def _(attention: LatentAttention, planner: LayerPlanner, given: Packed) -> Source:
    plan, heads = planner.plan, attention.heads
    count, plain, rank, width = heads.count, heads.plain, heads.rank, heads.kv.key_width
    queries, latents = plan.buffer("latent.queries", count * heads.key), plan.buffer("latents", width)
    asked, absorbed = plan.buffer("asked", count * plain), plan.buffer("absorbed", count * rank)
    means, packed = plan.buffer("means", count * rank), plan.buffer("means.packed", count * rank)
    values = plan.buffer("latent.values", count * heads.value)
    if attention.query_latent is not None and attention.query_norm is not None:
        _normed_queries(attention, planner, given, queries, latents)
    else:
        plan.multiply([plan.part(attention.query, given, queries), *_lines(plan, attention, given, latents)])
    to_cache = plan.buffer("latent.asked", count * width)
    record = planner.attention_record(attention.number, count, attention.scores, to_cache, means)
    record["plain"] = 1
    place, ask, pack = make_latent(plan.kernels.bf16)
    job = plan.record(LATENT, step=plan.step.ctypes.data, heads=count, plain=plain, dim=heads.dim, rank=rank)
    job["queries"], job["latents"], job["asked"], job["absorbed"] = queries, latents, asked, absorbed
    job["means"], job["packed"], job["attention"] = means, packed, record.ctypes.data
    job["norm"], job["eps"] = plan.vector(attention.norm.weight), attention.norm.eps
    job["cos"], job["sin"] = plan.rotation(attention.rope)
    job["scale"] = attention.scores.scale
    if isinstance(attention, SparseLatentAttention) and (indexer := attention.indexer) is not None:
        job["index"] = len(indexer.key)
        job["index_norm"], job["index_bias"] = plan.vector(indexer.norm), plan.vector(indexer.bias)
    plan.chunks(place, job)
    plan.multiply(_by_head(plan, attention.keys, asked, absorbed))
    plan.chunks(ask, job, each=count)
    plan.attend(record)
    plan.chunks(pack, job, each=count)
    plan.multiply(_by_head(plan, attention.values, packed, values))
    turned = plan.packed("turned", count * heads.value, [attention.out])
    plan.weigh(values, count * heads.value, turned)
    return _projected(plan, attention.out, turned)


def _normed_queries(
    attention: LatentAttention, planner: LayerPlanner, given: Packed, queries: int, latents: int
) -> None:
    """Adds the products with queries by way of their own latents."""
    plan, first, norm = planner.plan, attention.query_latent, attention.query_norm
    assert first is not None
    assert norm is not None
    middle = plan.buffer("query.latents", len(first))
    plan.multiply([plan.part(first, given, middle), *_lines(plan, attention, given, latents)])
    packed = plan.normalised("query", middle, len(first), norm, [attention.query])
    plan.multiply([plan.part(attention.query, packed, queries)])


def _by_head(plan: StepPlan, weights: torch.Tensor, x: int, out: int) -> list[Part]:
    """Returns the products of each head's vector with its matrix of `weights` [heads, rows, n]."""
    heads, rows, n = weights.shape
    matrix = plain_matrix(weights.view(heads * rows, n))
    first, size = weights.data_ptr(), weights.element_size()
    return [
        Part(
            matrix,
            x + 4 * head * n,
            out + 4 * head * rows,
            weight=first + head * rows * n * size,
            rows=rows,
            x_stride=4 * heads * n,
            out_stride=4 * heads * rows,
        )
        for head in range(heads)
    ]


@_read_first.register
def _(attention: DeltaNet) -> list[DenseMatrix]:
    return [attention.weights.project, plain_matrix(attention.weights.own)]


@_add_attention.register
def _(attention: DeltaNet, planner: LayerPlanner, given: Packed) -> Source:
    plan, heads, weights = planner.plan, attention.heads, attention.weights
    projected, own = plan.buffer("delta.in", len(weights.project)), plan.buffer("delta.own", 2 * heads.count)
    out = plan.buffer("delta.out", heads.values)
    plan.multiply([plan.part(weights.project, given, projected), plan.part(plain_matrix(weights.own), given, own)])
    job = plan.record(DELTA, projected=projected, own=own, out=out, eps=attention.eps)
    job["key_heads"], job["value_heads"], job["key_dim"] = heads.kv_count, heads.count, heads.dim
    for name in ("value_dim", "taps", "channels"):
        job[name] = getattr(heads, name)
    for name in ("convolution", "rates", "dt_bias", "norm"):
        job[name] = plan.vector(getattr(weights, name))
    job["scratch"] = plan.buffer("delta.scratch", scratch_floats(1, heads.count, heads.dim, heads.value_dim))
    planner.state_record(attention.number, job)
    plan.chunks(advance_delta, job, each=heads.count)
    packed = plan.packed("turned", heads.values, [weights.out])
    plan.weigh(out, heads.values, packed)
    return _projected(plan, weights.out, packed)


@_read_first.register
def _(attention: ShortConvolution) -> list[DenseMatrix]:
    return [attention.project]


@_add_attention.register
def _(attention: ShortConvolution, planner: LayerPlanner, given: Packed) -> Source:
    plan, channels = planner.plan, attention.taps.shape[1]
    x, packed = plan.buffer("conv.in", len(attention.project)), plan.packed("turned", channels, [attention.out])
    plan.multiply([plan.part(attention.project, given, x)])
    job = plan.record(CONV, x=x, bias=plan.vector(attention.project_bias), out=plan.buffer("conv.out", channels))
    _fill_convolution(plan, job, attention.taps, attention.bias)
    job["packs"], job["pack_count"] = packed.packs, packed.pack_count
    planner.state_record(attention.number, job)
    plan.chunks(convolve_token, job)
    return _projected(plan, attention.out, packed, attention.out_bias)


def _fill_convolution(plan: StepPlan, job: Record, taps: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert job.dtype.names is not None
    assert job.dtype.names[: len(CONVOLUTION.names or ())] == CONVOLUTION.names
    job["taps"], job["channels"] = taps.shape
    job["convolution"], job["conv_bias"] = plan.vector(taps), plan.vector(bias)


@_read_first.register
def _(attention: Mamba) -> list[DenseMatrix]:
    return [attention.project]


@_add_attention.register
def _(attention: Mamba, planner: LayerPlanner, given: Packed) -> Source:
    plan, heads = planner.plan, attention.heads
    x, packed = plan.buffer("mamba.in", len(attention.project)), plan.packed("turned", heads.values, [attention.out])
    plan.multiply([plan.part(attention.project, given, x)])
    job = plan.record(MAMBA, heads=heads.count, groups=heads.kv_count, state=heads.dim, value_dim=heads.value_dim)
    _fill_convolution(plan, job, attention.taps, attention.bias)
    job["x"], job["bias"], job["eps"] = x, plan.vector(attention.project_bias), attention.eps
    job["mixed"], job["out"] = plan.buffer("mamba.mixed", heads.channels), plan.buffer("mamba.out", heads.values)
    for name in ("rates", "skip", "dt_bias", "norm"):
        job[name] = plan.vector(getattr(attention, name))
    job["packs"], job["pack_count"] = packed.packs, packed.pack_count
    planner.state_record(attention.number, job)
    plan.chunks(mix_channels, job, each=PARTS)
    plan.chunks(advance_mamba, job, each=heads.count)
    plan.chunks(gate_mamba, job)
    return _projected(plan, attention.out, packed, attention.out_bias)

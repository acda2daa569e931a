"""Finds the tensors of a model in its GGUF files, under GGUF's names, as converters write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.mechanisms import LatentHeads
from edgemoe.families.spec import ModelSpec, Shape
from edgemoe.families.state_mechanisms import DeltaHeads
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.gguf.gguf_file import GgufModel
from edgemoe.store.gguf.gguf_models import GgufFamily, GgufMetadata, family_of
from edgemoe.store.gguf.gguf_values import (
    BlockSource,
    MadeSource,
    Undo,
    flattened,
    grouped_heads,
    halves_of_heads,
    keys_and_values,
    less_one,
    log_of_negative,
    rows_of,
    rows_to,
)
from edgemoe.store.pieces import ExpertRecipe
from edgemoe.store.sources import PLAIN, SourceRows, SourceTensor

TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP["lm_head.weight"] = "output.weight"
EMBEDDING_NORM = "token_embd_norm.weight"  # the last norm in files of LFM2
LAYER = {  # part of a layer's tensor, in transformers -> in GGUF
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv1d": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.fc1_latent_proj": "ffn_latent_down",
    "mlp.fc2_latent_proj": "ffn_latent_up",
}
NAMED = {  # the same for whole names, which differ in more than a part
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.scale": "ffn_gate_inp.scale",
    "mlp.gate.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
}
MAMBA_UNDO: dict[str, Undo] = {"mamba.A_log": log_of_negative, "mamba.norm.weight": flattened}
BESIDE = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(rope_freqs|nextn)\..*")
PREDICTING, LAYER_NUMBER = re.compile(r"blk\.(\d+)\.nextn\."), re.compile(r"blk\.(\d+)\.")
QKV = re.compile(r"(blk\.\d+)\.attn_([qkv])\.(weight|bias)")


class GgufTensors:
    """Finds tensors of one model, each once."""

    def __init__(self, model: GgufModel, spec: ModelSpec) -> None:
        self._model, self._spec, self._family = model, spec, family_of(model)
        self._left = dict(model.tensors)
        self._stacks: dict[str, SourceTensor] = {}

    def claim(self, name: str, shape: Shape) -> SourceTensor:
        """Returns the tensor of a name in transformers' spelling. Raises CheckpointError where it is missing or odd."""
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if not found:
            top = TOP[name]
            if name == "model.norm.weight" and top not in self._left and EMBEDDING_NORM in self._left:
                top = EMBEDDING_NORM
            return self._source(name, shape, (top,), _norm_undo(self._family, name))
        layer, part = int(found[1]), found[2]
        names, undo = self._of_layer(layer, part, shape)
        return self._source(name, shape, tuple(f"blk.{layer}.{each}" for each in names), undo)

    def locate(self, selection: SourceRows) -> tuple[SourceTensor, SourceRows]:
        """Returns the stack and the rows of an expert. The stack has the GGUF name that `selection` has."""
        if selection.source not in self._stacks:
            self._stacks[selection.source] = self._source(selection.source, selection.shape, (selection.source,), None)
        return self._stacks[selection.source], selection

    def experts(self, layer: int) -> Iterator[ExpertRecipe]:
        """Yields the experts of a layer, which is counted among all."""
        geometry, base = self._spec.geometry, f"blk.{layer}"
        count, width, hidden = geometry.experts, geometry.width, geometry.hidden

        def part(name: str, *shape: int) -> Callable[[int], SourceRows]:
            return lambda expert: SourceRows(f"{base}.{name}", (count, *shape), (expert,))

        first = ("gate", "up")[-geometry.activation.inputs :]
        halves = [part(f"ffn_{each}_exps.weight", width, hidden) for each in first]
        if f"{base}.ffn_gate_up_exps.weight" in self._model.tensors:
            halves = [part("ffn_gate_up_exps.weight", geometry.first_rows, hidden)]
        biases = [part(f"ffn_{each}_exps.bias", width) for each in first] + [part("ffn_down_exps.bias", hidden)]
        down = part("ffn_down_exps.weight", hidden, width)
        for expert in range(count):
            own = tuple(each(expert) for each in biases) if geometry.biases else ()
            yield ExpertRecipe(tuple(each(expert) for each in halves), (down(expert),), own)

    def refuse_leftovers(self) -> None:
        """Raises UnsupportedModel where tensors are left that the metadata does not ask for.

        Layers for predicting several tokens are left out: by their number, or by their tensors.
        """
        layers, counted = self._spec.layers, GgufMetadata(self._model).integer("block_count")
        predicting = {found[1] for name in self._left if (found := PREDICTING.match(name))}
        further = {str(layer) for layer in range(layers, counted)} | predicting
        left = [
            name
            for name in self._left
            if not IGNORED.fullmatch(name) and not ((at := LAYER_NUMBER.match(name)) and at[1] in further)
        ]
        if self._spec.block.tied:
            left = [name for name in left if name != "output.weight"]
        if left:
            raise UnsupportedModel(
                f"{self._model.files[0]}: {len(left)} tensors have no place in a {self._model.architecture} "
                f"({self._spec.architecture}) of this size, such as {left[0]!r}"
            )

    def _of_layer(self, layer: int, part: str, shape: Shape) -> tuple[tuple[str, ...], Undo | None]:
        """Returns the GGUF names of the parts of a layer's tensor, and the function that joins them."""
        heads = self._spec.attention[layer].heads
        stem, _, ending = part.rpartition(".")
        if part == "self_attn.kv_b_proj.weight" and self._has(layer, "attn_k_b.weight"):
            assert isinstance(heads, LatentHeads)
            return ("attn_k_b.weight", "attn_v_b.weight"), keys_and_values
        if part == "linear_attn.in_proj_qkvz.weight" and self._has(layer, "attn_qkv.weight"):
            assert isinstance(heads, DeltaHeads)
            return ("attn_qkv.weight", "attn_gate.weight"), rows_to(heads.order()[0])
        name = self._name(layer, part, stem, ending)
        undo = _norm_undo(self._family, part)
        if self._family.turned and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            undo = halves_of_heads(heads.count if stem == "self_attn.q_proj" else heads.kv_count)
        undo = MAMBA_UNDO.get(part, undo)
        if isinstance(heads, DeltaHeads) and part.startswith("linear_attn."):
            undo = _delta_undo(self._family, heads, part)
        return (name,), undo

    def _name(self, layer: int, part: str, stem: str, ending: str) -> str:
        if part == "post_attention_layernorm.weight" and not self._has(layer, NAMED[part]):
            return "ffn_norm.weight"
        if part in NAMED:
            return NAMED[part]
        parts = {**LAYER, **BESIDE} if self._spec.block.parallel else LAYER
        return f"{parts[stem]}.{ending}"

    def _has(self, layer: int, name: str) -> bool:
        return f"blk.{layer}.{name}" in self._left

    def _source(self, name: str, shape: Shape, found: tuple[str, ...], undo: Undo | None) -> SourceTensor:
        """Returns the source of a tensor made of these; of one in a fused matrix, too. Raises CheckpointError."""
        if found[0] not in self._model.tensors and (cut := self._fused(found[0], shape)) is not None:
            fused, piece = cut
            return MadeSource(name, shape, "BF16", fused, parts=(fused,), undo=_then(piece, undo))
        tensors = []
        for each in found:
            if each not in self._model.tensors:
                where = self._model.files[0]
                raise CheckpointError(f"{where}: tensor {each} is missing; its shape should be {list(shape)}")
            self._left.pop(each, None)
            tensors.append(self._model.tensors[each])
        if undo is not None:
            self._demand_size(shape, tensors)
            kind = tensors[0].dtype if tensors[0].dtype in PLAIN else "BF16"
            return MadeSource(name, shape, kind, tensors[0], parts=tuple(tensors), undo=undo)
        tensor = tensors[0]
        if _core(tensor.shape) != _core(shape):
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} should have the shape {list(shape)} by the metadata, "
                f"but has {list(tensor.shape)}"
            )
        tensor = replace(tensor, shape=shape)
        return (SourceTensor if tensor.dtype in PLAIN else BlockSource)(name, shape, tensor.dtype, tensor)

    def _fused(self, name: str, shape: Shape) -> tuple[CheckpointTensor, Undo] | None:
        """Returns the matrix of queries, keys and values together, and how to take one of them out of it."""
        found = QKV.fullmatch(name)
        if not found or f"{found[1]}.attn_qkv.{found[3]}" not in self._model.tensors:
            return None
        layer = int(found[1].removeprefix("blk."))
        sizes = {part: rows[0] for part, rows in self._sizes(layer)}
        first = sum(sizes[part] for part in "qkv"[: "qkv".index(found[2])])
        fused = self._model.tensors[f"{found[1]}.attn_qkv.{found[3]}"]
        self._left.pop(fused.name, None)
        if fused.shape[0] != sum(sizes.values()):
            raise CheckpointError(
                f"{fused.file}: tensor {fused.name} has {fused.shape[0]} rows, not {sum(sizes.values())}"
            )
        return fused, rows_of(first, first + shape[0])

    def _sizes(self, layer: int) -> Iterator[tuple[str, Shape]]:
        for name, shape in self._spec.attention[layer].heads.tensors(self._spec.hidden):
            if (part := re.fullmatch(r"self_attn\.([qkv])_proj\.weight", name)) is not None:
                yield part[1], shape

    def _demand_size(self, shape: Shape, tensors: list[CheckpointTensor]) -> None:
        wanted, held = 1, 0
        for length in shape:
            wanted *= length
        for tensor in tensors:
            size = 1
            for length in tensor.shape:
                size *= length
            held += size
        if wanted != held:
            names = " and ".join(tensor.name for tensor in tensors)
            raise CheckpointError(f"{tensors[0].file}: {names} have {held} weights, and should have {wanted}")


def _core(shape: Shape) -> Shape:
    """Returns a shape without the lengths of 1, which converters leave out or put in."""
    return tuple(length for length in shape if length != 1)


def _then(first: Undo, second: Undo | None) -> Undo:
    return first if second is None else lambda weights: second(first(weights))


def _norm_undo(family: GgufFamily, name: str) -> Undo | None:
    is_norm = name.endswith(("norm.weight", "layernorm.weight")) and "linear_attn" not in name
    return less_one if family.offset and is_norm else None


def _delta_undo(family: GgufFamily, heads: DeltaHeads, part: str) -> Undo | None:
    """Returns the function that restores a delta net's tensor: it groups value heads by key head again."""
    logarithm = log_of_negative if part == "linear_attn.A_log" else None
    per_key = heads.count // heads.kv_count
    if not family.tiled or per_key == 1:
        return logarithm
    group = {
        "linear_attn.in_proj_qkv.weight": grouped_heads(heads.kv_count, per_key, heads.value_dim, 2 * heads.keys),
        "linear_attn.conv1d.weight": grouped_heads(heads.kv_count, per_key, heads.value_dim, 2 * heads.keys),
        "linear_attn.in_proj_z.weight": grouped_heads(heads.kv_count, per_key, heads.value_dim),
        "linear_attn.out_proj.weight": grouped_heads(heads.kv_count, per_key, heads.value_dim, axis=1),
        **dict.fromkeys(
            (
                "linear_attn.in_proj_a.weight",
                "linear_attn.in_proj_b.weight",
                "linear_attn.A_log",
                "linear_attn.dt_bias",
            ),
            grouped_heads(heads.kv_count, per_key, 1),
        ),
    }.get(part)
    return logarithm if group is None else _then(group, logarithm)

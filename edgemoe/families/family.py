"""One family of models: its record, and the readings of configurations that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgemoe.families.mechanisms import same_attention
from edgemoe.families.read import Config, ConfigReader, always, choice, first_dense, flag, number, shared_width, whole
from edgemoe.families.spec import AttentionHeads, LayerAttention, LayerInputs, TensorNames

FieldSources = Mapping[str, Any]  # a record's field -> its value, or a function of the configuration
PLAIN = TensorNames()
BIASES: FieldSources = {"qkv_bias": flag("attention_bias"), "o_bias": flag("attention_bias")}
SHARED_EXPERT = (".shared_experts.", ".shared_expert.")
GATED_HEADS: FieldSources = {
    "qk_norm": "head",
    "output_gate": "queries",
    **BIASES,
}
GATED_SHARED: FieldSources = {"shared_width": whole("shared_expert_intermediate_size"), "shared_gate": True}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Its records override the common readings in `config`."""

    name: str  # `model_type` of the configuration
    architecture: str
    section: str = ""  # of the configuration, that has the decoder; "": the configuration itself
    names: TensorNames = PLAIN
    mechanism: type[AttentionHeads] = AttentionHeads  # the record of its heads
    layers: Callable[[Config, LayerAttention], tuple[LayerAttention, ...]] = (
        same_attention  # the attention of each layer
    )
    positions: ConfigReader = always  # whether attention embeds them
    heads: FieldSources = field(default_factory=dict)
    rope: FieldSources = field(default_factory=dict)
    router: FieldSources = field(default_factory=dict)
    feed_forward: FieldSources = field(default_factory=dict)
    block: FieldSources = field(default_factory=dict)
    layer_inputs: Callable[[Config], LayerInputs | None] = lambda _: None


def expert_groups(key: str) -> Callable[[Config], int]:
    """Returns a reader of DeepSeek-V2's groups of experts, which count where its method says so."""
    methods = {"greedy": False, "group_limited_greedy": True}
    return lambda config: whole(key, default=1)(config) if choice("topk_method", methods, False)(config) else 1


MIXTRAL: tuple[tuple[str, str], ...] = ((".mlp.", ".block_sparse_moe."),)
W123 = ("w1", "w3", "w2")
OF_TEXT = (("model.", "model.language_model."),)  # the decoder of a model that takes images
VISION = (r"model\.visual\.",)
NORM_AND_TIES: FieldSources = {"eps": number("rms_norm_eps", default=1e-5), "tied": flag("tie_word_embeddings")}
SIGMOID = choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
DEEPSEEK_V3_ROUTER: FieldSources = {  # DeepSeek-V3's router [DeepSeek-V3, 2.1.2]
    "experts": whole("n_routed_experts"),
    "score": SIGMOID,
    "float32": True,
    "selection_bias": True,
    "renormalise": flag("norm_topk_prob", default=True),
    "least_mass": 1e-20,
    "scale": number("routed_scaling_factor", default=1.0),
    "groups": whole("n_group", default=1),
    "top_groups": whole("topk_group", default=1),
    "group_score": "top2",
}
SHARED_EXPERTS: FieldSources = {
    "dense_layers": first_dense,
    "dense_width": whole("intermediate_size"),
    "shared_width": shared_width,
}

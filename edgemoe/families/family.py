"""What the table says of one family, and what several families have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgemoe.families.read import Config, alike, choice, first_dense, flag, number, shared_width, whole
from edgemoe.families.spec import Attention, Heads, Names

Given = Mapping[str, Any]  # a record's field -> its value, or a function of the configuration
PLAIN = Names()
BIASES: Given = {"qkv_bias": flag("attention_bias"), "o_bias": flag("attention_bias")}
SHARED_EXPERT = (".shared_experts.", ".shared_expert.")
GATED_HEADS: Given = {
    "qk_norm": "head",
    "output_gate": True,
    **BIASES,
}
GATED_SHARED: Given = {"shared_width": whole("shared_expert_intermediate_size"), "shared_gate": True}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Its records are what is given here, over the common readings in `config`."""

    name: str  # `model_type` of the configuration
    architecture: str
    section: str = ""  # of the configuration, that has the decoder; "": the configuration itself
    names: Names = PLAIN
    mechanism: type[Heads] = Heads  # the record of its heads
    layers: Callable[[Config, Attention], tuple[Attention, ...]] = alike  # what each layer attends with
    heads: Given = field(default_factory=dict)
    rope: Given = field(default_factory=dict)
    router: Given = field(default_factory=dict)
    feed_forward: Given = field(default_factory=dict)
    block: Given = field(default_factory=dict)


def limited(key: str) -> Callable[[Config], int]:
    """Returns a reader of DeepSeek-V2's groups of experts, which count where its method says so."""
    methods = {"greedy": False, "group_limited_greedy": True}
    return lambda config: whole(key, default=1)(config) if choice("topk_method", methods, False)(config) else 1


MIXTRAL: tuple[tuple[str, str], ...] = ((".mlp.", ".block_sparse_moe."),)
EPS: Given = {"eps": number("rms_norm_eps", default=1e-5), "tied": flag("tie_word_embeddings")}
SIGMOID = choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
BEYOND = r"model\.layers\.{layers}\."  # layers behind the last one, for predicting several tokens
CORRECTED: Given = {  # DeepSeek-V3's router [DeepSeek-V3, 2.1.2]
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
SHARED: Given = {"dense_layers": first_dense, "dense_width": whole("intermediate_size"), "shared_width": shared_width}

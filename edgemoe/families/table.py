"""The table of families: the constants of each architecture, and the keys of its configuration that have the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgemoe.families.mechanisms import (
    LATENT,
    LatentHeads,
    alternating,
    by_type,
    by_type_below,
    clamped_swiglu,
    delta_layers,
    gemma,
    root_of_hidden,
    same_attention,
)
from edgemoe.families.read import (
    Config,
    choice,
    first_dense,
    flag,
    inverse,
    number,
    outside_interval,
    same,
    shared_width,
    sparse_steps,
    times,
    typed_layers,
    whole,
)
from edgemoe.families.spec import AttentionHeads, LayerAttention, TensorNames
from edgemoe.types.experts import Activation

FieldSources = Mapping[str, Any]  # a record's field -> its value, or a function of the configuration
PLAIN = TensorNames()
BIASES: FieldSources = {"qkv_bias": flag("attention_bias"), "o_bias": flag("attention_bias")}
SHARED_EXPERT = (".shared_experts.", ".shared_expert.")
GATED_HEADS: FieldSources = {
    "qk_norm": "head",
    "output_gate": True,
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
    heads: FieldSources = field(default_factory=dict)
    rope: FieldSources = field(default_factory=dict)
    router: FieldSources = field(default_factory=dict)
    feed_forward: FieldSources = field(default_factory=dict)
    block: FieldSources = field(default_factory=dict)


def expert_groups(key: str) -> Callable[[Config], int]:
    """Returns a reader of DeepSeek-V2's groups of experts, which count where its method says so."""
    methods = {"greedy": False, "group_limited_greedy": True}
    return lambda config: whole(key, default=1)(config) if choice("topk_method", methods, False)(config) else 1


MIXTRAL: tuple[tuple[str, str], ...] = ((".mlp.", ".block_sparse_moe."),)
NORM_AND_TIES: FieldSources = {"eps": number("rms_norm_eps", default=1e-5), "tied": flag("tie_word_embeddings")}
SIGMOID = choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
EXTRA_LAYERS = r"model\.layers\.{layers}\."  # layers behind the last one, for predicting several tokens
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


GELU = Activation("gelu_tanh")
GEMMA_4 = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names=TensorNames(
        renames=(
            ("model.", "model.language_model."),
            (".mlp.gate.weight", ".router.proj.weight"),
            (".mlp.gate.", ".router."),
            (".mlp.experts.", ".experts."),
            (".mlp.shared_experts.", ".mlp."),
        ),
        skipped=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",),
    ),
    layers=gemma,
    heads={"qk_norm": "head", "v_norm": True, "scale": 1.0},
    router={"top_k": whole("top_k_experts"), "renormalise": True, "input_norm": True, "expert_scale": True},
    feed_forward={
        "activation": choice("hidden_activation", {"gelu_pytorch_tanh": GELU}, GELU),
        "shared_width": whole("intermediate_size"),
    },
    block={
        "tied": flag("tie_word_embeddings", True),
        "embedding": root_of_hidden,
        "parallel": True,
        "soft_cap": number("final_logit_softcapping", default=0.0),
    },
)
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            name="mixtral",
            architecture="MixtralForCausalLM",
            names=TensorNames(renames=MIXTRAL, projections=("w1", "w3", "w2")),
            rope={"theta": 1e6},
            router={"renormalise": True},
            feed_forward={"width": whole("intermediate_size")},
            block=NORM_AND_TIES,
        ),
        Family(
            name="olmoe",
            architecture="OlmoeForCausalLM",
            heads={**BIASES, "qk_norm": "full", "clip": number("clip_qkv", default=0.0)},
            feed_forward={"width": whole("intermediate_size")},
            block=NORM_AND_TIES,
        ),
        Family(
            name="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            names=TensorNames(renames=(SHARED_EXPERT,)),
            layers=by_type_below,
            heads={"qkv_bias": flag("qkv_bias", default=True)},
            feed_forward={
                "dense_layers": sparse_steps,
                "dense_width": whole("intermediate_size", default=0),
                **GATED_SHARED,
            },
        ),
        Family(
            name="glm4_moe",
            architecture="Glm4MoeForCausalLM",
            names=TensorNames(skipped=(EXTRA_LAYERS,)),
            heads={
                "qkv_bias": flag("attention_bias"),
                "qk_norm": choice("use_qk_norm", {True: "head", False: "none"}, "none"),
            },
            rope={"partial": 0.5},
            router=DEEPSEEK_V3_ROUTER,
            feed_forward=SHARED_EXPERTS,
            block=NORM_AND_TIES,
        ),
        Family(
            name="minimax_m2",
            architecture="MiniMaxM2ForCausalLM",
            names=TensorNames(
                renames=((".gate.e_score_correction_bias", ".e_score_correction_bias"), *MIXTRAL),
                skipped=(EXTRA_LAYERS,),
                projections=("w1", "w3", "w2"),
            ),
            heads={"qk_norm": choice("use_qk_norm", {True: "full"}, "full")},
            rope={"theta": 5e6},
            router={"score": SIGMOID, "float32": True, "selection_bias": True, "renormalise": True},
            feed_forward={"width": whole("intermediate_size")},
        ),
        Family(
            name="granitemoe",
            architecture="GraniteMoeForCausalLM",
            names=TensorNames(
                renames=(
                    (".mlp.gate.weight", ".mlp.router.layer.weight"),
                    (".mlp.experts.gate_up_proj", ".mlp.input_linear.weight"),
                    (".mlp.experts.down_proj", ".mlp.output_linear.weight"),
                    *MIXTRAL,
                )
            ),
            heads={**BIASES, "scale": number("attention_multiplier", default=1.0)},
            router={"renormalise": True},
            feed_forward={"width": whole("intermediate_size")},
            block={
                "embedding": number("embedding_multiplier", default=1.0),
                "residual": number("residual_multiplier", default=1.0),
                "logits": inverse("logits_scaling"),
            },
        ),
        Family(
            name="dots1",
            architecture="Dots1ForCausalLM",
            layers=by_type,
            heads={**BIASES, "qk_norm": "head"},
            router={**DEEPSEEK_V3_ROUTER, "score": "sigmoid", "renormalise": flag("norm_topk_prob")},
            feed_forward=SHARED_EXPERTS,
        ),
        Family(
            name="hunyuan_v1_moe",
            architecture="HunYuanMoEV1ForCausalLM",
            names=TensorNames(
                renames=(
                    ("q_norm", "query_layernorm"),
                    ("k_norm", "key_layernorm"),
                    (".mlp.gate.weight", ".mlp.gate.wg.weight"),
                    (".shared_experts.", ".shared_mlp."),
                )
            ),
            heads={**BIASES, "qk_norm": choice("use_qk_norm", {True: "head"}, "head"), "norm_after_rope": True},
            router={"top_k": same("moe_topk"), "float32": True, "renormalise": True},
            feed_forward={
                "width": whole("intermediate_size"),
                "dense_layers": choice("moe_layer_num_skipped", {0: frozenset()}, frozenset()),
                "shared_width": times("intermediate_size", "num_shared_expert", 1),
            },
            block=NORM_AND_TIES,
        ),
        Family(
            name="ernie4_5_moe",
            architecture="Ernie4_5_MoeForCausalLM",
            names=TensorNames(
                renames=((".mlp.gate.e_score", ".mlp.moe_statics.e_score"),),
                skipped=("model\\.mtp_",),
            ),
            heads={"qkv_bias": choice("use_bias", {False: False}, default=False)},
            rope={"interleaved": True, "theta": 5e5},
            router={
                "experts": whole("moe_num_experts"),
                "top_k": whole("moe_k"),
                "float32": True,
                "selection_bias": True,
                "renormalise": True,
                "least_mass": number("moe_norm_min", default=1e-12),
            },
            feed_forward={
                "dense_layers": outside_interval,
                "dense_width": whole("intermediate_size"),
                "shared_width": times("moe_intermediate_size", "moe_num_shared_experts", 2),
            },
            block={"eps": number("rms_norm_eps", default=1e-5), "tied": flag("tie_word_embeddings", default=True)},
        ),
        Family(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            heads={**BIASES, "qk_norm": "head"},
            feed_forward={"dense_layers": sparse_steps, "dense_width": whole("intermediate_size", default=0)},
        ),
        Family(
            name="deepseek_v2",
            architecture="DeepseekV2ForCausalLM",
            mechanism=LatentHeads,
            heads=LATENT,
            rope={"interleaved": True},
            router={
                "experts": whole("n_routed_experts"),
                "float32": True,
                "renormalise": choice("norm_topk_prob", {False: False}, False),
                "scale": number("routed_scaling_factor", default=1.0),
                "groups": expert_groups("n_group"),
                "top_groups": expert_groups("topk_group"),
            },
            feed_forward=SHARED_EXPERTS,
        ),
        Family(  # Kimi-K2 too
            name="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            names=TensorNames(skipped=(EXTRA_LAYERS,)),
            mechanism=LatentHeads,
            heads=LATENT,
            rope={"interleaved": flag("rope_interleave", default=True)},
            router=DEEPSEEK_V3_ROUTER,
            feed_forward=SHARED_EXPERTS,
        ),
        Family(
            name="glm4_moe_lite",
            architecture="Glm4MoeLiteForCausalLM",
            names=TensorNames(skipped=(EXTRA_LAYERS,)),
            mechanism=LatentHeads,
            heads=LATENT,
            rope={"interleaved": flag("rope_interleave", default=True)},
            router=DEEPSEEK_V3_ROUTER,
            feed_forward={**SHARED_EXPERTS, "dense_layers": typed_layers},
            block=NORM_AND_TIES,
        ),
        Family(
            name="gpt_oss",
            architecture="GptOssForCausalLM",
            names=TensorNames(renames=((".mlp.gate.", ".mlp.router."),), transposed=True, interleaved=True),
            layers=alternating,
            heads={"sinks": True, "qkv_bias": flag("attention_bias", True), "o_bias": flag("attention_bias", True)},
            rope={"theta": 1.5e5},
            router={"logit_bias": True, "renormalise": True},
            feed_forward={"width": whole("intermediate_size"), "activation": clamped_swiglu, "expert_biases": True},
            block=NORM_AND_TIES,
        ),
        GEMMA_4,
        replace(GEMMA_4, name="gemma4", architecture="Gemma4ForConditionalGeneration", section="text_config"),
        Family(
            name="qwen3_next",
            architecture="Qwen3NextForCausalLM",
            names=TensorNames(renames=(SHARED_EXPERT,), skipped=(r"mtp\.",)),
            layers=delta_layers(grouped=True),
            heads=GATED_HEADS,
            rope={"partial": 0.25},
            router={"renormalise": flag("norm_topk_prob", default=True)},
            feed_forward={
                **GATED_SHARED,
                "dense_layers": sparse_steps,
                "dense_width": whole("intermediate_size", default=0),
            },
            block={"unit_offset": True},
        ),
        *(
            Family(
                name=name,
                architecture=architecture,
                section=section,
                names=TensorNames(renames=(SHARED_EXPERT, *renames), skipped=(r"mtp\.", r"model\.visual\.")),
                layers=delta_layers(grouped=False),
                heads=GATED_HEADS,
                rope={"partial": 0.25},
                router={"renormalise": True},
                feed_forward=GATED_SHARED,
                block={"unit_offset": True},
            )
            for name, architecture, section, renames in (
                ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "", ()),
                (
                    "qwen3_5_moe",
                    "Qwen3_5MoeForConditionalGeneration",
                    "text_config",
                    (("model.", "model.language_model."),),
                ),
            )
        ),
    )
}
INDEXER = "its attention chooses what to look at by an indexer of its own (sparse attention)"
REFUSED: dict[str, str] = {  # architecture -> why
    "DeepseekV32ForCausalLM": INDEXER,
    "DeepseekV4ForCausalLM": "its attention compresses the context, and its residual has several streams",
    "GlmMoeDsaForCausalLM": INDEXER,
    "MiniMaxM3SparseForConditionalGeneration": INDEXER,
    "MiniMaxM3VLForCausalLM": INDEXER,
}

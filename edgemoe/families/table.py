"""The table of families: the constants of each architecture, and the keys of its configuration that have the rest."""

from __future__ import annotations

from dataclasses import replace

from edgemoe.families.family import (
    BIASES,
    DEEPSEEK_V3_ROUTER,
    GATED_HEADS,
    GATED_SHARED,
    MIXTRAL,
    NORM_AND_TIES,
    OF_TEXT,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SIGMOID,
    VISION,
    W123,
    Family,
    expert_groups,
)
from edgemoe.families.layer_kinds import cohere_layers, exaone_layers, rope_by_kind, windows_rotated
from edgemoe.families.mechanisms import (
    LATENT,
    LatentHeads,
    alternating,
    by_type,
    by_type_below,
    clamped_swiglu,
    gemma,
    root_of_hidden,
)
from edgemoe.families.read import (
    FULL,
    SLIDING,
    capped,
    choice,
    first_layers,
    flag,
    inverse,
    number,
    outside_interval,
    same,
    share_of_both,
    sparse_steps,
    times,
    typed_layers,
    unless,
    whole,
)
from edgemoe.families.spec import TensorNames
from edgemoe.families.state_mechanisms import conv_layers, delta_layers, granite_mamba, mamba_layers
from edgemoe.types.experts import Activation

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
QWEN_3 = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    heads={**BIASES, "qk_norm": "head"},
    feed_forward={"dense_layers": sparse_steps, "dense_width": whole("intermediate_size", default=0)},
)
GLM_4 = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    heads={
        "qkv_bias": flag("attention_bias"),
        "qk_norm": choice("use_qk_norm", {True: "head", False: "none"}, "none"),
    },
    rope={"partial": 0.5},
    router=DEEPSEEK_V3_ROUTER,
    feed_forward=SHARED_EXPERTS,
    block=NORM_AND_TIES,
)
DEEPSEEK_V3 = Family(  # Kimi-K2 too
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    mechanism=LatentHeads,
    heads=LATENT,
    rope={"interleaved": flag("rope_interleave", default=True)},
    router=DEEPSEEK_V3_ROUTER,
    feed_forward=SHARED_EXPERTS,
)
KIMI_K25 = replace(
    DEEPSEEK_V3,
    name="kimi_k25",
    section="text_config",
    names=TensorNames(
        renames=(
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            *OF_TEXT,
            (".layers.", ".blocks."),  # as transformers 5.24 saves it
        ),
        skipped=(r"(model\.)?(vision_tower|mm_projector|multi_modal_projector)\.",),
    ),
)
GRANITE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    names=TensorNames(
        renames=(
            (".mlp.gate.weight", ".mlp.router.layer.weight"),
            (".mlp.gate.weight", ".mlp.router.weight"),
            (".mlp.experts.gate_up_proj", ".mlp.input_linear.weight"),
            (".mlp.experts.down_proj", ".mlp.output_linear.weight"),
            (".mlp.shared_experts.gate_up_proj.", ".shared_mlp.input_linear."),
            (".mlp.shared_experts.down_proj.", ".shared_mlp.output_linear."),
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
)
WINDOWED_ROPES = {  # Laguna's and Mellum's, where the configuration has none
    FULL: {"rope_type": "default", "rope_theta": 5e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            name="mixtral",
            architecture="MixtralForCausalLM",
            names=TensorNames(renames=MIXTRAL, projections=W123),
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
        GLM_4,
        Family(
            name="minimax_m2",
            architecture="MiniMaxM2ForCausalLM",
            names=TensorNames(
                renames=((".gate.e_score_correction_bias", ".e_score_correction_bias"), *MIXTRAL),
                projections=W123,
            ),
            heads={"qk_norm": choice("use_qk_norm", {True: "full"}, "full")},
            rope={"theta": 5e6},
            router={"score": SIGMOID, "float32": True, "selection_bias": True, "renormalise": True},
            feed_forward={"width": whole("intermediate_size")},
        ),
        GRANITE,
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
        QWEN_3,
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
        DEEPSEEK_V3,
        Family(
            name="glm4_moe_lite",
            architecture="Glm4MoeLiteForCausalLM",
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
        replace(
            QWEN_3,
            name="qwen3_vl_moe",
            architecture="Qwen3VLMoeForConditionalGeneration",
            section="text_config",
            names=TensorNames(renames=OF_TEXT, skipped=VISION, transposed=True),
            rope={"theta": 5e5},
            router={"renormalise": True},
        ),
        replace(
            GLM_4,
            name="glm4v_moe",
            architecture="Glm4vMoeForConditionalGeneration",
            section="text_config",
            names=TensorNames(renames=OF_TEXT, skipped=VISION),
            heads={"qkv_bias": flag("attention_bias", default=True)},
        ),
        replace(
            GLM_4,
            name="solar_open",
            architecture="SolarOpenForCausalLM",
            heads={"qkv_bias": flag("attention_bias")},
            rope={"theta": 1e6},
            feed_forward={"shared_width": SHARED_EXPERTS["shared_width"]},
        ),
        *(
            replace(KIMI_K25, architecture=architecture)
            for architecture in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
        ),
        replace(
            GRANITE,
            name="granitemoeshared",
            architecture="GraniteMoeSharedForCausalLM",
            feed_forward={
                **GRANITE.feed_forward,
                "shared_width": whole("shared_intermediate_size", default=0),
                "shared_stacked": True,
            },
        ),
        Family(
            name="flex_olmo",
            architecture="FlexOlmoForCausalLM",
            heads={**BIASES, "qk_norm": "full"},
            rope={"theta": 5e5},
            feed_forward={"width": whole("intermediate_size")},
            block={"norms": "after"},
        ),
        Family(
            name="hy_v3",
            architecture="HYV3ForCausalLM",
            names=TensorNames(
                renames=(
                    (".mlp.gate.weight", ".mlp.router.gate.weight"),
                    (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
                    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
                    (".mlp.shared_experts.", ".mlp.shared_mlp."),
                )
            ),
            heads={**BIASES, "qk_norm": "head"},
            rope={"theta": 11_158_840.0},
            router={
                **DEEPSEEK_V3_ROUTER,
                "experts": whole("num_experts", "num_local_experts"),
                "renormalise": True,
                "scale": number("router_scaling_factor", default=2.826),
                "groups": 1,
                "top_groups": 1,
            },
            feed_forward={
                "dense_layers": typed_layers,
                "dense_width": whole("intermediate_size"),
                "shared_width": times("moe_intermediate_size", "num_shared_experts", 1),
            },
            block=NORM_AND_TIES,
        ),
        Family(
            name="exaone_moe",
            architecture="ExaoneMoeForCausalLM",
            names=TensorNames(renames=((".mlp.gate.e_score", ".mlp.e_score"),)),
            layers=exaone_layers,
            heads={"qk_norm": "head"},
            router={
                **DEEPSEEK_V3_ROUTER,
                "experts": whole("num_experts", "num_local_experts"),
                "scale": number("routed_scaling_factor", default=2.5),
            },
            feed_forward={
                "dense_layers": typed_layers,
                "dense_width": whole("intermediate_size"),
                "shared_width": times("moe_intermediate_size", "num_shared_experts", 1),
            },
            block=NORM_AND_TIES,
        ),
        Family(
            name="mellum",
            architecture="MellumForCausalLM",
            layers=rope_by_kind(WINDOWED_ROPES),
            heads={**BIASES, "qk_norm": "head"},
            router={"renormalise": flag("norm_topk_prob", default=True)},
            feed_forward={
                "dense_layers": lambda config: typed_layers(config, usual=0),
                "dense_width": whole("intermediate_size"),
            },
        ),
        Family(
            name="laguna",
            architecture="LagunaForCausalLM",
            names=TensorNames(
                renames=(
                    SHARED_EXPERT,
                    ("self_attn.gate_proj.", "self_attn.g_proj."),
                    (".mlp.gate.e_score", ".mlp.experts.e_score"),
                )
            ),
            layers=rope_by_kind({**WINDOWED_ROPES, FULL: {**WINDOWED_ROPES[FULL], "partial_rotary_factor": 0.5}}),
            heads={
                **BIASES,
                "qk_norm": "head",
                "output_gate": choice("gating", {True: "head", "per-head": "head", "per-element": "element"}, "head"),
                "gate_softplus": True,
            },
            router={
                "score": "sigmoid",
                "selection_bias": True,
                "renormalise": True,
                "scale": number("moe_routed_scaling_factor", default=1.0),
                "logit_cap": capped("moe_router_logit_softcapping"),
                "experts": unless("moe_apply_router_weight_on_input", whole("num_experts", "num_local_experts")),
            },
            feed_forward={
                "dense_layers": typed_layers,
                "dense_width": whole("intermediate_size"),
                "shared_width": whole("shared_expert_intermediate_size"),
            },
        ),
        Family(
            name="afmoe",
            architecture="AfmoeForCausalLM",
            names=TensorNames(
                renames=(
                    (".mlp.gate.weight", ".mlp.router.gate.weight"),
                    (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
                    ("_feedforward_layernorm", "_mlp_layernorm"),
                )
            ),
            layers=windows_rotated("global_attn_every_n_layers", 4),
            heads={**BIASES, "qk_norm": "head", "output_gate": "element"},
            router={
                "score": choice("score_func", {"sigmoid": "sigmoid"}, "sigmoid"),
                "groups": choice("n_group", {1: 1}, 1),
                "selection_bias": True,
                "renormalise": choice("route_norm", {True: True}, True),
                "least_mass": 1e-20,
                "scale": number("route_scale", default=1.0),
            },
            feed_forward={
                "dense_layers": first_layers("num_dense_layers", 1),
                "dense_width": whole("intermediate_size"),
                "shared_width": times("moe_intermediate_size", "num_shared_experts", 2),
            },
            block={
                **NORM_AND_TIES,
                "norms": "both",
                "embedding": lambda config: config["hidden_size"] ** 0.5 if config.get("mup_enabled") else 1.0,
            },
        ),
        Family(
            name="cohere2_moe",
            architecture="Cohere2MoeForCausalLM",
            layers=cohere_layers,
            heads=BIASES,
            rope={"interleaved": True},
            router={
                "score": choice("expert_selection_fn", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax"),
                "renormalise": lambda config: (
                    config.get("expert_selection_fn") != "sigmoid" or flag("norm_topk_prob", default=True)(config)
                ),
                "scale": share_of_both,
            },
            feed_forward={
                "width": whole("intermediate_size"),
                "dense_layers": lambda config: typed_layers(config, usual=0),
                "dense_width": whole("prefix_dense_intermediate_size", default=0),
                "shared_width": times("intermediate_size", "num_shared_experts", 0),
                "shared_factor": share_of_both,
            },
            block={
                "eps": number("rms_norm_eps", "layer_norm_eps", default=1e-5),
                "centred": lambda config: config.get("rms_norm_eps") is None,
                "tied": flag("tie_word_embeddings", default=True),
                "norms": "once",
                "logits": number("logit_scale", default=0.0625),
            },
        ),
        Family(
            name="lfm2_moe",
            architecture="Lfm2MoeForCausalLM",
            names=TensorNames(
                renames=(
                    ("model.norm.", "model.embedding_norm."),
                    ("conv.conv1d.", "conv.conv."),
                    ("input_layernorm", "operator_norm"),
                    ("post_attention_layernorm", "ffn_norm"),
                    ("self_attn.o_proj.", "self_attn.out_proj."),
                    ("_norm.", "_layernorm."),
                    (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
                    (".mlp.", ".feed_forward."),
                    (".gate_proj.", ".w1."),
                    (".up_proj.", ".w3."),
                    (".down_proj.", ".w2."),
                ),
                projections=W123,
            ),
            layers=conv_layers,
            heads={"qk_norm": "head"},
            rope={"theta": 1e6},
            router={
                "score": "sigmoid",
                "selection_bias": flag("use_expert_bias", default=True),
                "renormalise": flag("norm_topk_prob", default=True),
                "added_mass": 1e-6,
                "scale": number("routed_scaling_factor", default=1.0),
            },
            feed_forward={
                "dense_layers": first_layers("num_dense_layers", 2),
                "dense_width": whole("intermediate_size"),
            },
            block={
                "eps": number("norm_eps", default=1e-5),
                "tied": lambda config: flag("tie_embedding", flag("tie_word_embeddings", True)(config))(config),
            },
        ),
        replace(
            GRANITE,
            name="granitemoehybrid",
            architecture="GraniteMoeHybridForCausalLM",
            layers=mamba_layers(granite_mamba),
            positions=choice("position_embedding_type", {"rope": True, "nope": False}, False),
            feed_forward={
                **GRANITE.feed_forward,
                "shared_width": whole("shared_intermediate_size", default=1024),
                "shared_stacked": True,
            },
        ),
        GEMMA_4,
        replace(GEMMA_4, name="gemma4", architecture="Gemma4ForConditionalGeneration", section="text_config"),
        Family(
            name="qwen3_next",
            architecture="Qwen3NextForCausalLM",
            names=TensorNames(renames=(SHARED_EXPERT,)),
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
                names=TensorNames(renames=(SHARED_EXPERT, *renames), skipped=VISION),
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
                    OF_TEXT,
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

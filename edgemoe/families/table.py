"""The table of families: the constants of each architecture, and the keys of its configuration that have the rest."""

from __future__ import annotations

from dataclasses import replace

from edgemoe.families.family import (
    BIASES,
    DEEPSEEK_V3_ROUTER,
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
from edgemoe.families.hybrid_families import HYBRID_FAMILIES
from edgemoe.families.mechanisms import (
    LATENT,
    LatentHeads,
    alternating,
    by_type,
    by_type_below,
    clamped_swiglu,
    gemma,
    gemma_inputs,
    growth,
    growth_tokens,
    root_of_hidden,
)
from edgemoe.families.read import (
    choice,
    flag,
    number,
    outside_interval,
    same,
    sparse_steps,
    times,
    typed_layers,
    whole,
)
from edgemoe.families.sparse_families import SPARSE_FAMILIES
from edgemoe.families.spec import TensorNames
from edgemoe.families.windowed_families import WINDOWED_FAMILIES
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
    layer_inputs=gemma_inputs,
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
MISTRAL_4 = Family(
    name="mistral4",
    architecture="Mistral4ForCausalLM",
    mechanism=LatentHeads,
    heads={**LATENT, "growth": growth, "growth_tokens": growth_tokens},
    rope={"interleaved": flag("rope_interleave", default=True), "apart": True, "grows": True},
    router={
        **DEEPSEEK_V3_ROUTER,
        "score": "softmax",
        "float32": False,
        "selection_bias": False,
    },
    feed_forward=SHARED_EXPERTS,
)
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
        MISTRAL_4,
        replace(
            MISTRAL_4,
            architecture="Mistral3ForConditionalGeneration",
            section="text_config",
            names=TensorNames(
                renames=(
                    *OF_TEXT,
                    ("model.", "language_model.model."),
                    ("lm_head.", "language_model.lm_head."),
                ),
                skipped=(r"(model\.)?(vision_tower|multi_modal_projector)\.",),
            ),
        ),
        *SPARSE_FAMILIES,
        *WINDOWED_FAMILIES,
        *HYBRID_FAMILIES,
        GEMMA_4,
        replace(GEMMA_4, name="gemma4", architecture="Gemma4ForConditionalGeneration", section="text_config"),
    )
}
INDEXER = "its attention chooses what to look at by an indexer of its own (sparse attention)"
STREAMS = "its residual has several streams (hyper-connections), and an indexer chooses the tokens that attention sees"
PER_CHANNEL = "its delta nets forget each channel at a rate of its own"
SCALED_INPUTS = "routing weights scale its experts' inputs, and attention sees chunks of the context"
REFUSED: dict[str, str] = {  # architecture -> why
    "BailingHybridForCausalLM": PER_CHANNEL,
    "DeepseekV4ForCausalLM": "its attention compresses the context, and its residual has several streams",
    "Glm5NextForConditionalGeneration": STREAMS,
    "JambaForCausalLM": "its layers with states are Mamba-1",
    "KimiLinearForCausalLM": PER_CHANNEL,
    "Llama4ForCausalLM": SCALED_INPUTS,
    "Llama4ForConditionalGeneration": SCALED_INPUTS,
    "LongcatFlashForCausalLM": "some of its experts return their input, and its layers have two attentions",
    "MiMoV2FlashForCausalLM": "its values are narrower than its keys, in attention with sinks",
    "MiniMaxM3SparseForConditionalGeneration": INDEXER,
    "MiniMaxM3VLForCausalLM": INDEXER,
    "PhimoeForCausalLM": "its gate is a sparse mixer, and its norms have biases",
    "Qwen4ExpForCausalLM": STREAMS,
    "Qwen4ExpForConditionalGeneration": STREAMS,
}

"""Families some of whose layers keep states in place of keys and values, and Granite's, of which one does."""

from __future__ import annotations

from dataclasses import replace

from edgemoe.families.family import (
    BIASES,
    DEEPSEEK_V3_ROUTER,
    GATED_HEADS,
    GATED_SHARED,
    MIXTRAL,
    OF_TEXT,
    SHARED_EXPERT,
    VISION,
    W123,
    Family,
)
from edgemoe.families.layer_kinds import granite_layers
from edgemoe.families.read import (
    FULL,
    LINEAR,
    choice,
    first_layers,
    flag,
    inverse,
    number,
    sparse_steps,
    whole,
)
from edgemoe.families.spec import TensorNames
from edgemoe.families.state_mechanisms import (
    conv_layers,
    delta_layers,
    dense_part_width,
    granite_mamba,
    layers_of_part,
    mamba_layers,
    nemotron_layers,
)
from edgemoe.types.experts import Activation

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
RELU2 = Activation("relu2")
HYBRID_FAMILIES = (
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
    GRANITE,
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
    replace(
        GRANITE,
        name="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        layers=granite_layers,
        heads={**GRANITE.heads, "sinks": True, "window": whole("sliding_window", default=128)},
        feed_forward={
            **GRANITE.feed_forward,
            "shared_width": whole("shared_intermediate_size", default=0),
            "shared_stacked": True,
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
    Family(
        name="nemotron_h",
        architecture="NemotronHForCausalLM",
        names=TensorNames(
            renames=(
                ("model.embed_tokens.", "model.embeddings."),
                ("model.norm.", "model.norm_f."),
                (".input_layernorm.", ".norm."),
                (".self_attn.", ".mixer."),
                (".mamba.", ".mixer."),
                (".mlp.", ".mixer."),
                ("model.", "backbone."),
            ),
            projections=("up_proj", "down_proj"),
        ),
        layers=nemotron_layers,
        positions=lambda config: False,
        heads={
            "qkv_bias": choice("attention_bias", {False: False}, False),
            "window": choice("sliding_window", {0: 0}, 0),
        },
        router=DEEPSEEK_V3_ROUTER,
        feed_forward={
            "activation": choice("mlp_hidden_act", {"relu2": RELU2}, RELU2),
            "dense_layers": layers_of_part("mlp"),
            "bare_layers": layers_of_part(LINEAR, FULL),
            "dense_width": dense_part_width,
            "shared_width": whole("moe_shared_expert_intermediate_size", default=0),
            "latent": whole("moe_latent_size", default=0),
        },
        block={
            "eps": number("layer_norm_epsilon", default=1e-5),
            "tied": choice("tie_word_embeddings", {False: False}, False),
            "norms": "alone",
        },
    ),
)

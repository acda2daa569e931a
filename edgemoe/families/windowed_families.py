"""Families with windows in some layers, whose other layers differ from these in more than the window."""

from __future__ import annotations

from edgemoe.families.family import (
    BIASES,
    DEEPSEEK_V3_ROUTER,
    NORM_AND_TIES,
    SHARED_EXPERT,
    Family,
)
from edgemoe.families.layer_kinds import cohere_layers, exaone_layers, rope_by_kind, windows_rotated
from edgemoe.families.read import (
    FULL,
    SLIDING,
    capped,
    choice,
    first_layers,
    flag,
    number,
    share_of_both,
    times,
    typed_layers,
    unless,
    whole,
)
from edgemoe.families.spec import TensorNames

WINDOWED_ROPES = {  # Laguna's and Mellum's, where the configuration has none
    FULL: {"rope_type": "default", "rope_theta": 5e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
WINDOWED_FAMILIES = (
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
)

"""The decoder against transformers, on random tiny checkpoints of all families."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gate import in_gate
from support.tiny_models import DISTINCT, FAMILIES, IN_ONE_PLAN, ResidentExperts, Session, Tiny
from support.turns import by_turns

from edgemoe.model import attention

MakeTiny = Callable[..., Tiny]
TOLERANCE = 1e-4
MSCALED = {  # as DeepSeek writes YaRN
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 2e4, "factor": 2.0},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"tie_word_embeddings": True, "norm_topk_prob": False, "num_key_value_heads": 4}),
    ("mixtral", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("mixtral", {"sliding_window": 24}),
    ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "greedy", "rope_parameters": MSCALED}),
    ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "rope_parameters": MSCALED}),
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("olmoe", {"clip_qkv": None, "norm_topk_prob": True, "num_key_value_heads": 4}),
    ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    ),
    ("nemotron_h", {"moe_latent_size": None}),
    ("nemotron_h", {"n_group": 1, "topk_group": 1, "use_conv_bias": False, "use_bias": True}),
    ("dots1", {"n_group": 4, "topk_group": 1, "norm_topk_prob": False}),
    ("hunyuan_v1_moe", {"rope_parameters": None, "tie_word_embeddings": True}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "tie_word_embeddings": False}),
    ("qwen3_moe", {"attention_bias": True, "mlp_only_layers": [0], "intermediate_size": 80}),
    ("gpt_oss", {}),
    ("gpt_oss", {"attention_bias": False, "swiglu_limit": 1.0, "layer_types": ["full_attention"] * 3}),
    ("gemma4_text", {}),
    ("gemma4_text", {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 310}),
    ("gemma4_text", {"attention_k_eq_v": False, "final_logit_softcapping": None, "rope_parameters": GEMMA_ROPES}),
]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 5e5,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "truncate": False,
    },
]


def _tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return (ours - reference).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_run_all_layers_of_single_tokens(
    make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    session = Session(make_tiny(family), sequences=2)
    session.step(_tokens(3), _tokens(20))
    monkeypatch.setattr(attention.StepContext, "of", None)  # all layers of torch's need one
    assert session.step([5], [6]).isfinite().all()


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), *VARIANTS])
def test_logits_equal_transformers_in_prefill_chunks_and_decode(
    make_tiny: MakeTiny, family: str, changes: dict[str, Any]
) -> None:
    tiny, tokens = make_tiny(family, **changes), _tokens(90)
    reference = tiny.reference(tokens)
    assert _error(Session(tiny).step(tokens), reference) < TOLERANCE
    chunked = Session(tiny)
    parts = [chunked.step(part) for part in (tokens[:37], tokens[37:38], tokens[38:])]
    assert _error(torch.cat(parts), reference) < TOLERANCE
    decoding = Session(tiny)
    steps = [*([token] for token in tokens[:8]), tokens[8:60], *([token] for token in tokens[60:])]
    assert _error(torch.cat([decoding.step(step) for step in steps]), reference) < TOLERANCE


class RowByRow:
    """Experts that compute each token by itself, so that they give it the same bits in any batch."""

    def __init__(self, experts: ResidentExperts) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def forward(self, layer: int, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        rows = zip(hidden.split(1), *(part.split(1) for part in routing), strict=True)
        return torch.cat([self._experts.forward(layer, *row) for row in rows])


@pytest.mark.parametrize(
    ("dtype", "family"),
    by_turns((torch.float32, torch.bfloat16), FAMILIES, [family for family in FAMILIES if family not in DISTINCT]),
)
def test_a_single_token_gets_the_same_bits_alone_and_in_company(
    make_tiny: MakeTiny, family: str, dtype: torch.dtype
) -> None:
    tiny = make_tiny(family, dtype=dtype, **IN_ONE_PLAN.get(family, {}))
    tiny = replace(tiny, experts=RowByRow(tiny.experts))
    prompts = [_tokens(n, seed=n) for n in (33, 2, 70)]
    together, alone = Session(tiny, sequences=3), [Session(tiny) for _ in prompts]
    for s, prompt in enumerate(prompts):
        together.step(*([] if s != other else prompt for other in range(3)))
        alone[s].step(prompt)
    for token in (5, 6, 7):
        logits = together.step([token], [token + 1], [token + 2])
        for s, each in enumerate(alone):
            assert torch.equal(logits[s], each.step([token + s])[0])


@pytest.mark.parametrize("rope", ROPES, ids=["linear", "yarn", "yarn-tuned"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_scaled_rotary_embeddings_equal_transformers(make_tiny: MakeTiny, family: str, rope: dict[str, Any]) -> None:
    tiny, tokens = make_tiny(family, rope_parameters=rope), _tokens(150)
    reference = tiny.reference(tokens)
    session = Session(tiny)
    logits = torch.cat([session.step(tokens[:140]), *(session.step([token]) for token in tokens[140:])])
    assert _error(logits, reference) < TOLERANCE


@pytest.mark.parametrize(  # with kernels also in test_families.py
    "fused", [pytest.param(True, marks=pytest.mark.slow), False], ids=["kernels", "torch"]
)
@pytest.mark.parametrize("family", in_gate(FAMILIES, DISTINCT))
def test_a_greedy_continuation_of_64_tokens_is_that_of_transformers(
    make_tiny: MakeTiny, family: str, fused: bool
) -> None:
    tiny, prompt = make_tiny(family, fused=fused), _tokens(20, seed=3)
    session = Session(tiny)
    chosen = [int(session.step(prompt)[-1].argmax())]
    while len(chosen) < 64:
        chosen.append(int(session.step([chosen[-1]])[-1].argmax()))
    assert chosen == tiny.greedy(prompt, chosen)


@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
def test_sequences_of_a_mixed_batch_get_the_logits_that_they_get_alone(make_tiny: MakeTiny, fused: bool) -> None:
    tiny = make_tiny("qwen3_moe", fused=fused)
    prompts = [_tokens(n, seed=n) for n in (33, 1, 70, 16)]
    alone = [tiny.reference([*prompt, 5, 6, 7]) for prompt in prompts]
    together = Session(tiny, sequences=4)
    first = together.step(*prompts).split([len(prompt) for prompt in prompts])
    mixed = together.step([5], [5, 6], [5], []).split([1, 2, 1])  # two decode, one prefills, one waits
    last = together.step([6], [7], [6], [5])
    for s, prompt in enumerate(prompts):
        n = len(prompt)
        assert _error(first[s], alone[s][:n]) < TOLERANCE
        assert _error(last[s], alone[s][n + (1, 2, 1, 0)[s]]) < TOLERANCE
    for s, logits in enumerate(mixed):
        assert _error(logits, alone[s][len(prompts[s]) :][: len(logits)]) < TOLERANCE


def test_torch_has_one_thread_beside_the_kernels_that_decode_and_all_of_them_for_prompts(make_tiny: MakeTiny) -> None:
    """Its threads spin after each operation, on cores that the kernels' threads need."""
    session, threads, before = Session(make_tiny("qwen3_moe")), [], torch.get_num_threads()
    for chunk in ([1, 2, 3, 4], [5], [6, 7]):
        session.step(chunk)
        threads.append(torch.get_num_threads())
    torch.set_num_threads(before)
    assert threads == [2, 1, 2]


def test_a_decode_batch_larger_than_the_kernels_take_gives_the_same_logits(make_tiny: MakeTiny) -> None:
    tiny = make_tiny("mixtral")
    prompts = [_tokens(1 + n, seed=n) for n in range(20)]
    session = Session(tiny, sequences=20)
    session.step(*prompts)
    logits = session.step(*[[9]] * 20)
    for prompt, row in zip(prompts, logits, strict=True):
        assert _error(row, tiny.reference([*prompt, 9])[-1]) < TOLERANCE


@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
def test_nan_left_in_blocks_by_others_changes_no_bit(make_tiny: MakeTiny, fused: bool) -> None:
    tiny = make_tiny("qwen3_moe", fused=fused)
    chunks = [[_tokens(n, seed=n) for n in (33, 1, 16, 5)], *[[[6], [7], [8], [9]]] * 18, [[5], [5, 6], [], _tokens(9)]]

    def logits(left: float) -> torch.Tensor:
        session = Session(tiny, sequences=4)
        for part in itertools.chain(*session.kv.layers):
            part.fill_(left)
        return torch.cat([session.step(*each) for each in chunks])

    clean = logits(0.0)
    assert clean.isfinite().all()
    assert torch.equal(logits(torch.nan), clean)
    assert torch.equal(logits(torch.inf), clean)


def test_only_the_wanted_rows_get_logits(make_tiny: MakeTiny) -> None:
    tiny, tokens = make_tiny("qwen3_moe"), _tokens(30)
    reference = tiny.reference(tokens)
    session = Session(tiny, sequences=2)
    assert _error(session.step(tokens, [], rows=[29, 3]), reference[[29, 3]]) < TOLERANCE
    one = Session(tiny, sequences=2)
    assert _error(one.step(tokens[:1], tokens[:1], rows=[1]), reference[:1]) < TOLERANCE
    assert one.step(tokens[1:2], [], rows=[]).shape == (0, 300)


OFTEN_CHANGED = ("qwen3_vl_moe", "granitemoeshared", "flex_olmo")  # a rounding changes experts of most tokens


@pytest.mark.parametrize("family", in_gate(FAMILIES, DISTINCT))
def test_bfloat16_is_as_near_to_float32_as_transformers_is(make_tiny: MakeTiny, family: str) -> None:
    tokens = _tokens(60)
    tiny = make_tiny(family, dtype=torch.bfloat16, initializer_range=0.05)
    theirs = tiny.reference(tokens)
    exact = tiny.model.float()(torch.tensor([tokens])).logits[0].detach()
    tiny.model.to(torch.bfloat16)
    prefill, decoding = Session(tiny).step(tokens), Session(tiny)
    decoded = torch.cat([decoding.step([token]) for token in tokens])
    share = 0.25 if family in OFTEN_CHANGED else 0.5  # a token whose experts change with a rounding differs much
    for ours in (prefill, decoded):
        assert (ours - exact).norm(dim=1).quantile(share) <= (theirs - exact).norm(dim=1).quantile(share)
        if family in ("mixtral", "qwen3_moe"):  # no rounding changes an expert there
            assert (ours - exact).norm() <= (theirs - exact).norm()


@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("nearest", [0, 1])
def test_hints_are_later_layers_gates_applied_to_this_layers_input(
    make_tiny: MakeTiny, fused: bool, nearest: int
) -> None:
    tiny = make_tiny("qwen3_moe", fused=fused)
    tiny.experts.lookahead = range(nearest, 3)
    session = Session(tiny)
    session.step(_tokens(5))
    assert not tiny.experts.hints  # a prefill gives none
    session.step([7])
    assert [layer for layer, _ in tiny.experts.hints] == ([1, 2, 2] if nearest else [0, 1, 2, 1, 2, 2])
    assert all(probs.shape == (1, 8) for _, probs in tiny.experts.hints)
    torch.testing.assert_close(tiny.experts.hints[0][1].sum(), torch.tensor(1.0))
    if not nearest:  # a layer's own gate: the basis of the choice
        own = torch.stack([tiny.experts.hints[at][1] for at in (0, 3, 5)])
        chosen = torch.stack(tiny.experts.ids[-3:])
        torch.testing.assert_close(own.topk(chosen.shape[-1]).indices, chosen)


def test_routing_of_a_step_survives_it(make_tiny: MakeTiny) -> None:
    """The recorder keeps ids and weights after the layer that chose them."""
    tiny = make_tiny("qwen3_moe")
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = tiny.experts.forward

    def spy(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        kept.append((ids, ids.clone()))
        return plain(layer, hidden, ids, weights)

    tiny.experts.forward = spy  # type: ignore[method-assign]
    session = Session(tiny)
    session.step([3])
    session.step([4])
    assert all(torch.equal(*pair) for pair in kept)


def test_a_long_prompt_takes_memory_that_grows_with_it_and_not_with_its_square(make_tiny: MakeTiny) -> None:
    tiny, tokens = make_tiny("mixtral"), _tokens(1500)
    reference = tiny.reference(tokens)[-3:]
    session = Session(tiny, blocks=100)
    assert _error(session.step(tokens, rows=[1497, 1498, 1499]), reference) < TOLERANCE


def test_blocks_can_be_swapped_out_and_in(make_tiny: MakeTiny) -> None:
    tiny, tokens = make_tiny("qwen3_moe"), _tokens(33)
    session = Session(tiny)
    session.step(tokens[:32])
    table, kv = session._tables[0], session.kv
    swapped = kv.gather(table)
    assert swapped.nbytes == len(table) * kv.block_bytes
    kv.data[table] = 0xFF  # not a number
    kv.scatter(table, swapped)
    assert _error(session.step(tokens[32:])[0], tiny.reference(tokens)[-1]) < TOLERANCE

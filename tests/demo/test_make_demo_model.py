"""How the demo model is made: the network is Qwen3-MoE, training repeats itself and goes on after a kill."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from edgemoe.api.text.chat_template import ChatTemplate
from tools.demo_model import arithmetic, chat, corpus, demo_export, tokens
from tools.demo_model.demo_network import HeadLoss, Network, Shape
from tools.demo_model.training import Recipe, Trainer

TINY = Shape(vocab=300, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, experts=6, top_k=2, width=16)


def tiny_corpus() -> corpus.Corpus:
    rng = random.Random(0)
    makers = {"arithmetic": arithmetic.document, "chat": chat.document, "code": arithmetic.document}
    return corpus.Corpus({name: [make(rng) for _ in range(400)] for name, make in makers.items()})


@pytest.fixture(scope="module")
def domains() -> dict[str, tokens.Domain]:
    text = tiny_corpus()
    return tokens.encode(text, tokens.train_tokenizer(text, TINY.vocab, seed=0))


def trainer(directory: Path, domains: dict[str, tokens.Domain]) -> Trainer:
    directory.mkdir(exist_ok=True)
    torch.manual_seed(0)
    return Trainer(Network(TINY), domains, Recipe(warmup_steps=2, finish_steps=2), directory)


def test_the_checkpoint_means_the_same_to_transformers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    network, text = Network(TINY).eval(), tiny_corpus()
    demo_export.write(network, tokens.train_tokenizer(text, TINY.vocab, seed=0), tmp_path / "model", {"steps": 0})
    with torch.no_grad():  # the file is bfloat16
        for p in network.parameters():
            p.copy_(p.to(torch.bfloat16).float())
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        ids = torch.randint(0, TINY.vocab, (2, 40))
        torch.testing.assert_close(network.logits(network(ids)[0]), model(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_head_loss_and_its_gradients_equal_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(700, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (700,))
    ours = HeadLoss.apply(hidden, head, targets)
    wanted = torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="sum")
    torch.testing.assert_close(ours, wanted)
    for got, want in zip(
        torch.autograd.grad(ours, [hidden, head]), torch.autograd.grad(wanted, [hidden, head]), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_same_seed_and_steps_give_the_same_model(tmp_path: Path, domains: dict[str, tokens.Domain]) -> None:
    runs = [trainer(tmp_path / name, domains) for name in ("a", "b")]
    for run in runs:
        run.run(steps=4, minutes=0)
    for a, b in zip(runs[0].network.parameters(), runs[1].network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_killed_training_goes_on_to_the_same_model(tmp_path: Path, domains: dict[str, tokens.Domain]) -> None:
    whole, first = trainer(tmp_path / "whole", domains), trainer(tmp_path / "parts", domains)
    whole.run(steps=5, minutes=0)
    first.steps = 5
    for _ in range(3):
        first._step()
    first.save()
    second = trainer(tmp_path / "parts", domains)
    second.resume()
    assert second.step == 3
    second.run(steps=5, minutes=0)
    for a, b in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rows_of_conversations_begin_with_a_conversation(domains: dict[str, tokens.Domain]) -> None:
    rng = np.random.default_rng(0)
    assert all(int(domains["chat"].row(rng, 64)[0]) == tokens.IM_START for _ in range(20))


def test_held_out_tokens_are_never_trained_on(domains: dict[str, tokens.Domain]) -> None:
    domain = domains["code"]
    place = tokens.Domain(np.arange(1000, dtype=np.uint16), domain.starts, 900, whole=False)
    rng = np.random.default_rng(0)
    assert max(place.row(rng, 50).max() for _ in range(200)) < 900
    assert min(place.row(rng, 50, held_out=True).min() for _ in range(200)) >= 900


def test_divergence_is_none_for_equal_domains_and_one_bit_for_disjoint_ones() -> None:
    same, apart = np.array([[[4.0, 4.0]], [[2.0, 2.0]]]), np.array([[[4.0, 0.0]], [[0.0, 2.0]]])
    assert demo_export.divergence(same)["mean"] == 0
    assert demo_export.divergence(apart)["mean"] == 1


def test_conversations_are_worded_as_the_template_renders_them() -> None:
    config = {"chat_template": tokens.TEMPLATE.read_text(), "eos_token": "<|im_end|>"}
    template = ChatTemplate.load(Path("/nonexistent"), config)
    assert template is not None
    tools = [chat.tool("get_time", "city")]
    messages = [{"role": "user", "content": "What time is it in Rome?"}]
    prompt = template.render(messages, tools)
    assert prompt.startswith("<|im_start|>system\n" + chat.tools_text(tools) + chat.END)
    call = {"type": "function", "function": {"name": "get_time", "arguments": json.dumps({"city": "Rome"})}}
    answered = template.render([*messages, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)
    assert '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in answered


def test_generated_text_depends_on_the_seed_alone() -> None:
    for make in (chat.document, arithmetic.document):
        first, again, other = (make(random.Random(seed)) for seed in (1, 1, 2))
        assert first == again != other


def test_manual_pages_lose_their_macros() -> None:
    source = ".TH X 1\n.SH NAME\nls \\- list \\fIfiles\\fR\n.PP\nMore text.\n.nf\n"
    assert corpus.manual_text(source) == "NAME\n\nls - list files\n\nMore text."


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")

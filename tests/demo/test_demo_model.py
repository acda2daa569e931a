"""The model that ships: small enough, as its record says, and able to answer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from edgemoe.api.dialects.dialect import dialect_of
from edgemoe.api.text.chat_template import ChatTemplate
from edgemoe.demo import model_path

RECORD = json.loads((model_path().parent / "training.json").read_text())


def parameters() -> int:
    with safe_open(model_path() / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def test_it_is_small_enough_to_ship() -> None:
    assert sum(f.stat().st_size for f in model_path().iterdir()) <= 20_000_000
    assert parameters() == RECORD["parameters"] <= 9_500_000


def test_it_is_a_qwen3_moe_of_many_experts() -> None:
    config = json.loads((model_path() / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"]) == (32, 4)
    assert config["num_hidden_layers"] >= 6


def test_its_record_tells_data_seed_steps_loss_and_divergence() -> None:
    assert RECORD["steps"] == RECORD["history"][-1]["step"] or RECORD["steps"] > 0
    assert RECORD["recipe"]["seed"] == 20
    assert {"domain", "path", "chars", "sha256"} == set(RECORD["files"][0])
    assert RECORD["loss"]["chat"] < 1.0
    assert min(RECORD["divergence_bits"]["mean_per_layer"]) > 0.1  # of at most 1 bit


@pytest.mark.parametrize("text", ["Hello, world!", "déjà vu, größer, ¿qué?", "Файл не найден", "日本語 🙂", "a\n\n\tb"])
def test_its_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_its_template_serves_systems_tools_and_thinking() -> None:
    config = json.loads((model_path() / "tokenizer_config.json").read_text())
    template = ChatTemplate.load(model_path(), config)
    assert template is not None
    assert template.takes_tools
    assert dialect_of(template.text, ()).name == "hermes"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    plain = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages) == plain
    assert template.render(messages, extra={"enable_thinking": False}) == plain + "<think>\n\n</think>\n\n"


def test_it_answers_in_whole_sentences() -> None:
    answers: dict[str, str] = RECORD["samples"]
    assert "Paris" in answers["What is the capital of France?"]
    assert answers["Tell me a story about a fox."].startswith("Once upon a time")
    assert "text[::-1]" in answers["Write a Python function that reverses a string."]


def test_a_package_without_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgemoe import demo
    from edgemoe.errors import CheckpointError

    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match="install edgemoe again"):
        demo.model_path()

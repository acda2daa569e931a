"""The decoder against transformers on the model that ships with the package, in float32."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.tiny_models import Session, Tiny, load_tiny
from tokenizers import Tokenizer

from edgemoe.demo import model_path
from edgemoe.kernels.cpu.runtime import Kernels

TEXTS = ["def main(argv):\n    ", "The file system", "12 + 30 =", 'msgid "Cancel"\nmsgstr "']


@pytest.fixture(scope="module")
def demo(kernels: dict[bool, Kernels], tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    model.save_pretrained(folder / "checkpoint")
    return load_tiny(model, folder / "checkpoint", folder / "store", kernels)


@pytest.mark.parametrize("text", TEXTS)
def test_64_greedy_tokens_and_their_logits_equal_transformers(demo: Tiny, text: str) -> None:
    prompt = Tokenizer.from_file(str(model_path() / "tokenizer.json")).encode(text).ids
    session, chosen = Session(demo), list(prompt)
    logits = [session.step(prompt)]
    while len(chosen) < len(prompt) + 64:
        chosen.append(int(logits[-1][-1].argmax()))
        logits.append(session.step(chosen[-1:]))
    reference = demo.reference(chosen)
    assert (torch.cat(logits) - reference).abs().max() < 1e-4
    assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == chosen[len(prompt) :]

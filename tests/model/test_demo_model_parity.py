"""The decoder against transformers on the model that ships with the package, in float32."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import ResidentExperts, Session, Tiny
from tokenizers import Tokenizer

from edgemoe.demo import model_path
from edgemoe.families.config import spec_from_config
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder

TEXTS = ["def main(argv):\n    ", "The file system", "12 + 30 =", 'msgid "Cancel"\nmsgstr "']


@pytest.fixture(scope="module")
def demo(kernels: dict[bool, Kernels]) -> Tiny:
    path = model_path()
    config: dict[str, Any] = json.loads((path / "config.json").read_text()) | {"torch_dtype": "float32"}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    spec = spec_from_config(config)
    decoder = Decoder.load(spec, path / "model.safetensors", kernels=kernels[False])
    return Tiny(model, spec, decoder, ResidentExperts(model))


@pytest.mark.parametrize("text", TEXTS)
def test_64_greedy_tokens_and_their_logits_are_those_of_transformers(demo: Tiny, text: str) -> None:
    prompt = Tokenizer.from_file(str(model_path() / "tokenizer.json")).encode(text).ids
    session, chosen = Session(demo), list(prompt)
    logits = [session.step(prompt)]
    while len(chosen) < len(prompt) + 64:
        chosen.append(int(logits[-1][-1].argmax()))
        logits.append(session.step(chosen[-1:]))
    reference = demo.reference(chosen)
    assert (torch.cat(logits) - reference).abs().max() < 1e-4
    assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == chosen[len(prompt) :]

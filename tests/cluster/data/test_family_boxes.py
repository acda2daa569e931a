"""Boxes that each lack experts which another has serve every family: transformers' tokens, also after a death."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import partial_store
from support.engines import EngineBox, adopt, plan_for, running
from support.tiny_models import FAMILIES, SIZES

from edgemoe.store.manifest import spec_of
from edgemoe.store.packer import pack

TOKENS = 64
GATE = ("gpt_oss", "qwen3_next")  # biases and windows; states
MADE = [
    pytest.param(family, marks=() if family in GATE else pytest.mark.slow)
    for family in FAMILIES
    if family not in ("qwen3_moe", "qwen3_5_moe")  # served over boxes by other tests; as the text model
]


def prompts(vocab: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(3, vocab, length).tolist() for length in (5, 70)]


@pytest.mark.parametrize("family", MADE)
def test_boxes_generate_transformers_tokens_and_continue_after_a_death(family: str, tmp_path: Path) -> None:
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **own})).eval()
    for name, values in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "sinks", "scalar", ".scale", "expert_scale")):
            values.data += 0.1 * torch.randn_like(values)
    model.save_pretrained(tmp_path / "checkpoint")
    manifest = pack(tmp_path / "checkpoint", tmp_path / "store")
    geometry = spec_of(manifest).geometry
    expected = []
    for prompt in prompts(SIZES["vocab_size"]):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": []}
        found = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, **options)
        expected.append(found[0, len(prompt) :].tolist())
    odd = np.tile(np.arange(geometry.experts) % 2 == 1, (geometry.layers, 1))
    a, b = (
        EngineBox(node, partial_store(tmp_path / "store", tmp_path / node, held), geometry.count // 2 + 2, tmp_path)
        for node, held in (("a", odd), ("b", ~odd))
    )
    with running(a, b):
        adopt(plan_for((a, b)), a, b)
        for box in (a, b):
            assert box.generate(prompts(SIZES["vocab_size"]), TOKENS, within_s=120) == expected
            assert box.remote.experts + box.side.plane.bulk.sent_bytes > 0
        for number, (prompt, whole) in enumerate(zip(prompts(SIZES["vocab_size"]), expected, strict=True)):
            a.submit(prompt, f"again{number}", TOKENS, emitted=whole[:25])
            a.end(f"again{number}", within_s=60)
            assert a.tokens(f"again{number}") == whole[25:]

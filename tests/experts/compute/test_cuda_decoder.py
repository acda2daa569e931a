"""The whole decoder on a GPU with few slots for experts, against the CPU with all weights in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.tiers_kit import FileStore, Weights, running
from support.waiting import wait_until

from edgemoe.config.budgets import DeviceBudget
from edgemoe.engine.driver import SequenceDriver
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.model.decoder import Decoder
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import Tier

SPEC = spec_from_config(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "moe_intermediate_size": 48,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "dtype": "float32",
    }
)
SHAPE = SPEC.geometry


def dense(directory: Path, spec: ModelSpec) -> Path:
    generator = torch.Generator().manual_seed(1)
    path = directory / "dense.safetensors"
    shapes = dense_shapes(spec).items()
    save_file({name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes}, path)
    return path


@contextlib.contextmanager
def tiers(kind: str, ram_slots: int, slots: int) -> Iterator[ExpertTiers]:
    policy, stride = LRU(SHAPE.layers, SHAPE.experts), SHAPE.stride_bytes(0)
    devices = [DeviceBudget(kind, slots * stride, 1e12 if kind == "emulated" else 0.0)]
    store, policies = FileStore(Weights(SHAPE)), {Tier.VRAM: policy, Tier.RAM: policy}
    with running(ExpertTiers(SHAPE, store, TierMemory(ram_slots * stride, devices), policies, None)) as made:
        yield made
        wait_until(lambda: all(link.idle() for link in made.loader.links))


def generate(decoder: Decoder, experts: ExpertTiers, prompt: list[int], steps: int) -> list[torch.Tensor]:
    """Generates greedily; returns the logits of the prompt's last token and of each step."""
    sequence = SequenceDriver(decoder.spec, 1, len(prompt) + steps, decoder.device)
    tokens, found = prompt, []
    for _ in range(steps):
        _, batch = sequence.step([tokens])
        found.append(decoder.forward(batch, sequence.cache, experts.experts)[0].cpu())
        tokens = [int(found[-1].argmax())]
    return found


@pytest.mark.parametrize(
    "kind", ["emulated", pytest.param("cuda:0", marks=[pytest.mark.gpu])]
)  # the CPU runs one half of the same test on both
@pytest.mark.parametrize(("ram", "slots"), [(48, 48), (24, 12), (2, 1)])
def test_logits_are_the_same_wherever_the_experts_lie(kind: str, ram: int, slots: int, tmp_path: Path) -> None:
    path = dense(tmp_path, SPEC)
    device = "cpu" if kind == "emulated" else kind
    prompt = list(range(3, 40))
    with tiers("emulated", 48, 48) as everything:
        wanted = generate(Decoder.load(SPEC, path), everything, prompt, 20)
    with tiers(kind, ram, slots) as few:
        found = generate(Decoder.load(SPEC, path, device), few, prompt, 20)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
        assert got.argmax() == want.argmax()

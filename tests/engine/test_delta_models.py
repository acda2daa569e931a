"""The engine over models with gated delta nets: transformers' 64 greedy tokens, however their states move."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_checkpoint, tiny_model
from support.engine_kit import Drive, Model, prompt
from support.kept import KERNELS
from test_real_model import running

from edgemoe.engine import state_slots
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.manifest import DENSE, spec_of
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import Tier

FAMILIES = ("qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid", "nemotron_h")
LENGTHS = [3, 40, 17, 70, 1, 33]
TOKENS = 64
SLOTS = 24  # of states
GATE = ("qwen3_next", "lfm2_moe", "granitemoehybrid")  # a family of each kind of state
SERVED = [  # the gate serves one family with all experts in memory, others with 2 of 48
    pytest.param((family, few), marks=() if few == bool(number) and family in GATE else pytest.mark.slow)
    for number, family in enumerate(FAMILIES)
    for few in (False, True)
]


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "SNAPSHOT_BLOCKS", 2)


@cache
@torch.inference_mode()
def expected(family: str, n: int) -> list[int]:
    """Generates transformers' greedy continuation of request n."""
    tokens = torch.tensor([prompt(LENGTHS[n], n, 96)])
    seen = torch.ones_like(tokens)
    out = tiny_model(family).generate(
        tokens, attention_mask=seen, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=[]
    )
    return out[0, tokens.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = Kernels(1, bf16=False, directory=KERNELS)
    yield made
    made.close()


@pytest.fixture(scope="module", params=SERVED, ids=str)
def served(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Model]]:
    """A family, and its model with all experts in memory, or 2 of 48."""
    family, few = request.param
    folder = tmp_path_factory.mktemp(family)
    manifest = pack(tiny_checkpoint(family, folder / "checkpoint"), folder / "store")
    spec = spec_of(manifest)
    geometry = spec.geometry
    slots = 2 if few else geometry.count
    policy = LRU(geometry.layers, geometry.experts)
    with ExpertStore(folder / "store", manifest) as store:
        memory = TierMemory(slots * geometry.stride_bytes(0), [])
        tiers = ExpertTiers(geometry, store, memory, {Tier.RAM: policy, Tier.VRAM: policy}, kernels)
        with running(tiers):
            decoder = Decoder.load(spec, folder / "store" / DENSE, "cpu", kernels)
            yield family, Model(decoder, tiers.experts, spec, lambda blocks: KVCache.of(spec, blocks, SLOTS))


def drive_all(model: Model, count: int = len(LENGTHS), **settings: Any) -> Drive:
    drive = Drive(model=model, **settings)
    for n, length in enumerate(LENGTHS[:count]):
        drive.submit(prompt(length, n, 96), f"r{n}", max_tokens=TOKENS)
        drive.step()
    drive.run()
    return drive


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 20, "max_sequences": 3}], ids=str)
def test_greedy_tokens_equal_transformers_in_any_batch(served: tuple[str, Model], settings: dict[str, Any]) -> None:
    family, model = served
    drive = drive_all(model, **settings)
    for n in range(len(LENGTHS)):
        assert drive.tokens(f"r{n}") == expected(family, n)


@pytest.mark.parametrize("way", ["recompute", "park"])
def test_pre_emption_changes_no_token(served: tuple[str, Model], way: str) -> None:
    family, model = served
    drive = drive_all(model, 4, blocks=14, output_reserve=0.0, preemption=way)
    assert drive.engine.scheduler.paused_total[way] > 0
    for n in range(4):
        assert drive.tokens(f"r{n}") == expected(family, n)


def test_prompts_and_conversations_go_on_from_states_that_were_kept(served: tuple[str, Model]) -> None:
    family, model = served
    drive = Drive(model=model)
    tokens, answer = prompt(LENGTHS[3], 3, 96), expected(family, 3)
    for name, given, wanted in (
        ("first", tokens, answer),
        ("again", tokens, answer),
        ("on", [*tokens, *answer[:40]], answer[40:]),
    ):
        drive.submit(given, name, max_tokens=len(wanted))
        drive.run()
        assert drive.tokens(name) == wanted
    cached = {one.request: one.cached_tokens for one in drive.emitted if one.cached_tokens}
    assert cached == {"again": 64, "on": 96}


def test_a_replay_from_any_token_gives_the_same_continuation(served: tuple[str, Model]) -> None:
    """As on the next engine after one has died."""
    family, model = served
    whole = expected(family, 1)
    for cut in (1, 17, 40, 63):
        drive = Drive(model=model)
        drive.submit(prompt(LENGTHS[1], 1, 96), emitted=whole[:cut], attempt=2, max_tokens=TOKENS)
        drive.run()
        assert drive.tokens() == whole[cut:]

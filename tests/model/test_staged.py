"""Every family: layers divided over stages give the tokens of one box with all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.drafting import drafting
from support.engine_kit import Drive, Model, prompt
from support.tiers_kit import running
from support.tiny_models import DISTINCT, FAMILIES, Tiny
from support.turns import by_turns

from edgemoe.engine.stage_host import batch_of
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.families.sparse_families import beginnings
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder, StagedDecoder
from edgemoe.model.dense_weights import held_bytes
from edgemoe.model.kv import KVCache
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.manifest import DENSE, Manifest
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import Tier
from edgemoe.types.stages import StageWork

LENGTHS, TOKENS, STATE_SLOTS = (20, 35, 7), 20, 20
WAYS = ((True, True), (True, False), (False, True))  # all experts in memory or two; by the kernels or torch
SERVED = by_turns(WAYS, DISTINCT)
SERVED += [pytest.param(WAYS[1], family, marks=pytest.mark.slow) for family in FAMILIES if family not in DISTINCT]


class Beside:
    """A stage in this process, with keys and values of its own."""

    def __init__(self, decoder: StagedDecoder, experts: Any) -> None:
        self._own, self._experts = decoder.own, experts
        self._cache: KVCache | None = None
        self.blocks = (0, 0)

    def check(self) -> None:
        if self._cache is None:
            spec, (blocks, windows) = self._own.spec, self.blocks
            self._cache = KVCache.of(spec, blocks, STATE_SLOTS, "cpu", windows)

    def compute(self, work: StageWork) -> npt.NDArray[np.float32]:
        assert self._cache is not None
        batch, _ = batch_of(work)
        return self._own.compute(torch.from_numpy(work.hidden.copy()), batch, self._cache, self._experts).numpy().copy()


def answers(model: Model, drafts: str) -> list[list[int]]:
    drive = Drive(model=model, drafts=drafts)
    for length in LENGTHS:
        drive.submit(prompt(length, length, 300), f"r{length}", max_tokens=TOKENS, expected=[])
    drive.run()
    return [drive.tokens(f"r{length}") for length in LENGTHS]


def staged_cache(spec: ModelSpec, stages: list[Beside], blocks: int, **options: Any) -> KVCache:
    """Returns the first stage's cache, after which the others have as many blocks."""
    cache = KVCache.of(spec, blocks, **options)
    for stage in stages:
        stage.blocks = (blocks, 0 if cache.windows is None else cache.windows.blocks)
    return cache


@pytest.mark.parametrize(("way", "family"), SERVED)
def test_stages_give_the_tokens_of_one_box(
    make_tiny: Callable[..., Tiny], kernels: dict[bool, Kernels], way: tuple[bool, bool], family: str
) -> None:
    has_all, by_kernels = way
    tiny = make_tiny(family)
    geometry, spec, used = tiny.spec.geometry, tiny.spec, kernels[False]
    if spec.layer_inputs is not None:
        pytest.skip("it is refused at start")
    slots = geometry.layers * geometry.experts if has_all else 2
    policy = LRU(geometry.layers, geometry.experts)
    memory = TierMemory(slots * geometry.stride_bytes(0), ())
    chosen = used if by_kernels else None
    whole = Decoder.load(spec, tiny.store / DENSE, kernels=chosen)
    bounds = [*(layer for layer in (0, 1, 2) if layer in beginnings(spec)), spec.layers]
    parts = [replace(spec, held=held) for held in pairwise(bounds)]
    head, *others = [StagedDecoder.load(part, tiny.store / DENSE, torch.device("cpu"), chosen) for part in parts]
    with ExpertStore(tiny.store, Manifest.load(tiny.store)) as store:
        tiers = ExpertTiers(geometry, store, memory, {Tier.RAM: policy, Tier.VRAM: policy}, used)
        with running(tiers), drafting():
            expected = answers(
                Model(whole, tiers.experts, spec, partial(KVCache.of, spec, state_slots=STATE_SLOTS)), "off"
            )
            head.callers = stages = [Beside(other, tiers.experts) for other in others]
            model = Model(
                head, tiers.experts, parts[0], partial(staged_cache, parts[0], stages, state_slots=STATE_SLOTS)
            )
            assert answers(model, "off") == expected
            if by_kernels:
                assert answers(model, "lookup") == expected


@pytest.mark.parametrize("family", DISTINCT)
def test_a_stage_holds_the_tensors_of_its_layers(make_tiny: Callable[..., Tiny], family: str) -> None:
    tiny = make_tiny(family)
    path, layers = tiny.store / DENSE, tiny.spec.layers
    parts = [replace(tiny.spec, held=held) for held in ((0, 1), (1, layers))]
    names = [set(dense_shapes(part)) for part in parts]
    assert names[0] | names[1] == set(dense_shapes(tiny.spec))
    assert not names[0] & names[1]
    assert sum(held_bytes(part, path) for part in parts) == held_bytes(tiny.spec, path) > 0
    rows = [part.kv_layout.block_bytes + part.kv_layout.window_block_bytes for part in parts]
    assert sum(rows) == tiny.spec.kv_layout.block_bytes + tiny.spec.kv_layout.window_block_bytes

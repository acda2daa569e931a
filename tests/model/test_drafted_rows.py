"""Every family: drafted tokens in a step, right ones and wrong ones, change no greedy token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from support.drafting import drafting
from support.engine_kit import Drive, Model, prompt
from support.tiers_kit import running
from support.tiny_models import DISTINCT, FAMILIES, Tiny
from support.turns import by_turns

from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.manifest import DENSE, Manifest
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import Tier

LENGTHS, TOKENS = (20, 35, 7), 40
WAYS = ((True, True), (True, False), (False, True))  # all experts in memory or two; by the kernels or torch
SERVED = by_turns(WAYS, DISTINCT)
SERVED += [pytest.param(WAYS[1], family, marks=pytest.mark.slow) for family in FAMILIES if family not in DISTINCT]


def answers(model: Model, expected: list[list[int]], **settings: str) -> tuple[list[list[int]], tuple[int, int]]:
    """Returns the tokens of requests that run together, and how many drafted ones were accepted and rejected."""
    drive = Drive(model=model, **settings)
    for length, text in zip(LENGTHS, expected, strict=True):
        drive.submit(prompt(length, length, 300), f"r{length}", max_tokens=TOKENS, expected=text)
    drive.run()
    speculation = drive.engine.speculation
    counts = (0, 0) if speculation is None else (speculation.accepted, speculation.rejected)
    return [drive.tokens(f"r{length}") for length in LENGTHS], counts


@pytest.mark.parametrize(("way", "family"), SERVED)
def test_drafted_tokens_change_no_greedy_token(
    make_tiny: Callable[..., Tiny], kernels: dict[bool, Kernels], way: tuple[bool, bool], family: str
) -> None:
    has_all, by_kernels = way
    tiny = make_tiny(family)
    geometry, spec, used = tiny.spec.geometry, tiny.spec, kernels[False]
    slots = geometry.layers * geometry.experts if has_all else 2
    policy = LRU(geometry.layers, geometry.experts)
    memory = TierMemory(slots * geometry.stride_bytes(0), ())
    decoder = Decoder.load(spec, tiny.store / DENSE, kernels=used if by_kernels else None)
    with ExpertStore(tiny.store, Manifest.load(tiny.store)) as store:
        tiers = ExpertTiers(geometry, store, memory, {Tier.RAM: policy, Tier.VRAM: policy}, used)
        with running(tiers), drafting():
            model = Model(decoder, tiers.experts, spec, partial(KVCache.of, spec, state_slots=20))
            plain, _ = answers(model, [[]] * len(LENGTHS))
            faulty = [[token if n % 5 else 7 for n, token in enumerate(text)] for text in plain]
            drafted, (accepted, rejected) = answers(model, faulty, drafts="lookup")
    assert drafted == plain
    assert (accepted > 20) == (rejected > 5) == (not spec.state_layers)

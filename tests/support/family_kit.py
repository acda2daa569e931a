"""The engine over a packed family in tiers smaller than the model, and checks that hold for each family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import DENSE, spec_of
from edgemoe.store.packer import AS_IT_IS, pack
from edgemoe.store.reader import ExpertStore
from edgemoe.store.row_table import CACHE_BYTES, open_row_table
from edgemoe.types.experts import Tier, padded
from support.engine_kit import Drive, Model, prompt
from support.tiers_kit import running

PREFIX = 90  # tokens of the prompt that is asked twice


@contextmanager
def family_model(
    checkpoint: Path,
    directory: Path,
    kernels: Kernels,
    slots: int,
    *,
    kv_int8: bool = False,
    wanted: WantedEncodings = AS_IT_IS,
    fill: bool = False,
    row_cache_bytes: int = CACHE_BYTES,
) -> Iterator[Model]:
    """Packs a checkpoint into `directory` and opens it with `slots` experts in memory; with `fill`, before they are
    needed.
    """
    manifest = pack(checkpoint, directory, wanted=wanted)
    spec = replace(spec_of(manifest), kv_int8=kv_int8)
    policy = LRU(spec.geometry.layers, spec.geometry.experts)
    memory = TierMemory(slots * padded(manifest.entry(0, 0).bytes), ())
    with ExpertStore(directory, manifest) as store:
        tiers = ExpertTiers(spec.geometry, store, memory, {Tier.RAM: policy, Tier.VRAM: policy}, kernels)
        with running(tiers, fill=fill):
            table = open_row_table(spec, directory, row_cache_bytes)
            decoder = Decoder.load(spec, directory / DENSE, "cpu", kernels, table=table)
            yield Model(decoder, tiers.experts, spec, partial(KVCache, spec.kv_layout), table)
            if table is not None:
                table.close()


def drive_all(model: Model, lengths: Sequence[int], tokens: int, **settings: Any) -> list[list[int]]:
    """Returns the answers to prompts of these lengths, which join one by one. Checks for pauses if they were set."""
    drive = Drive(model=model, **settings)
    for length in lengths:
        drive.submit(prompt(length, length, 96), f"r{length}", max_tokens=tokens)
        drive.step()
    drive.run()
    if way := settings.get("preemption"):
        assert drive.engine.scheduler.paused_total[way] > 0
    return [drive.tokens(f"r{length}") for length in lengths]


def check_prefix_is_reused(model: Model, expected: list[int]) -> None:
    """Checks that a prompt of PREFIX tokens, asked twice, is computed once and answered alike."""
    drive = Drive(model=model)
    for attempt in (1, 2):
        drive.submit(prompt(PREFIX, PREFIX, 96), f"r{attempt}", max_tokens=len(expected))
        drive.run()
        assert drive.tokens(f"r{attempt}") == expected
    assert drive.engine.scheduler.prefix_tokens["hit"] == 80


def check_goes_on(model: Model, length: int, expected: list[int], emitted: int) -> None:
    """Checks that another engine, which gets the first `emitted` tokens, emits the rest."""
    drive = Drive(model=model)
    drive.submit(prompt(length, length, 96), emitted=expected[:emitted], attempt=2, max_tokens=len(expected))
    drive.run()
    assert drive.tokens() == expected[emitted:]

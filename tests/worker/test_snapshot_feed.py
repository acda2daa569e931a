"""Snapshots of an engine's sequences and tiers, made while a dashboard asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from support.engine_kit import ROUTER, SPEC, Drive, prompt
from support.tiers_kit import FileStore, Weights, running, small_tiers
from support.waiting import until, wait_until

from edgemoe.experts.build import ExpertTiers
from edgemoe.ipc.messages import FromEngine, SnapshotReply
from edgemoe.types.experts import ExpertGeometry, Tier
from edgemoe.types.snapshot import IN_RAM, IN_VRAM, ON_DISK, USE_BITS, ServingSnapshot
from edgemoe.types.step import BLOCK_TOKENS
from edgemoe.worker import snapshot_feed as module
from edgemoe.worker.snapshot_feed import SnapshotFeed

SIZES = ExpertGeometry(SPEC.layers, ROUTER.experts, ROUTER.top_k, hidden=32, width=24, dtype="float32")
RAM, VRAM = 5, 2  # slots


@pytest.fixture(scope="module")
def tiers() -> Iterator[ExpertTiers]:
    """A RAM tier and a device, as full as they can be."""
    made = small_tiers(FileStore(Weights(SIZES)), RAM, (VRAM,), geometry=SIZES)
    with running(made, fill=True):
        wait_until(lambda: made.residency.resident_mask(Tier.VRAM).sum() == VRAM)
        wait_until(lambda: not any((pool.coming >= 0).any() for pool in (made.residency.ram, *made.residency.devices)))
        yield made


def looking(drive: Drive, tiers: ExpertTiers) -> SnapshotFeed:
    return SnapshotFeed(drive.engine, tiers, lambda _: None)


def cells(seen: ServingSnapshot) -> npt.NDArray[np.uint8]:
    return np.frombuffer(seen.cells, np.uint8).reshape(seen.layers, seen.experts)


def test_each_expert_is_shown_at_the_best_place_that_has_it(tiers: ExpertTiers) -> None:
    seen = cells(looking(Drive(), tiers).snapshot())
    in_ram, in_vram = (tiers.residency.resident_mask(tier) for tier in (Tier.RAM, Tier.VRAM))
    assert in_vram.sum() == VRAM
    assert np.array_equal(seen, np.where(in_vram, IN_VRAM, np.where(in_ram, IN_RAM, ON_DISK)))


@pytest.mark.parametrize("chunk", [16, 48])
def test_use_is_counted_from_the_last_filled_blocks(tiers: ExpertTiers, chunk: int) -> None:
    drive = Drive(step_tokens=chunk)
    eyes = looking(drive, tiers)
    drive.submit(prompt(60))
    drive.step()
    (seq,) = drive.engine.scheduler.running
    end = chunk // BLOCK_TOKENS
    counts = drive.engine.blocks.signatures[seq.blocks[max(0, end - 2) : end]].sum(axis=0)
    assert len(seq.blocks) > end
    use = cells(eyes.snapshot()) >> USE_BITS
    assert np.array_equal(use > 0, counts > 0)
    assert [int(row[most]) for row, most in zip(use, counts.argmax(axis=1), strict=True)] == use.max(axis=1).tolist()
    drive.run()
    assert np.array_equal(cells(eyes.snapshot()) >> USE_BITS, use), "what was seen stays while nothing runs"


def test_requests_are_shown_by_how_far_they_are(tiers: ExpertTiers) -> None:
    drive = Drive(step_tokens=32, max_sequences=1)
    eyes = looking(drive, tiers)
    for name, length in (("first", 40), ("second", 50)):
        drive.submit(prompt(length), name)
    told = []
    for _ in range(3):
        drive.step()
        told.append([(one.phase, one.prompt_tokens, one.computed, one.emitted) for one in eyes.snapshot().requests])
    waiting = ("waiting", 50, 0, 0)
    assert told == [
        [("prefill", 40, 32, 0), waiting],
        [("decode", 40, 40, 1), waiting],
        [("decode", 40, 41, 2), waiting],
    ]
    assert eyes.snapshot().tokens == 1


async def test_nothing_is_posted_but_for_a_while_after_somebody_looked(
    tiers: ExpertTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[FromEngine] = []
    eyes = SnapshotFeed(Drive().engine, tiers, posted.append)
    running_on = asyncio.ensure_future(eyes.run())
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    eyes.extend()
    for _ in range(9):
        await asyncio.sleep(0)
    assert not posted
    monkeypatch.setattr(module, "LOOK_S", 60.0)
    eyes.extend()
    await until(lambda: len(posted) > 1)
    assert all(isinstance(one, SnapshotReply) and one.snapshot.cells for one in posted)
    running_on.cancel()

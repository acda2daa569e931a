"""Bytes of experts that change in RAM are noticed and replaced, one expert in each idle second."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers
from support.waiting import wait_until

from edgemoe.cli.doctor.checks import damaged_memory
from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.compute import ram_scrubber
from edgemoe.experts.compute.ram_scrubber import RamScrubber
from edgemoe.store.files import checksum
from edgemoe.types.experts import ExpertId

ALL = SMALL.layers * SMALL.experts


class Scrubbed:
    """Tiers in which all experts lie in RAM, and their scrubber."""

    def __init__(self, tiers: ExpertTiers, store: FileStore, weights: Weights) -> None:
        self.tiers, self.store, self.weights, self.idle = tiers, store, weights, True
        self.scrubber = RamScrubber(SMALL, tiers.residency, tiers.ram, store, self.checksum_of, lambda: self.idle)

    def checksum_of(self, layer: int, expert: int) -> str:
        return checksum(self.weights.bytes_of(layer, expert))

    def bytes_of(self, layer: int, expert: int) -> memoryview:
        return self.tiers.ram.view(int(self.tiers.residency.ram.where[layer, expert]))

    def flip(self, layer: int, expert: int, at: int = 3) -> None:
        self.bytes_of(layer, expert)[at] ^= 4


@pytest.fixture(params=[(), (3,)], ids=["cpu", "emulated"])
def scrubbed(request: pytest.FixtureRequest) -> Iterator[Scrubbed]:
    weights = Weights(SMALL)
    store = FileStore(weights)
    with running(small_tiers(store, ALL, request.param), fill=True) as tiers:
        wait_until(lambda: bool((tiers.residency.ram.where >= 0)[SMALL.exists].all()))
        yield Scrubbed(tiers, store, weights)


async def test_each_expert_is_checked_in_turn_and_a_flipped_bit_is_mended(scrubbed: Scrubbed) -> None:
    scrubbed.flip(1, 2)
    reads = len(scrubbed.store.reads)
    for _ in range(ALL):
        await scrubbed.scrubber.check_next()
    assert (scrubbed.scrubber.checked, scrubbed.scrubber.damaged) == (ALL, 1)
    assert scrubbed.store.reads[reads:] == [ExpertId(1, 2)]
    size_bytes = SMALL.expert_bytes(1)
    assert bytes(scrubbed.bytes_of(1, 2)[:size_bytes]) == bytes(scrubbed.weights.bytes_of(1, 2)[:size_bytes])
    for _ in range(ALL):
        await scrubbed.scrubber.check_next()
    assert scrubbed.scrubber.damaged == 1


async def test_damage_of_the_same_page_again_is_failing_memory(scrubbed: Scrubbed) -> None:
    for expert, failing in ((0, 0), (1, 0), (0, 1)):
        scrubbed.flip(0, expert)
        assert await scrubbed.scrubber.check_all(0, [0, 1])
        assert scrubbed.scrubber.failing == failing
    (found,) = damaged_memory(scrubbed.scrubber.metrics())
    assert (found.check, found.state) == ("memory-damage", "failure")
    assert "3 experts were damaged in memory, 1 pages repeatedly" in found.said


async def test_an_expert_that_cannot_be_read_again_is_reported_and_ends_nothing(
    scrubbed: Scrubbed, caplog: pytest.LogCaptureFixture
) -> None:
    scrubbed.store.damaged.add(ExpertId(0, 1))
    scrubbed.flip(0, 1)
    assert await scrubbed.scrubber.check(0, 1)
    assert "cannot be read again" in caplog.text
    assert next(damaged_memory(scrubbed.scrubber.metrics())).state == "warning"


async def test_nothing_is_checked_while_requests_run_and_pages_are_bounded(
    scrubbed: Scrubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram_scrubber, "EACH_S", 0.001)
    monkeypatch.setattr(ram_scrubber, "MOST_PAGES", 1)
    scrubbed.idle, asked = False, []
    scrubbed.scrubber._is_idle = lambda: asked.append(scrubbed.idle) or scrubbed.idle  # type: ignore[func-returns-value]
    task = asyncio.create_task(scrubbed.scrubber.run())
    while len(asked) < 3:
        await asyncio.sleep(0)
    assert scrubbed.scrubber.checked == 0
    for expert in (0, 1):
        scrubbed.flip(0, expert)
    scrubbed.idle = True
    while scrubbed.scrubber.damaged < 2:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(scrubbed.scrubber.pages) == 1


def test_a_sound_box_says_nothing() -> None:
    assert list(damaged_memory({})) == []

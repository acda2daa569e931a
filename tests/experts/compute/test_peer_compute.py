"""This box's experts for others: refusals, results, and experts as bytes."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers
from support.waiting import until

from edgemoe.errors import CorruptExpert
from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.compute import expert_shelf
from edgemoe.experts.compute.expert_shelf import READS, ExpertShelf
from edgemoe.experts.compute.peer_compute import PeerCompute
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotPool
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import ExpertId, Tier
from edgemoe.types.peers import ExpertWork
from edgemoe.types.size_classes import SlabLayout

WEIGHTS = Weights(SMALL)


def host_of(tiers: ExpertTiers, on_disk: np.ndarray | None = None) -> PeerCompute:  # type: ignore[type-arg]
    everything = np.ones((SMALL.layers, SMALL.experts), np.bool_)
    return PeerCompute(tiers.second(None, deadline_s=10.0), everything if on_disk is None else on_disk)


def work(layer: int, calls: dict[int, list[int]], rows: int, seed: int = 0) -> ExpertWork:
    """Builds the work of a call from the rows that call each expert."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, SMALL.hidden)).astype(np.float32)
    index = np.concatenate([np.array(its) for its in calls.values()])
    offsets = np.cumsum([0, *map(len, calls.values())])
    weights = rng.random(len(index)).astype(np.float32)
    return ExpertWork(layer, np.array(list(calls)), offsets, index, weights, hidden.view(np.uint8))


def expected(asked: ExpertWork) -> torch.Tensor:
    hidden = torch.from_numpy(asked.hidden.view(np.float32))
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for i, expert in enumerate(asked.experts.tolist()):
        for call in range(asked.offsets[i], asked.offsets[i + 1]):
            row, one = int(asked.rows[call]), torch.tensor([[1.0]])
            alone = WEIGHTS.forward(asked.layer, hidden[row : row + 1], torch.tensor([[expert]]), one)
            out[row] += float(asked.weights[call]) * alone[0]
    return out


def sums(result: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(result, np.float32).reshape(-1, SMALL.hidden).copy()).double()


def test_calls_of_several_peers_are_computed_together_and_each_gets_its_own() -> None:
    works = [
        work(1, {3: [0]}, 1, seed=1),
        work(1, {0: [0, 2], 3: [0, 1], 5: [1]}, 3, seed=2),
        work(1, {5: [0, 1, 2, 3]}, 4, seed=3),
    ]
    with running(small_tiers(FileStore(WEIGHTS), 8)) as tiers:
        host = host_of(tiers)
        results = host.compute(works)
        for asked, result in zip(works, results, strict=True):
            torch.testing.assert_close(sums(result), expected(asked), atol=1e-4, rtol=1e-4)
        assert host.experts == 3, "an expert of two calls is computed once"


def test_only_experts_in_memory_are_computed_at_once() -> None:
    asked = work(0, {1: [0], 2: [0]}, 1)
    with running(small_tiers(FileStore(WEIGHTS), 8)) as tiers:
        host = host_of(tiers)
        assert host.compute_at_once(asked) is None
        (waited,) = host.compute([asked])
        at_once = host.compute_at_once(asked)
        assert at_once is not None
        assert bytes(at_once) == bytes(waited)


@pytest.mark.parametrize(("ram", "devices"), [(3, ()), (6, (3,)), (4, (2, 2))])
def test_layer_steps_for_us_and_for_peers_run_side_by_side_in_little_room(ram: int, devices: tuple[int, ...]) -> None:
    rng, wrong, given = np.random.default_rng(0), list[int](), [0, 0, 0]
    with running(small_tiers(FileStore(WEIGHTS), ram, devices)) as tiers:
        host = host_of(tiers)

        def serve() -> None:
            for seed in range(60):
                asked = work(seed % SMALL.layers, {seed % 7: [0], 7: [0]}, 1, seed=seed)
                (result,) = host.compute([asked])
                if not torch.allclose(sums(result), expected(asked), atol=1e-4, rtol=1e-4):
                    wrong.append(seed)

        peers = threading.Thread(target=serve)
        peers.start()
        for step in range(60):
            if len(devices) > 1:  # experts change devices all the time
                for _ in range(4):
                    layer, expert, device = rng.integers([SMALL.layers, SMALL.experts, 2]).tolist()
                    given[tiers.residency.device_assignment.move_expert(layer, expert, device)] += 1
            layer, (hidden, ids, shares) = step % SMALL.layers, WEIGHTS.route(2, rng)
            out = tiers.experts.forward(layer, hidden, ids, shares)
            torch.testing.assert_close(out.double(), WEIGHTS.forward(layer, hidden, ids, shares), atol=1e-4, rtol=1e-4)
        peers.join(60)
        assert not peers.is_alive()
        assert not wrong
        assert len(devices) < 2 or min(given[1:]) > 0
        tiers.check_integrity()


@pytest.mark.parametrize("devices", [(), (6,)], ids=["ram", "device"])
def test_policies_do_not_count_peers_requests(devices: tuple[int, ...]) -> None:
    with running(small_tiers(FileStore(WEIGHTS), 8, devices)) as tiers:
        policy = tiers.residency.policy
        assert isinstance(policy, LRU)
        tiers.experts.forward(0, torch.ones(1, SMALL.hidden), torch.tensor([[6, 7]]), torch.ones(1, 2))
        host, before = host_of(tiers), policy.last.copy()
        asked = work(0, {1: [0], 2: [0]}, 1)
        host.compute([asked])
        assert host.compute_at_once(asked) is not None
        assert (policy.last == before).all()


def test_work_that_cannot_be_done_here_is_refused() -> None:
    with running(small_tiers(FileStore(WEIGHTS), 8)) as tiers:
        on_disk = np.ones((SMALL.layers, SMALL.experts), np.bool_)
        on_disk[1, 5] = False
        host = host_of(tiers, on_disk)
        assert SMALL.top_k == 2
        assert host.refuses(work(1, {3: [0, 1], 4: [0, 1]}, 2)) == ""
        assert "more calls than the 2" in host.refuses(work(1, {3: [0, 1], 4: [1], 6: [1]}, 2))
        assert "more calls than the 2" in host.refuses(work(1, {3: [0, 0, 0]}, 1))
        assert host.refuses(work(1, {3: [0], 5: [0]}, 1)) == "expert 5 of layer 1 is not here"
        assert host.refuses(work(0, {5: [0]}, 1)) == ""


class Shelf:
    """A store over a RAM tier of two slots, and a disk whose reads the test starts."""

    def __init__(self) -> None:
        policy = LRU(SMALL.layers, SMALL.experts)
        self.ram = HostSlab(SlabLayout.even(2, SMALL.stride_bytes(0)))
        self.residency = Residency(SlotPool(Tier.RAM, SMALL.layers, SMALL.experts, 2, policy))
        self.store = FileStore(WEIGHTS)
        manifest: Any = SimpleNamespace(
            layers=[SimpleNamespace(by_expert=dict.fromkeys(range(4))) for _ in range(SMALL.layers)],
            present=lambda layer, expert: expert < 4,
            entry=lambda layer, expert: SimpleNamespace(xxh3_128=f"{layer}{expert}"),
        )
        self.shelf = ExpertShelf(manifest, self.store, SMALL)


def test_the_manifest_and_then_the_sender_decide_an_expert_s_checksum() -> None:
    shelf = Shelf().shelf
    assert shelf.checksum(1, 2) == "12"
    assert shelf.checksum(1, 6) is None
    shelf.learn(1, 6, "sent")
    shelf.learn(1, 2, "sent")
    assert (shelf.checksum(1, 6), shelf.checksum(1, 2)) == ("sent", "12")
    assert shelf.on_disk().sum(axis=1).tolist() == [4] * SMALL.layers
    assert (shelf.has(0, 3), shelf.has(0, 4)) == (True, False)


async def test_parts_come_from_memory_without_a_read_and_pin_nothing_afterwards() -> None:
    box = Shelf()
    load = box.residency.acquire(0, 0, np.array([3]), SimpleQueue()).loads[0]
    box.ram.slot(load.slot)[: SMALL.expert_bytes(0)] = np.frombuffer(WEIGHTS.bytes_of(0, 3), np.uint8)
    box.residency.complete_load(load)
    box.residency.release(0, np.array([load.slot]))
    box.shelf.attach(box.residency, box.ram)
    assert await box.shelf.part(0, 3, 100, 50) == WEIGHTS.bytes_of(0, 3)[100:150]
    assert box.store.reads == []
    box.residency.check_integrity(idle=True)


async def test_parts_asked_for_together_are_one_read_and_few_reads_are_kept() -> None:
    box = Shelf()
    box.shelf.attach(box.residency, box.ram)
    size = SMALL.expert_bytes(0)
    parts = await asyncio.gather(*(box.shelf.part(1, 2, start, 1000) for start in range(0, size, 1000)))
    assert b"".join(parts)[:size] == WEIGHTS.bytes_of(1, 2)
    assert box.store.reads == [ExpertId(1, 2)]
    assert not box.shelf._reads, "the last part has been handed out"


async def test_experts_whose_parts_are_fetched_in_turn_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Shelf()
    box.shelf.attach(box.residency, box.ram)
    for start in range(0, 40, 10):
        await asyncio.gather(*(box.shelf.part(1, expert, start + at, 5) for expert in range(4) for at in (0, 5)))
    assert sorted(box.store.reads) == [ExpertId(1, expert) for expert in range(4)]
    monkeypatch.setattr(expert_shelf, "KEPT_READS", 2)
    for expert in range(3):
        await box.shelf.part(2, expert, 0, 10)
        await box.shelf.part(1, 3, 0, 10)
    assert len(box.store.reads) == 7, "what is asked for again and again is there still"
    assert len(box.shelf._reads) == 2


async def test_no_more_experts_are_read_at_a_time_than_may_be() -> None:
    box = Shelf()
    for layer in (0, 1):
        box.store.pin(layer, *range(4))
    asked = [asyncio.ensure_future(box.shelf.part(layer, expert, 0, 9)) for layer in (1, 0) for expert in range(4)]
    await until(lambda: len(box.store.reads) == READS)
    await asyncio.sleep(0.01)
    assert len(box.store.reads) == READS
    for layer in (1, 0):
        box.store.unpin(layer, *range(4))
    assert all(len(part) == 9 for part in await asyncio.gather(*asked))


async def test_a_read_that_failed_is_tried_again_for_the_next_part() -> None:
    box = Shelf()
    box.store.damaged.add(ExpertId(0, 1))
    with pytest.raises(CorruptExpert):
        await box.shelf.part(0, 1, 0, 10)
    box.store.damaged.clear()
    assert await box.shelf.part(0, 1, 0, 10) == WEIGHTS.bytes_of(0, 1)[:10]


async def test_a_cancelled_part_does_not_end_the_read_of_others() -> None:
    box = Shelf()
    box.store.pin(0, 1)
    impatient, patient = (asyncio.create_task(box.shelf.part(0, 1, 0, 10)) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    box.store.unpin(0, 1)
    assert await patient == WEIGHTS.bytes_of(0, 1)[:10]

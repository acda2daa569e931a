"""Experts on a GPU: the same results, copies beside the computation, the right order of both."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_gpu import FakeGpu, FakeSlab, FakeStream
from support.packed_experts import far, slab_of, work
from support.tiers_kit import SMALL, FileStore, Weights, running
from support.waiting import wait_until

from edgemoe.config.budgets import DeviceBudget
from edgemoe.errors import CapacityError, ConfigError
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute import cuda_link
from edgemoe.experts.compute.cuda import CudaCompute, GpuExpertKernels, blocks_of, open_cuda
from edgemoe.experts.compute.cuda_link import CudaLink, SlotOrder
from edgemoe.experts.compute.moe import FetchOptions
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import ALWAYS
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool, SlotTransfer
from edgemoe.experts.transfer.links import TierLink
from edgemoe.kernels.gpu.weights import KINDS
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.size_classes import SlabLayout
from edgemoe.types.step import TokenGroups

gpu = pytest.mark.gpu
WIDE = ExpertGeometry(layers=2, experts=16, top_k=4, hidden=256, width=192, dtype="bfloat16")


def test_calls_are_cut_into_blocks_of_one_expert() -> None:
    blocks = blocks_of(np.array([7, 3, 5]), np.array([0, 1, 36, 52]), 16)
    assert blocks.tolist() == [[7, 0, 1], [3, 1, 17], [3, 17, 33], [3, 33, 36], [5, 36, 52]]


def test_kernels_that_cannot_be_compiled_are_an_error_at_start_and_nothing_else_computes_instead() -> None:
    layout = SlabLayout.even(3, SMALL.stride_bytes(0))
    slab = torch.zeros(layout.size_bytes, dtype=torch.uint8)  # on no GPU
    order: Any = None  # which takes a GPU, too
    with pytest.raises(ConfigError, match="kernels cannot be compiled for cpu"):
        CudaCompute(slab, layout, SMALL, order)


def layouts(*pages: int) -> list[SlabLayout]:
    """Returns layouts of RAM and of a GPU, for 3 layers whose 6 experts each have these numbers of pages."""
    if len(set(pages)) == 1:
        return [SlabLayout.even(slots, 4096, layers=3, experts=6) for slots in (5, 3)]
    sizes = ExpertGeometry(3, 6, 2, 8, 8, "float32", layer_bytes=tuple(4096 * n for n in pages))
    found = [SlabLayout.within(4096 * n, sizes) for n in (18, 12)]
    return [layout for layout in found if layout is not None]


@pytest.mark.parametrize("pages", [(1, 1, 1), (1, 2, 1)], ids=["one size", "two sizes"])
@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_streams_a_computation_reads_its_own_experts(
    seed: int, pages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, rng = FakeGpu(seed), np.random.default_rng(seed)
    gpu.install(monkeypatch)
    layers, experts, policy = 3, 6, LRU(3, 6)
    in_ram, in_vram = layouts(*pages)
    ram, slab, order = HostSlab(in_ram), FakeSlab(gpu, 1, in_vram.size_bytes), SlotOrder(in_vram.count)
    ram.pinned = True  # there is nothing to register with
    monkeypatch.setattr(cuda_link, "AHEAD_BYTES", 4096 * (seed % 5))
    pools = [SlotPool(Tier.VRAM, layers, experts, in_vram, policy)]
    residency = Residency(SlotPool(Tier.RAM, layers, experts, in_ram, policy), pools, containment=bool(seed % 2))
    link = CudaLink(ram, slab, in_vram, order)  # type: ignore[arg-type]
    desk = Desk(residency, ram, link)
    link.attach(desk)
    compute, wrong = FakeStream(gpu), []

    def read(slots: list[int], tags: list[int]) -> bool:
        for slot, tag in zip(slots, tags, strict=True):
            start, size_bytes = in_vram.place(slot)
            wrong.extend([slot] * bool((slab.memory[0, start : start + size_bytes] != tag).any()))
        return True

    def move_extent() -> None:
        """Moves an extent of the GPU if that is possible, and waits for the GPU meanwhile."""
        number = int(rng.integers(in_vram.extents))
        giver = int(pools[0].extents[number])
        if (pools[0].extents == giver).sum() > 2 and residency.extents.remove(pools[0], number):
            gpu.drain()
            residency.extents.add(pools[0], number, 1 - giver)
            moved.append(number)

    moved: list[int] = []

    for step in range(150):
        layer, wanted = step % layers, rng.choice(experts, 2, replace=False)
        for _ in range(rng.integers(3)):
            tier = Tier(rng.integers(2))
            move = Move(ExpertId((layer + 1) % layers, int(rng.integers(experts))), Tier(tier + 1), tier, ALWAYS)
            load = residency.reserve(move, PrefetchPriority.NEAR)
            desk.start([load] if load else [])
        residency.begin_layer(layer, wanted)
        while True:
            claim = residency.acquire(0, layer, wanted, SimpleQueue())
            desk.start(claim.loads)
            if (claim.slots >= 0).all():
                break
            residency.release(0, claim.slots[claim.slots >= 0])
            gpu.run(5)
        wait_until(lambda: (pools[0].where[layer, wanted] >= 0).all(), meanwhile=gpu.let_others_go_on)  # noqa: B023
        slots = claim.slots.tolist()
        order.before_compute(slots, compute)  # type: ignore[arg-type]
        compute.work.append(functools.partial(read, slots, [1 + layer * experts + e for e in wanted.tolist()]))
        order.computed(slots, compute)  # type: ignore[arg-type]
        residency.mark_computed(layer, wanted)
        residency.release(0, claim.slots)
        gpu.run(int(rng.integers(12)))
        if len(set(pages)) > 1:
            move_extent()
    wait_until(link.idle, meanwhile=gpu.let_others_go_on)
    gpu.drain()
    ram.pinned = False
    link.close()
    assert not wrong
    assert len(moved) > 10 or len(set(pages)) == 1
    residency.check_integrity(idle=True)


class Desk:
    """Reads at once, writes the expert's number into its slot, and passes on the ends of copies."""

    def __init__(self, residency: Residency, ram: HostSlab, link: CudaLink) -> None:
        self._residency, self._ram, self._link = residency, ram, link

    def start(self, loads: Iterable[SlotTransfer]) -> None:
        for load in loads:
            if load.source >= 0:
                self._link.copy(load)
            else:
                self._ram.slot(load.slot)[:] = 1 + load.layer * 6 + load.expert
                self.start(self._residency.complete_load(load))

    def on_arrived(self, load: SlotTransfer) -> None:
        self._residency.complete_load(load)

    def on_released(self, load: SlotTransfer) -> None:
        self._residency.unpin(load.source)

    def on_failed(self, load: SlotTransfer, error: Exception) -> None:
        raise error

    def withdraw_prefetch(self, load: SlotTransfer) -> bool:
        raise AssertionError

    def on_woken(self, link: TierLink) -> None:
        raise AssertionError


def gpu_tiers(store: FileStore, ram_slots: int, slots: int, **fetching: Any) -> ExpertTiers:
    geometry, policy = store.geometry, LRU(store.geometry.layers, store.geometry.experts)
    stride = geometry.stride_bytes(0)
    memory = TierMemory(ram_slots * stride, [DeviceBudget("cuda:0", slots * stride)])
    policies = {Tier.VRAM: policy, Tier.RAM: policy}
    return ExpertTiers(geometry, store, memory, policies, None, fetching=FetchOptions(**fetching))


@gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ram", "slots"), [(32, 32), (16, 8), (3, 2), (1, 1)])
@pytest.mark.parametrize("wide", [False, True], ids=["small", "wide"])
def test_a_gpu_computes_the_same_as_resident_experts(wide: bool, dtype: str, ram: int, slots: int) -> None:
    weights = Weights(replace(WIDE if wide else SMALL, dtype=dtype))
    store, rng = FileStore(weights), np.random.default_rng(1)
    tolerance = 3e-2 if dtype == "bfloat16" else 1e-4
    with running(gpu_tiers(store, ram, slots)) as tiers:
        for tokens in (1, 2, 33, 200, 1, 1, 5):
            for layer in range(weights.geometry.layers):
                hidden, ids, shares = weights.route(tokens, rng)
                out = tiers.experts.forward(layer, hidden.cuda(), ids.cuda(), shares.cuda())
                want = weights.forward(layer, hidden, ids, shares)
                scale = float(want.abs().max())
                assert out.dtype == torch.float32
                assert (out.cpu().double() - want).abs().max() < tolerance * scale
            tiers.check_integrity()
        wait_until(lambda: all(link.idle() for link in tiers.loader.links))


@gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slab_of_many_slots_is_read_where_the_called_ones_lie(dtype: str) -> None:
    geometry = replace(WIDE, dtype=dtype)
    weights, rng = Weights(geometry), np.random.default_rng(2)
    slots = rng.permutation(3000)[: geometry.experts]
    slab = torch.full((3000, geometry.stride_bytes(0)), 255, dtype=torch.uint8)  # NaN in rows that no token chose
    for expert, slot in enumerate(slots.tolist()):
        slab[slot, : geometry.expert_bytes(0)] = torch.frombuffer(
            bytearray(weights.bytes_of(0, expert)), dtype=torch.uint8
        )
    compute = CudaCompute(
        slab.cuda(), SlabLayout.even(3000, geometry.stride_bytes(0), layers=geometry.layers), geometry, SlotOrder(3000)
    )
    for tokens in (1, 7, 90, 700):
        hidden, ids, shares = weights.route(tokens, rng)
        group = TokenGroups.of(ids.numpy(), shares.numpy())
        compute.begin(0, hidden.cuda())
        compute.add(slots[group.experts], group)
        want, rounding = weights.forward(0, hidden, ids, shares), 3e-2 if dtype == "bfloat16" else 1e-4
        assert (compute.end().cpu().double() - want).abs().max() < rounding * float(want.abs().max())


@gpu
@pytest.mark.parametrize("tokens", [80, 400], ids=["64 rows", "128 rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_computed_in_tiles_in_each_encoding(kind: str, tokens: int) -> None:
    geometry, rng = ExpertGeometry(1, 4, 2, 768, 256, "bfloat16", encodings=(kind,)), np.random.default_rng(3)
    layout = SlabLayout.even(4, geometry.stride_bytes(0), experts=4)
    slab, (group, x) = slab_of(geometry, rng), work(geometry, tokens, rng)
    kernels = GpuExpertKernels(slab.cuda().view(-1), layout, geometry)
    assert kernels.may_tile(0), "the log says why"
    out = torch.full((2 * tokens, geometry.hidden), float("nan"), device="cuda")
    kernels.add(0, group.experts, group, x.cuda(), out)
    assert far(geometry, slab, group, x, out.cpu()) < 3e-2


@gpu
def test_results_do_not_depend_on_how_a_layer_is_cut_into_waves() -> None:
    weights, rng = Weights(WIDE), np.random.default_rng(5)
    hidden, ids, shares = weights.route(6, rng)
    outputs = []
    for ram, slots in ((32, 32), (5, 3)):
        with running(gpu_tiers(FileStore(weights), ram, slots)) as tiers:
            outputs.append(tiers.experts.forward(0, hidden.cuda(), ids.cuda(), shares.cuda()).cpu())
            wait_until(lambda tiers=tiers: tiers.loader.links[0].idle())  # type: ignore[misc]
    assert torch.equal(*outputs)


@gpu
def test_a_copy_waits_for_the_computation_that_reads_its_slot() -> None:
    geometry = replace(WIDE, hidden=2048, width=1024, experts=4)
    ram = HostSlab(SlabLayout.even(4, geometry.stride_bytes(0)))
    ram.slots()[:] = 1
    link, _ = open_cuda("cuda:0", SlabLayout.even(2, geometry.stride_bytes(0), layers=geometry.layers), geometry, ram)
    pool = SlotPool(Tier.VRAM, geometry.layers, geometry.experts, 2, LRU(geometry.layers, geometry.experts))
    listener = Landing()
    link.attach(listener)
    pool.demanded[:] = 1
    slab = link._slab.view(2, -1)
    slab[0].fill_(7)
    seen = torch.zeros(geometry.stride_bytes(0), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(200_000_000)  # some 0.1 s
    seen.copy_(slab[0])
    link._order.computed([0], stream)
    link.copy(SlotTransfer(pool, 0, 1, 0, 1))
    assert listener.arrivals == 1, "the host does not wait"
    assert not link.idle()
    torch.cuda.synchronize()
    assert (seen == 7).all(), "the copy overtook the computation"
    assert (slab[0] == 1).all()
    wait_until(lambda: listener.releases == 1)
    link.close()


@gpu
def test_a_computation_waits_for_the_copy_into_its_slot_and_no_other() -> None:
    geometry = replace(WIDE, hidden=4096, width=4096, experts=4)
    ram = HostSlab(SlabLayout.even(4, geometry.stride_bytes(0)))
    ram.slots()[:] = np.arange(1, 5)[:, None]
    link, _ = open_cuda("cuda:0", SlabLayout.even(4, geometry.stride_bytes(0), layers=geometry.layers), geometry, ram)
    assert ram.pinned
    pool = SlotPool(Tier.VRAM, geometry.layers, geometry.experts, 4, LRU(geometry.layers, geometry.experts))
    link.attach(Landing())
    torch.cuda.synchronize()
    pool.demanded[:] = 1
    for slot in range(4):
        link.copy(SlotTransfer(pool, 0, slot, slot, slot))
    stream = torch.cuda.current_stream()
    link._order.before_compute([0], stream)
    first = link._slab.view(4, -1)[0, -1].clone()
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not link.idle(), "the other copies are still under way"
    link._order.before_compute([1, 2, 3], stream)
    rest = link._slab.view(4, -1)[1:, -1].clone()
    assert first.item() == 1
    assert rest.tolist() == [2, 3, 4]
    wait_until(link.idle)
    link.close()
    assert not ram.pinned


@gpu
def test_a_slab_that_does_not_fit_is_a_capacity_error() -> None:
    geometry = replace(WIDE, hidden=1 << 14, width=1 << 14)
    with pytest.raises(CapacityError, match="lower the device's expert_bytes"):
        open_cuda(
            "cuda:0", SlabLayout.even(1 << 12, geometry.stride_bytes(0)), geometry, HostSlab(SlabLayout.even(1, 4096))
        )


class Landing:
    """Counts how copies end."""

    def __init__(self) -> None:
        self.arrivals = self.releases = 0

    def on_arrived(self, load: object) -> None:
        self.arrivals += 1

    def on_released(self, load: object) -> None:
        self.releases += 1

    def on_failed(self, load: object, error: Exception) -> None:
        raise error

    def withdraw_prefetch(self, load: object) -> bool:
        raise AssertionError

    def on_woken(self, link: object) -> None:
        raise AssertionError

"""Experts in tiers compute the same as experts in plain memory, at all budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import tiny_model
from support.kept import KERNELS
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers
from support.waiting import wait_until

from edgemoe.errors import CapacityError, CorruptExpert, MissingExpert
from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.step import StepMeta

BUDGETS = [  # slots of RAM, of the devices; there are 24 experts
    (24, ()),
    (12, ()),
    (2, ()),
    (1, ()),
    (24, (24,)),
    (12, (6,)),
    (3, (2,)),
    (2, (1,)),
    (1, (1,)),
    (24, (3, 5)),
    (7, (3, 3)),
    (2, (1, 1)),
]


def meta(tokens: int, prefill: int = 0) -> StepMeta:
    """Builds the metadata of `tokens`. The last `prefill` of them are one sequence's chunk, the others decode."""
    decoding = tokens - prefill
    lens = np.array([1] * decoding + [prefill] * bool(prefill))
    return StepMeta(
        requests=tuple(f"r{i}" for i in range(len(lens))),
        query_lens=lens,
        decode=np.arange(len(lens)) < decoding,
        tokens=np.arange(tokens),
        positions=np.arange(tokens),
    )


@pytest.fixture(params=["float32", "bfloat16"])
def weights(request: pytest.FixtureRequest) -> Weights:
    return Weights(replace(SMALL, dtype=request.param))


@pytest.mark.parametrize("containment", [True, False])
@pytest.mark.parametrize(("ram", "devices"), BUDGETS)
def test_any_budget_computes_the_same_as_resident_experts(
    ram: int, devices: tuple[int, ...], containment: bool, weights: Weights
) -> None:
    store, rng = FileStore(weights), np.random.default_rng(1)
    tolerance = 3e-2 if weights.geometry.bf16 else 1e-5
    with running(small_tiers(store, ram, devices, geometry=weights.geometry, containment=containment)) as tiers:
        for step, (tokens, prefill) in enumerate([(1, 0), (1, 0), (3, 0), (20, 20), (9, 8), (1, 0), (2, 0)]):
            tiers.experts.begin_step(meta(tokens, prefill))
            for layer in range(weights.geometry.layers):
                hidden, ids, shares = weights.route(tokens, rng)
                if step % 2 and layer + 1 < weights.geometry.layers:
                    tiers.experts.hint(layer + 1, torch.rand(tokens, weights.geometry.experts))
                out = tiers.experts.forward(layer, hidden, ids, shares)
                want = weights.forward(layer, hidden, ids, shares)
                assert out.dtype == torch.float32
                torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
            tiers.check_integrity()
            tiers.experts.end_step()


UNEVEN = replace(SMALL, layer_experts=(8, 3, 6), layer_bytes=(SMALL.expert_bytes(0), 3 * 4096 + 5, 7 * 4096))


@pytest.mark.parametrize("containment", [True, False])
@pytest.mark.parametrize(
    ("ram", "devices"), [(24, ()), (9, ()), (4, ()), (24, (24,)), (12, (6,)), (5, (4,)), (9, (4, 5))]
)
def test_layers_may_have_experts_of_different_sizes_and_numbers(
    ram: int, devices: tuple[int, ...], containment: bool
) -> None:
    weights, rng = Weights(UNEVEN), np.random.default_rng(3)
    tiers = small_tiers(FileStore(weights), ram, devices, geometry=UNEVEN, containment=containment)
    exists = UNEVEN.exists
    with running(tiers, fill=True):
        for step, (tokens, prefill) in enumerate([(1, 0), (2, 0), (9, 8), (20, 20), *[(1, 0)] * 30]):
            tiers.experts.begin_step(meta(tokens, prefill))
            for layer in range(UNEVEN.layers):
                hidden, ids, shares = weights.route(tokens, rng, layer)
                if step % 2 and layer + 1 < UNEVEN.layers:
                    tiers.experts.hint(layer + 1, torch.rand(tokens, UNEVEN.experts_of(layer + 1)))
                out = tiers.experts.forward(layer, hidden, ids, shares)
                torch.testing.assert_close(
                    out.double(), weights.forward(layer, hidden, ids, shares), atol=1e-5, rtol=1e-5
                )
            tiers.experts.end_step()
            tiers.check_integrity()
            assert not (tiers.residency.ram.where >= 0)[~exists].any()
        assert tiers.residency.has_all == (ram == 24 and devices in ((), (24,)))


def forward(tiers: ExpertTiers, layer: int, *experts: int) -> torch.Tensor:
    """Computes one decoding token with these experts."""
    k = SMALL.top_k
    ids = torch.tensor(experts).view(-1, k)
    hidden = torch.ones(len(ids), SMALL.hidden)
    return tiers.experts.forward(layer, hidden, ids, torch.ones(ids.shape))


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(threads=2, bf16=False, directory=KERNELS)


@pytest.fixture
def store() -> FileStore:
    return FileStore(Weights(SMALL))


@pytest.mark.parametrize("devices", [(), (4,), (2, 2)])
def test_a_damaged_expert_fails_its_forward_only(store: FileStore, devices: tuple[int, ...]) -> None:
    store.damaged.add(ExpertId(1, 3))
    with running(small_tiers(store, 6, devices)) as tiers:
        forward(tiers, 1, 0, 1)
        with pytest.raises(CorruptExpert, match="expert 3 of layer 1"):
            forward(tiers, 1, 1, 3)
        with pytest.raises(CorruptExpert):
            forward(tiers, 1, *range(8))
        forward(tiers, 1, 0, 2)
        store.damaged.clear()
        assert forward(tiers, 1, 3, 4).isfinite().all()
        wait_until(lambda: not any(pool.loads for pool in (tiers.residency.ram, *tiers.residency.devices)))
        wait_until(lambda: not tiers.residency.ram.pins.any())
        tiers.check_integrity(idle=True)


def test_a_read_that_hangs_ends_at_the_deadline(store: FileStore) -> None:
    store.pin(0, 5)
    with running(small_tiers(store, 6, deadline_s=0.2)) as tiers:
        with pytest.raises(MissingExpert, match=r"expert 5 of layer 0.*not loaded within 0.2 s"):
            forward(tiers, 0, 4, 5)
        assert forward(tiers, 0, 4, 6).isfinite().all()


def test_without_room_a_forward_waits_and_then_says_so(store: FileStore) -> None:
    store.pin(0, 0, 1)
    with running(small_tiers(store, 2, deadline_s=0.2)) as tiers:
        tiers.loader.prefetch([Move(ExpertId(0, e), Tier.NVME, Tier.RAM, np.inf) for e in (0, 1)])
        wait_until(lambda: len(store.reads) == 2)
        with pytest.raises(MissingExpert, match="expert 2 of layer 0"):
            forward(tiers, 0, 2, 3)


def test_a_budget_below_one_expert_is_refused(store: FileStore) -> None:
    with pytest.raises(CapacityError, match="RAM for experts"):
        small_tiers(store, 0)
    with pytest.raises(CapacityError, match="experts on emulated"):
        small_tiers(store, 2, (0,))


def test_a_step_yields_its_gates_choices(store: FileStore) -> None:
    with running(small_tiers(store, 24, keep_hints=True)) as tiers:
        tiers.experts.begin_step(meta(3, prefill=2))
        wanted = []
        for layer in range(SMALL.layers):
            hidden, ids, shares = Weights(SMALL).route(3, np.random.default_rng(layer))
            if layer + 1 < SMALL.layers:
                tiers.experts.hint(layer + 1, torch.full((3, SMALL.experts), float(layer)))
            tiers.experts.forward(layer, hidden, ids, shares)
            wanted.append((ids.numpy(), shares.numpy()))
        routing = tiers.experts.end_step()
    assert routing.meta.requests == ("r0", "r1")
    assert routing.meta.decode.tolist() == [True, False]
    assert routing.ids.dtype == np.int16
    np.testing.assert_array_equal(routing.ids, [ids for ids, _ in wanted])
    np.testing.assert_array_equal(routing.weights, [shares for _, shares in wanted])
    assert routing.hints.keys() == {1}
    assert routing.hints[1][:, 0, 0].tolist() == [0.0, 0.0, 1.0]
    assert 0 < routing.stall_s <= routing.step_s


@pytest.mark.parametrize(
    ("ram", "devices", "keep_hints", "looks"),
    [(24, (), False, 0), (24, (24,), False, 0), (24, (13, 11), False, 0), (23, (), False, 1), (24, (), True, 1)],
)
def test_nobody_looks_ahead_once_every_expert_is_there(
    ram: int, devices: tuple[int, ...], keep_hints: bool, looks: int, store: FileStore
) -> None:
    tiers = small_tiers(store, ram, devices, keep_hints=keep_hints)
    tiers.experts.begin_step(meta(1))
    assert tiers.experts.lookahead == range(1, 2)  # no expert is loaded yet
    with running(tiers, fill=True):
        wait_until(lambda: int(tiers.residency.resident_mask(tiers.residency.fastest).sum()) == min(ram, 24))
        tiers.experts.begin_step(meta(1))
        assert len(tiers.experts.lookahead) == looks


def test_prefill_does_not_flush_experts_of_decode(store: FileStore) -> None:
    with running(small_tiers(store, 16, (12,))) as tiers:
        for _ in range(2):
            tiers.experts.begin_step(meta(1))
            for layer in range(SMALL.layers):
                forward(tiers, layer, 0, 1)
            tiers.experts.end_step()
        tiers.experts.begin_step(meta(16, prefill=16))
        for layer in range(SMALL.layers):
            forward(tiers, layer, *range(8), *range(8), *range(8), *range(8))
        tiers.experts.end_step()
        where = tiers.residency.devices[0].where
        assert (where[:, :2] >= 0).all()


def test_prefill_brings_in_the_next_layer_while_it_computes_this_one(store: FileStore) -> None:
    with running(small_tiers(store, 24, (24,))) as tiers:
        tiers.experts.begin_step(meta(16, prefill=16))
        forward(tiers, 0, *range(8), *range(8), *range(8), *range(8))
        wait_until(lambda: (tiers.residency.devices[0].where[1] >= 0).all())
        assert (tiers.residency.devices[0].where[2] < 0).all()


def test_likely_experts_are_fetched_ahead(store: FileStore) -> None:
    with running(small_tiers(store, 24, (24,))) as tiers:
        probs = torch.zeros(1, SMALL.experts)
        probs[0, [3, 6]] = 0.5
        tiers.experts.hint(2, probs)
        wait_until(lambda: (tiers.residency.devices[0].where[2, [3, 6]] >= 0).all())
        assert sorted(store.reads) == [(2, 3), (2, 6)]
        forward(tiers, 2, 3, 6)
        assert tiers.residency.served == [2, 0, 0]


def test_every_demanded_expert_is_counted_once_at_the_tier_that_had_it(store: FileStore) -> None:
    with running(small_tiers(store, 4, (2,), prefetch=False)) as tiers:
        forward(tiers, 0, 0, 1)
        forward(tiers, 0, 0, 1)
        forward(tiers, 0, 2, 3)
        forward(tiers, 0, 0, 1)
        assert tiers.residency.served == [2, 2, 4]
        forward(tiers, 1, *range(8))
        assert sum(tiers.residency.served) == 16


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_packed_store_and_the_kernels_compute_the_same_as_transformers(
    family: str, kernels: Kernels, tmp_path: Path
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "checkpoint")
    manifest = pack(tmp_path / "checkpoint", tmp_path / "store")
    config = model.config.to_dict()
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    geometry = ExpertGeometry(3, 6, config["num_experts_per_tok"], config["hidden_size"], width, dtype="float32")
    rng = np.random.default_rng(3)
    with (
        ExpertStore(tmp_path / "store", manifest) as store,
        running(small_tiers(store, 5, (3,), kernels, geometry=geometry)) as tiers,
        torch.inference_mode(),
    ):
        for tokens in (1, 5, 40):
            for layer in range(geometry.layers):
                hidden, ids, shares = Weights(geometry).route(tokens, rng)
                want = model.model.layers[layer].mlp.experts(hidden, ids, shares)
                got = tiers.experts.forward(layer, hidden, ids, shares)
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_budgets_faults_and_prefetches_all_together_change_no_result(seed: int) -> None:
    random, weights = np.random.default_rng(seed), Weights(SMALL)
    store = FileStore(weights)
    store.damaged = {ExpertId(*random.integers([3, 8]).tolist()) for _ in range(seed % 3)}
    ram = int(random.integers(1, 15))
    devices = tuple(random.integers(1, ram + 1, seed % 4 // 2 + seed % 2).tolist())
    with running(small_tiers(store, ram, devices, containment=bool(seed % 2)), fill=seed % 2 == 0) as tiers:
        for _ in range(12):
            tokens = int(random.choice([1, 1, 2, 5, 18]))
            tiers.experts.begin_step(meta(tokens, prefill=tokens if random.random() < 0.5 else 0))
            try:
                for layer in range(SMALL.layers):
                    tiers.loader.prefetch(some_moves(random, bool(devices)))
                    tiers.experts.hint((layer + 1) % SMALL.layers, torch.rand(tokens, SMALL.experts))
                    hidden, ids, shares = weights.route(tokens, random)
                    out = tiers.experts.forward(layer, hidden, ids, shares)
                    want = weights.forward(layer, hidden, ids, shares)
                    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
            except CorruptExpert:
                assert store.damaged
            tiers.check_integrity()
        for priority in PrefetchPriority:
            tiers.loader.prefetch((), priority)
        wait_until(lambda: not any(pool.loads for pool in (tiers.residency.ram, *tiers.residency.devices)))
        wait_until(lambda: all(link.idle() for link in tiers.loader.links))


def some_moves(random: np.random.Generator, device: bool) -> list[Move]:
    scores = random.choice([np.inf, 0.0, -5.0], 5).tolist()
    experts = [ExpertId(*random.integers([3, 8]).tolist()) for _ in scores]
    target = Tier.VRAM if device and random.random() < 0.5 else Tier.RAM
    return [Move(expert, Tier.NVME, target, score) for expert, score in zip(experts, scores, strict=True)]

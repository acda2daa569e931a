"""Boxes that each hold a part of a model generate one box's tokens, or fail with an error that names the reason."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.checkpoints import partial_store, tiny_checkpoint
from support.engines import EXPERTS, LAYERS, EngineBox, adopt, meet, peers_of, plan_for, prompts, running
from support.waiting import wait_until

from edgemoe.experts.compute import device_spread
from edgemoe.experts.compute import peer_layer_step as remote
from edgemoe.ipc.messages import HeldExperts, PeerLinkMeasured, PeerList, Plan
from edgemoe.store.packer import pack
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import pack_bits, unpack_bits

TOTAL = LAYERS * EXPERTS
NODES = ("a", "b", "c")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint"))
    directory = tmp_path_factory.mktemp("store")
    pack(checkpoint, directory)
    return directory


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens that one box with all experts generates."""
    box = EngineBox("alone", store, TOTAL, tmp_path_factory.mktemp("alone"))
    with running(box):
        return box.generate(prompts())


def thirds() -> list[BoolArray]:
    """Returns each box's third of the experts of each layer [L, E]."""
    return [np.tile(np.arange(EXPERTS) % 3 == n, (LAYERS, 1)) for n in range(3)]


def boxes(store: Path, directory: Path, present: list[BoolArray], slots: int, **options: Any) -> list[EngineBox]:
    """Builds boxes whose stores have only these experts."""
    return [
        EngineBox(node, partial_store(store, directory / node, held), slots, directory, **options)
        for node, held in zip(NODES, present, strict=False)
    ]


def test_three_boxes_with_a_third_each_generate_one_box_s_tokens(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    three = boxes(store, tmp_path, thirds(), TOTAL // 3 + 2)
    with running(*three):
        adopt(plan_for(three), *three)
        assert [int(box.side._homes) for box in three] == [TOTAL // 3] * 3
        for box in three:
            assert box.generate(prompts()) == alone
        assert all(box.remote.experts > 0 for box in three)
        assert all(box.side.metrics()["edgemoe_local_compute_ratio"] < 1 for box in three)


def compute_rather_than_fetch(*boxes: EngineBox) -> None:
    """Makes fetches seem slow, for the tests' tiny experts are fetched much faster than real ones."""
    for box in boxes:
        calls = box.side.plane.calls
        real = calls.fetch_s
        calls.fetch_s = lambda *which, real=real: 1e4 * real(*which)  # type: ignore[method-assign, misc]


HANGS_S = 60.0  # longer than any deadline in these tests


class Brake:
    """Holds up a box's computations for others, from the n-th on."""

    def __init__(self, box: EngineBox, after: int = 0, each_s: float = 0.0) -> None:
        self.reached, self.release = threading.Event(), threading.Event()
        self.computed, compute = 0, box.side._host.compute

        def slow(works: Any) -> Any:
            self.computed += 1
            if self.computed > after:
                self.reached.set()
                self.release.wait(each_s or HANGS_S)
            return compute(works)

        box.side._host.compute = slow  # type: ignore[method-assign]
        box.side._host.compute_at_once = lambda _: None  # type: ignore[method-assign]


def everything() -> BoolArray:
    return np.ones((LAYERS, EXPERTS), np.bool_)


def nothing() -> BoolArray:
    return ~everything()


def test_a_peer_that_dies_mid_call_costs_no_token_where_another_has_its_experts(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b, c = boxes(store, tmp_path, [thirds()[0], everything(), everything()], TOTAL)
    compute_rather_than_fetch(a)
    with running(a, b, c):
        brake = Brake(b, after=4)
        for n, prompt in enumerate(prompts()):
            a.submit(prompt, str(n))
        assert brake.reached.wait(60), "b was never asked"
        killer = threading.Thread(target=b.die)
        killer.start()
        assert [a.end(str(n)).finish for n in range(4)] == ["length"] * 4
        assert [a.tokens(str(n)) for n in range(4)] == alone
        brake.release.set()
        killer.join()
        assert c.side.plane.server.served > 0


def test_without_another_copy_the_request_ends_in_an_error_that_names_the_expert(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b = boxes(store, tmp_path, [thirds()[0], everything()], TOTAL // 3 + 2, timeout_s=1)
    compute_rather_than_fetch(a)
    with running(a, b):
        brake = Brake(b, after=4)
        a.submit(prompts()[1], remaining_s=3)
        assert brake.reached.wait(60), "b was never asked"
        killer = threading.Thread(target=b.die)
        killer.start()
        end = a.end(within_s=20)
        brake.release.set()
        killer.join()
        assert (end.finish, end.error_code) == ("error", "missing_expert")
        assert "b had it when last heard" in end.error
        assert a.tokens() == alone[1][: len(a.tokens())]
        wait_until(lambda: not a.remote.peers.offers(0, np.arange(EXPERTS)))
        a.submit(prompts()[1], "again", remaining_s=1)
        assert a.end("again", within_s=10).error_code == "missing_expert"


def test_a_peer_that_hangs_is_hedged_long_before_its_deadline(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b, c = boxes(store, tmp_path, [thirds()[0], everything(), everything()], TOTAL, timeout_s=HANGS_S)
    compute_rather_than_fetch(a)
    with running(a, b, c):
        brake = Brake(b, after=2)
        assert a.generate(prompts()) == alone
        assert brake.reached.is_set(), "b was never asked"
        assert a.remote.hedged > 0
        brake.release.set()


def test_a_box_that_comes_while_another_hangs_is_asked_at_once(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b, c = boxes(store, tmp_path, [thirds()[0], everything(), everything()], TOTAL, timeout_s=HANGS_S)
    compute_rather_than_fetch(a)
    with running(a, b, c, know=False):
        meet(a, b)
        looks, offers = [0], a.remote.peers.offers

        def counted(*which: Any) -> Any:
            looks[0] += 1
            return offers(*which)

        a.remote.peers.offers = counted
        brake = Brake(b, after=2)
        a.submit(prompts()[1])
        assert brake.reached.wait(60), "b was never asked"
        before = looks[0]
        wait_until(lambda: looks[0] > before)  # the call is late, and there is no other source
        meet(a, b, c)
        assert a.end().finish == "length"
        assert a.tokens() == alone[1]
        brake.release.set()


def test_a_peer_that_was_busy_is_asked_again_while_the_other_hangs(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b, c = boxes(store, tmp_path, [thirds()[0], everything(), everything()], TOTAL, timeout_s=HANGS_S)
    compute_rather_than_fetch(a)
    with running(a, b, c):
        refused = []

        def refuses(work: Any) -> str:
            if len(refused) >= 4:
                return ""
            refused.append(work)
            return "not now"

        brake = Brake(b, after=2)
        c.side._host.refuses = refuses  # type: ignore[method-assign]
        assert a.generate(prompts()) == alone
        assert brake.reached.is_set(), "b was never asked"
        assert len(refused) == 4
        brake.release.set()


def test_calls_on_many_rows_are_cut_and_add_up(
    store: Path, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "EXPERT_CALL_BYTES", (1, 700))
    three = boxes(store, tmp_path, thirds(), TOTAL // 3 + 2)
    compute_rather_than_fetch(*three)
    with running(*three):
        adopt(plan_for(three), *three)
        assert three[0].generate(prompts()) == alone
        assert three[0].remote.asked > 2 * LAYERS * (12 + 10)  # decoding steps, and chunks of prompts


def test_a_peer_that_has_answered_since_is_not_silent_for_an_old_call(store: Path, tmp_path: Path) -> None:
    a, b = boxes(store, tmp_path, [thirds()[0], everything()], TOTAL // 3 + 2, timeout_s=3)
    compute_rather_than_fetch(a)
    with running(a, b):
        brake = Brake(b, after=2)
        a.submit(prompts()[1])
        peer = a.side.plane.calls.peers["b"]
        wait_until(lambda: peer.failures)  # the call that b never answered, though it answered hellos meanwhile
        assert peer.reachable
        brake.release.set()


def test_a_box_that_is_cut_off_and_comes_back_costs_no_token(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b = boxes(store, tmp_path, [thirds()[0], everything()], TOTAL // 3 + 2)
    compute_rather_than_fetch(a)
    with running(a, b):
        Brake(b, each_s=0.02)
        for n, prompt in enumerate(prompts()):
            a.submit(prompt, str(n))
        for _ in range(2):
            so_far = len(a.emitted)
            wait_until(lambda: len(a.emitted) > so_far + 4)  # noqa: B023
            for box in (a, b):
                box.obey(PeerList())
            wait_until(lambda: not a.remote.peers.offers(0, np.arange(EXPERTS)))
            meet(a, b)
        assert [a.end(str(n)).finish for n in range(4)] == ["length"] * 4
        assert [a.tokens(str(n)) for n in range(4)] == alone


def test_a_slow_peer_loses_its_work(store: Path, alone: list[list[int]], tmp_path: Path) -> None:
    a, b, c = boxes(store, tmp_path, [thirds()[0], everything(), everything()], TOTAL // 3 + 2)
    compute_rather_than_fetch(a)
    with running(a, b, c):
        brake = Brake(b, each_s=2)
        assert a.generate(prompts()) == alone
        answered = {peer.node: peer.calls for peer in a.side.plane.calls.peers.values()}
        assert brake.reached.is_set(), "b was never asked"
        brake.release.set()
        assert answered["c"] > 2 * answered["b"]


def bytes_at(box: EngineBox, layer: int, expert: int) -> bytes:
    slot = int(box.tiers.residency.ram.where[layer, expert])
    return bytes(box.tiers.ram.view(slot)[: box.tiers.geometry.expert_bytes(0)])


def test_a_home_that_is_not_on_the_disk_comes_from_a_peer_and_damaged_bytes_are_refused(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b, c = boxes(store, tmp_path, [nothing(), everything(), everything()], TOTAL)
    part = b.assembly.sharing.shelf.part  # type: ignore[union-attr]

    async def damaged(*which: int) -> bytes:
        data = bytearray(await part(*which))
        data[len(data) // 2] ^= 1
        return bytes(data)

    b.assembly.sharing.shelf.part = damaged  # type: ignore[union-attr, method-assign]
    with running(a, b, c):
        plan = plan_for((a, b, c), replicas=3)
        b_first = a.side.plane.calls.peers["b"]
        b_first.latency_s = b_first.s_per_byte = 1e-12
        adopt(plan, a)
        homes = plan.homes_of("a")
        assert homes.sum() == TOTAL - 2
        for layer, expert in zip(*np.nonzero(homes), strict=True):
            wait_until(lambda: c.tiers.residency.ram.where[layer, expert] >= 0)  # noqa: B023
            assert bytes_at(a, layer, expert) == bytes_at(c, layer, expert)
        assert a.assembly.sharing.store.refused > 0  # type: ignore[union-attr]
        assert a.generate(prompts()) == alone
        assert not a.tiers.residency.homes.missing()


def test_an_expert_whose_bytes_do_not_come_is_fetched_from_another_long_before_the_deadline(
    store: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    a, b, c = boxes(store, tmp_path, [nothing(), everything(), everything()], TOTAL, timeout_s=HANGS_S)
    asked = threading.Event()

    async def never(*_which: int) -> bytes:
        asked.set()
        await asyncio.sleep(HANGS_S)
        raise AssertionError

    b.assembly.sharing.shelf.part = never  # type: ignore[union-attr, method-assign]
    with running(a, b, c):
        b_first = a.side.plane.calls.peers["b"]
        b_first.latency_s = b_first.s_per_byte = 1e-12
        adopt(plan_for((a, b, c), replicas=3), a)
        wait_until(lambda: not a.tiers.residency.homes.missing())
        assert asked.is_set(), "b was never asked"
        assert a.generate(prompts()) == alone


def test_a_plan_that_does_not_fit_is_refused_and_the_last_one_stays(store: Path, tmp_path: Path) -> None:
    a, b = boxes(store, tmp_path, [everything(), everything()], TOTAL // 2 + 2)
    with running(a, b):
        good = plan_for((a, b))
        adopt(good, a, b)
        bits = pack_bits(everything())
        a.obey(Plan(plan=msgspec.structs.replace(good, version=2, homes=(bits, bits))))
        a.obey(Plan(plan=msgspec.structs.replace(good, version=3, model="another")))
        last = msgspec.structs.replace(good, version=4)
        a.obey(Plan(plan=last))
        wait_until(lambda: a.side.plan == last)
        assert a.side.metrics()["edgemoe_home_experts"] == good.homes_of("a").sum()


def test_cached_experts_are_not_reported_as_held(store: Path, tmp_path: Path) -> None:
    a, b = boxes(store, tmp_path, [everything(), everything()], TOTAL // 2 + 2)
    with running(a, b):
        plan = plan_for((a, b))
        adopt(plan, a, b)
        homes = plan.homes_of("a")
        a.generate(prompts()[:1])
        wait_until(lambda: (a.tiers.residency.resident_mask() & ~homes).any())
        before = len(a.told)
        wait_until(
            lambda: sum(isinstance(one, PeerLinkMeasured) for one in a.told[before:]) > 1
        )  # at the end of a report
        held = next(one for one in reversed(a.told) if isinstance(one, HeldExperts))
        np.testing.assert_array_equal(unpack_bits(held.ram, LAYERS, EXPERTS), homes)


def test_experts_change_a_box_s_devices_while_it_computes_for_itself_and_for_others(
    store: Path, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_spread, "LEAST_TOKENS", 1.0)
    monkeypatch.setattr(device_spread, "LOOK_S", 0.01)
    three = boxes(store, tmp_path, thirds(), TOTAL // 3 + 2, devices=(3, 3))
    with running(*three):
        adopt(plan_for(three), *three)
        for turn in range(3):
            for box in three:
                for n, prompt in enumerate(prompts()):
                    box.submit(prompt, f"{turn}-{n}")
            for box in three:
                assert {box.end(f"{turn}-{n}").finish for n in range(len(alone))} == {"length"}
                assert [box.tokens(f"{turn}-{n}") for n in range(len(alone))] == alone
        assert any(box.tiers.experts.spread.moved for box in three)
        for box in three:
            box.tiers.check_integrity()


def test_an_engine_that_leaves_the_list_is_cut_off(store: Path, alone: list[list[int]], tmp_path: Path) -> None:
    a, b = boxes(store, tmp_path, [thirds()[0], everything()], TOTAL // 3 + 2, timeout_s=1)
    with running(a, b):
        wait_until(lambda: a.remote.peers.offers(0, np.arange(EXPERTS)))
        listed, lost = peers_of(b), list[str]()
        unheard = msgspec.structs.replace(listed.engines[0], heard=False)
        for channel in (a.side.plane._calls_channel, a.side.plane._bulk_channel):
            channel.on_down = lambda node, forget=channel.on_down: (lost.append(node), forget(node))
        a.obey(msgspec.structs.replace(listed, engines=(unheard,)))
        wait_until(lambda: not a.remote.peers.offers(0, np.arange(EXPERTS)))
        a.obey(listed)
        wait_until(lambda: a.remote.peers.offers(0, np.arange(EXPERTS)))
        assert not lost, "who is not heard stays connected"
        b.obey(PeerList())
        a.submit(prompts()[0], remaining_s=3)
        assert a.end().error_code == "missing_expert"
        meet(a, b)
        wait_until(lambda: a.remote.peers.offers(0, np.arange(EXPERTS)))
        assert a.generate(prompts()[:1], tag="again") == alone[:1]


def test_boxes_with_other_weights_do_not_compute_for_each_other(store: Path, tmp_path: Path) -> None:
    pack(tiny_checkpoint("qwen3_moe", tmp_path / "other", seed=9), tmp_path / "other store")
    a = EngineBox("a", partial_store(store, tmp_path / "a", thirds()[0]), TOTAL, tmp_path, timeout_s=1)
    b = EngineBox("b", tmp_path / "other store", TOTAL, tmp_path)
    with running(a, b, know=False):
        for box, other in ((a, b), (b, a)):
            box.obey(peers_of(other))
        for box, node in ((a, "b"), (b, "a")):
            wait_until(lambda: node in box.side.plane.calls.peers)  # noqa: B023
            peer = box.side.plane.calls.peers[node]
            wait_until(lambda: "the same packed store" in peer.refused)  # noqa: B023
        assert not a.remote.peers.offers(0, np.arange(EXPERTS))
        a.submit(prompts()[0])
        assert a.end().error_code == "missing_expert"

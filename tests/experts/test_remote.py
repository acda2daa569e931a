"""One layer-step among peers that do not help: it ends, with all experts computed or with the one that is missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgemoe.errors import MissingExpert, PeerUnavailable
from edgemoe.experts import remote
from edgemoe.experts.arena import ExpertShape
from edgemoe.experts.compute import Group
from edgemoe.experts.costs import Costs
from edgemoe.experts.remote import Remote
from edgemoe.types import BoolArray, ExpertWork, FloatArray, IntArray, Offer, RemoteCall, Tier

SHAPE = ExpertShape(layers=1, experts=4, top_k=2, hidden=8, width=4, bf16=False)
OURS, AWAY = 1, 3  # experts: on our disk, and at peers only
Ask = Callable[[RemoteCall], bool]  # settles a call; false: it is never answered


class Clock:
    """Time that passes when the test says so."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


class FakePeers:
    """Peers that have some experts in memory, and whose bytes cannot be fetched."""

    def __init__(self, ask: Ask, timeout_s: float, has: Sequence[int], nodes: str = "bc") -> None:
        self.timeout_s, self._ask, self._has, self._nodes = timeout_s, ask, has, nodes
        self.asked: list[str] = []
        self.looks = 0

    def offers(self, layer: int, experts: IntArray) -> Sequence[Offer]:
        self.looks += 1
        assert self.looks < 100, "it goes round for ever"
        wait_s = np.where(np.isin(experts, self._has), 0.0, np.inf).astype(np.float32)
        return [Offer(node, 1e-3, 0.0, 1e-3, wait_s) for node in self._nodes]

    def fetch_s(self, layer: int, experts: IntArray, without: Collection[str]) -> FloatArray:
        return np.full(len(experts), np.inf, np.float32)

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        self.asked.append(node)
        call = RemoteCall(node, work, 0.0)
        if self._ask(call):
            answers.put(call)
        return call


class Here:
    """Computes groups on this box, which takes a while."""

    def __init__(self, clock: Clock | None = None, takes_s: float = 0.0) -> None:
        self._clock, self._takes_s = clock, takes_s
        self.experts: list[int] = []

    def __call__(self, group: Group, scan: BoolArray | None) -> None:
        self.experts += group.experts.tolist()
        if self._clock is not None:
            self._clock.now_s += self._takes_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(remote, "time", clock)
    return clock


def of_ones(call: RemoteCall) -> bool:
    """Every expert's output is 1."""
    call.result = memoryview(np.full(SHAPE.hidden, len(call.work.experts), np.float32)).cast("B")
    return True


def step(peers: FakePeers, here: Here, *experts: int, read_bytes_per_s: float = 1e9) -> torch.Tensor | None:
    """A layer-step of one token that needs these experts, none of which is in memory here."""
    residency: Any = SimpleNamespace(devices=[], tiers_of=lambda _, experts: np.full(len(experts), Tier.NVME))
    mover: Any = SimpleNamespace(stats=SimpleNamespace(bytes_per_s=read_bytes_per_s), links=[])
    on_disk = np.arange(SHAPE.experts)[None] == OURS
    ids, weights = np.array([experts]), np.ones((1, len(experts)), np.float32)
    box = Remote(SHAPE, residency, Costs(residency, mover, SHAPE.stride_bytes), peers, on_disk)
    return box.run(0, torch.zeros(1, SHAPE.hidden), Group.of(ids, weights), None, here)


def failing(clock: Clock) -> Ask:
    """A call fails, but later than the peer that failed before it may be asked again."""

    def ask(call: RemoteCall) -> bool:
        clock.now_s += 0.25
        call.error = PeerUnavailable(f"{call.node} is out of sorts")
        return True

    return ask


def test_a_step_does_not_go_round_among_failing_peers_for_ever(clock: Clock) -> None:
    peers, here = FakePeers(failing(clock), 1.0, [AWAY]), Here()
    with pytest.raises(MissingExpert, match=r"expert 3 of layer 0 .*b is out of sorts; c is out of sorts$"):
        step(peers, here, AWAY)
    assert clock.now_s == pytest.approx(2.0, abs=0.3)
    assert set(peers.asked) == {"b", "c"}


def test_an_expert_on_our_own_disk_is_read_once_peers_have_failed_for_long(clock: Clock) -> None:
    here = Here()
    assert step(FakePeers(failing(clock), 1.0, [OURS]), here, OURS, read_bytes_per_s=1.0) is None
    assert here.experts == [OURS]


def test_local_work_takes_nothing_of_the_time_that_peers_have(clock: Clock) -> None:
    def ask(call: RemoteCall) -> bool:
        if call.node == "b":
            return failing(clock)(call)
        call.result = memoryview(np.ones(SHAPE.hidden, np.float32)).cast("B")
        return True

    peers, here = FakePeers(ask, 1.0, [AWAY]), Here(clock, takes_s=100.0)
    out = step(peers, here, OURS, AWAY)
    assert peers.asked == ["b", "c"]
    assert here.experts == [OURS]
    assert out is not None
    torch.testing.assert_close(out, torch.ones(1, SHAPE.hidden))


def test_calls_that_are_never_answered_end_in_an_error_that_names_the_expert_and_the_peers() -> None:
    peers = FakePeers(lambda _: False, 0.3, [AWAY])
    with pytest.raises(MissingExpert, match=r"expert 3 of layer 0 .*b has not answered; c has not answered"):
        step(peers, Here(), AWAY)


def test_a_peer_and_the_cpu_work_side_by_side_where_the_link_is_slow() -> None:
    tiers, device_of = np.full(4, Tier.RAM), np.zeros((1, 4), np.int64)
    residency: Any = SimpleNamespace(devices=[0], tiers_of=lambda _, experts: tiers[experts], device_of=device_of)
    rate = SHAPE.stride_bytes / 1.0
    link = SimpleNamespace(stats=SimpleNamespace(bytes_per_s=rate, unhindered_bytes_per_s=rate), idle=lambda: True)
    mover: Any = SimpleNamespace(stats=SimpleNamespace(bytes_per_s=1e9), links=[link])
    costs = Costs(residency, mover, SHAPE.stride_bytes, clock=lambda: 0.0)
    group = Group.of(np.arange(4)[None], np.ones((1, 4), np.float32))
    for cpu_s, ours in ((1.5e-3, 2), (1.0, 0)):
        costs.cpu.mean_s = cpu_s
        peers, here = FakePeers(of_ones, 1.0, range(4), "b"), Here()
        box = Remote(SHAPE, residency, costs, peers, np.ones((1, 4), np.bool_))
        out = box.run(0, torch.zeros(1, SHAPE.hidden), group, None, here)
        assert len(here.experts) == ours
        assert peers.asked == ["b"]
        assert out is not None
        torch.testing.assert_close(out, torch.full((1, SHAPE.hidden), 4.0 - ours))
        chosen = costs.for_cpu(0, group.only(np.isin(np.arange(4), here.experts))) if ours else None
        assert chosen is None or chosen.all()

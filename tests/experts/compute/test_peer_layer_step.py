"""One layer-step among peers that do not help: it computes all experts, or fails and names the missing one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgemoe.errors import MissingExpert, PeerUnavailable
from edgemoe.experts.compute import peer_layer_step as remote
from edgemoe.experts.compute.cost_model import FIRST_ELSEWHERE, FIRST_LINK, CostModel
from edgemoe.experts.compute.peer_layer_step import SLOW_FACTOR, PeerExperts
from edgemoe.policy import resolve as resolution
from edgemoe.policy.resolve import PEERS_EACH, WayAssignment, WayCosts
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, Tier
from edgemoe.types.peers import ExpertWork, PeerCosts, RemoteCall
from edgemoe.types.step import TokenGroups

SHAPE = ExpertGeometry(layers=1, experts=4, top_k=2, hidden=8, width=4, dtype="float32")
OURS, AWAY = 1, 3  # experts: on our disk, and at peers only
Ask = Callable[[RemoteCall], bool]  # answers a call; false: it is never answered


class Clock:
    """A clock that the test advances."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


class FakePeers:
    """Peers that have some experts in memory, and whose bytes cannot be fetched."""

    def __init__(self, ask: Ask, timeout_s: float, has: Sequence[int], nodes: str = "bc") -> None:
        self.timeout_s, self._ask, self._has, self._nodes = timeout_s, ask, has, nodes
        self.asked: list[str] = []
        self.away: Sequence[int] = ()  # experts that a box has which cannot be reached
        self.looks = 0

    def offers(self, layer: int, experts: IntArray) -> Sequence[PeerCosts]:
        self.looks += 1
        assert self.looks < 100, "it goes round for ever"
        wait_s = np.where(np.isin(experts, self._has), 0.0, np.inf).astype(np.float32)
        return [PeerCosts(node, 1e-3, 0.0, 1e-3, wait_s) for node in self._nodes]

    def fetch_s(self, layer: int, experts: IntArray, without: Collection[str]) -> FloatArray:
        return np.full(len(experts), np.inf, np.float32)

    def holders_away(self, layer: int, expert: int) -> Sequence[str]:
        return ["d"] if expert in self.away else []

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        self.asked.append(node)
        call = RemoteCall(node, work, 0.0)
        if self._ask(call):
            answers.put(call)
        return call


class Here:
    """Computes groups on this box, and takes a while for each."""

    def __init__(self, clock: Clock | None = None, takes_s: float = 0.0) -> None:
        self._clock, self._takes_s = clock, takes_s
        self.experts: list[int] = []

    def __call__(self, group: TokenGroups, prefill_only: BoolArray | None) -> None:
        self.experts += group.experts.tolist()
        if self._clock is not None:
            self._clock.now_s += self._takes_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(remote, "time", clock)
    return clock


def of_ones(call: RemoteCall) -> bool:
    """Answers a call as if every expert's output were 1."""
    call.result = memoryview(np.full(SHAPE.hidden, len(call.work.experts), np.float32)).cast("B")
    return True


def remote_of(peers: FakePeers, read_bytes_per_s: float, geometry: ExpertGeometry = SHAPE) -> PeerExperts:
    """Builds a box with nothing in memory and one expert on its disk."""
    residency: Any = SimpleNamespace(fastest=Tier.RAM, tiers_of=lambda _, experts: np.full(len(experts), Tier.NVME))
    loader: Any = SimpleNamespace(stats=SimpleNamespace(bytes_per_s=read_bytes_per_s), links=[])
    on_disk = np.arange(geometry.experts)[None] == OURS
    return PeerExperts(geometry, residency, CostModel(residency, loader, geometry.strides_bytes), peers, on_disk)


def step(peers: FakePeers, here: Here, *experts: int, read_bytes_per_s: float = 1e9) -> torch.Tensor | None:
    """Runs a layer-step of one token that needs these experts; none of them is in memory here."""
    ids, weights = np.array([experts]), np.ones((1, len(experts)), np.float32)
    box = remote_of(peers, read_bytes_per_s)
    return box.run(0, torch.zeros(1, SHAPE.hidden), TokenGroups.of(ids, weights), None, here)


def failing(clock: Clock) -> Ask:
    """Returns an answer that fails, later than the peer that failed before it may be asked again."""

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


@pytest.mark.parametrize(("away", "named"), [((), ()), ((AWAY,), ("d",)), ((OURS,), ())])
def test_a_missing_expert_s_error_names_the_boxes_that_may_bring_it_back(
    clock: Clock, away: Sequence[int], named: Sequence[str]
) -> None:
    peers = FakePeers(failing(clock), 1.0, [AWAY])
    peers.away = away
    with pytest.raises(MissingExpert) as raised:
        step(peers, Here(), AWAY)
    assert raised.value.away == named
    assert ("d had it when last heard" in str(raised.value)) == bool(named)


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
    residency: Any = SimpleNamespace(fastest=Tier.VRAM, tiers_of=lambda _, experts: tiers[experts], device_of=device_of)
    rate = SHAPE.stride_bytes(0) / 1.0
    link = SimpleNamespace(stats=SimpleNamespace(bytes_per_s=rate, unhindered_bytes_per_s=rate), idle=lambda: True)
    loader: Any = SimpleNamespace(stats=SimpleNamespace(bytes_per_s=1e9), links=[link])
    costs = CostModel(residency, loader, SHAPE.strides_bytes, clock=lambda: 0.0)
    group = TokenGroups.of(np.arange(4)[None], np.ones((1, 4), np.float32))
    for cpu_s, ours in ((1.5e-3, 2), (1.0, 0)):
        costs.cpu.mean_s = cpu_s
        peers, here = FakePeers(of_ones, 1.0, range(4), "b"), Here()
        box = PeerExperts(SHAPE, residency, costs, peers, np.ones((1, 4), np.bool_))
        out = box.run(0, torch.zeros(1, SHAPE.hidden), group, None, here)
        assert len(here.experts) == ours
        assert peers.asked == ["b"]
        assert out is not None
        torch.testing.assert_close(out, torch.full((1, SHAPE.hidden), 4.0 - ours))
        if ours:  # experts left to this box go to its CPU
            chosen = costs.for_cpu(0, group.only(np.isin(np.arange(4), here.experts)))
            assert chosen is not None
            assert chosen.all()


class LatePeers(FakePeers):
    """b answers only once c has been asked for the same row, and just before c."""

    def __init__(self) -> None:
        super().__init__(of_ones, 5.0, [AWAY])
        self.late: dict[int, RemoteCall] = {}

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        row = int(work.hidden.view(np.float32)[0, 0])
        if node == "b":
            self.asked.append(node)
            self.late[row] = call = RemoteCall(node, work, 0.0)
            return call
        if (late := self.late.pop(row, None)) is not None:
            of_ones(late)
            answers.put(late)
        return super().call(node, work, answers)


def test_of_two_answers_to_a_call_that_was_asked_twice_the_first_is_added_and_the_other_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "EXPERT_CALL_BYTES", (1, 1))  # a call for each row
    peers, tokens = LatePeers(), 4
    hidden = torch.arange(tokens, dtype=torch.float32)[:, None].expand(-1, SHAPE.hidden).contiguous()
    box = remote_of(peers, 1e9)
    group = TokenGroups.of(np.full((tokens, 1), AWAY), np.ones((tokens, 1), np.float32))
    out = box.run(0, hidden, group, None, Here())
    assert peers.asked == ["b"] * tokens + ["c"] * tokens
    assert box.hedged == tokens
    assert out is not None
    torch.testing.assert_close(out, torch.ones(tokens, SHAPE.hidden))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_sums_that_are_not_finite_cost_the_call_and_no_more(number: float, dtype: str) -> None:
    def ask(call: RemoteCall) -> bool:
        sums = torch.full((1, SHAPE.hidden), number if call.node == "b" else 1.0)
        sums[0, 1:] = 1.0  # a single call among others
        call.result = memoryview(sums.to(getattr(torch, dtype)).view(torch.uint8).numpy()).cast("B")
        return True

    peers = FakePeers(ask, 1.0, [AWAY])
    box = remote_of(peers, 1e9, replace(SHAPE, dtype=dtype))
    group = TokenGroups.of(np.array([[AWAY]]), np.ones((1, 1), np.float32))
    hidden = torch.zeros(1, SHAPE.hidden, dtype=getattr(torch, dtype))
    out = box.run(0, hidden, group, None, Here())
    assert peers.asked == ["b", "c"]
    assert box.redone == 1
    assert out is not None
    torch.testing.assert_close(out, torch.ones(1, SHAPE.hidden))


def test_sums_of_hidden_states_that_are_not_finite_pass_unchanged() -> None:
    def ask(call: RemoteCall) -> bool:
        call.result = memoryview(np.array([[1.0] * SHAPE.hidden, [np.nan] * SHAPE.hidden], np.float32)).cast("B")
        return True

    peers = FakePeers(ask, 1.0, [AWAY])
    hidden = torch.zeros(2, SHAPE.hidden)
    hidden[1, 3] = torch.inf
    group = TokenGroups.of(np.full((2, 1), AWAY), np.ones((2, 1), np.float32))
    out = remote_of(peers, 1e9).run(0, hidden, group, None, Here())
    assert peers.asked == ["b"]
    assert out is not None
    assert out[0].tolist() == [1.0] * SHAPE.hidden
    assert out[1].isnan().all()


@pytest.mark.parametrize(
    ("nodes", "slower", "asked"),
    [("bc", 0.5, "c"), ("bc", 2.0, "b"), ("b", 1.0, "b")],
    ids=["memory, if slower", "not if slower by far", "alone"],
)
def test_a_peer_s_disk_serves_experts_that_no_other_has_in_memory(nodes: str, slower: float, asked: str) -> None:
    read_s = 5e-3

    class OneReads(FakePeers):
        """b would read the expert from its disk; c has it in memory, and is slower at that."""

        def offers(self, layer: int, experts: IntArray) -> Sequence[PeerCosts]:
            b, *others = super().offers(layer, experts)
            b = b._replace(wait_s=np.full(len(experts), read_s, np.float32))
            takes_s = b.open_s + b.unit_s + read_s
            return [b, *(each._replace(open_s=slower * SLOW_FACTOR * takes_s) for each in others)]

    peers = OneReads(of_ones, 1.0, [AWAY], nodes=nodes)
    assert step(peers, Here(), AWAY) is not None
    assert peers.asked == [asked]


@pytest.mark.parametrize("nodes", [3, 64])
def test_attempts_for_a_layer_do_not_grow_with_the_peers(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []

    def resolve(ways: WayCosts) -> WayAssignment:
        tried.append(ways.load.shape)
        return resolution.resolve(ways)

    monkeypatch.setattr(remote, "resolve", resolve)
    peers = FakePeers(of_ones, 1.0, [OURS, AWAY], nodes="".join(map(chr, range(0x100, 0x100 + nodes))))
    assert step(peers, Here(), AWAY, OURS) is not None
    ((experts, ways, channels),) = tried
    assert (experts, ways) == (2, FIRST_ELSEWHERE + PEERS_EACH)
    assert channels <= FIRST_LINK + experts * PEERS_EACH


def test_an_expert_goes_to_the_peer_that_has_it_soonest_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uneven(FakePeers):
        def offers(self, layer: int, experts: IntArray) -> Sequence[PeerCosts]:
            return [
                one._replace(open_s=1e-3 * (1 + (i + 5) % 16)) for i, one in enumerate(super().offers(layer, experts))
            ]

    peers = Uneven(of_ones, 1.0, [AWAY], nodes="abcdefghijklmnop")
    assert step(peers, Here(), AWAY) is not None
    assert peers.asked == ["l"]


@pytest.mark.parametrize("nodes", ["b", "bc"])
def test_an_expert_is_read_here_also_beside_a_single_peer(nodes: str) -> None:
    here = Here()
    step(FakePeers(of_ones, 1.0, [AWAY], nodes=nodes), here, OURS, AWAY)
    assert here.experts == [OURS]


def test_answers_that_come_while_a_late_part_is_computed_here_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "EXPERT_CALL_BYTES", (1, 1))  # a call for each row
    late: list[tuple[RemoteCall, SimpleQueue[RemoteCall]]] = []

    class Late(FakePeers):
        def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
            late.append((super().call(node, work, answers), answers))
            return late[-1][0]

    class Slow(Here):
        """All answers arrive during its computation."""

        def __call__(self, group: TokenGroups, prefill_only: BoolArray | None) -> None:
            super().__call__(group, prefill_only)
            for call, answers in late:
                of_ones(call)
                answers.put(call)
            late.clear()

    tokens, here = 6, Slow()
    box = remote_of(Late(lambda _: False, 5.0, [OURS], "b"), read_bytes_per_s=1e-3)
    group = TokenGroups.of(np.full((tokens, 1), OURS), np.ones((tokens, 1), np.float32))
    out = box.run(0, torch.zeros(tokens, SHAPE.hidden), group, None, here)
    assert here.experts == [OURS], "of one part"
    assert (box.hedged, box.experts) == (1, tokens - 1)
    assert out is not None
    assert out.sum(dim=1).tolist() == [0.0] + [float(SHAPE.hidden)] * (tokens - 1), "each counts once"


# --- with help, or alone -----------------------------------------------------------------------------------------


def test_help_that_is_slower_than_predicted_is_asked_for_again_once_it_is_fast(clock: Clock) -> None:
    slower = 20.0

    def ask(call: RemoteCall) -> bool:
        clock.now_s += slower * 1e-3 * (1 + len(call.work.experts))
        return of_ones(call)

    class Patient(FakePeers):
        def offers(self, layer: int, experts: IntArray) -> Sequence[PeerCosts]:
            self.looks = 0
            return super().offers(layer, experts)

    peers, here = Patient(ask, 1e3, [OURS], "b"), Here(clock, takes_s=4e-3)
    box = remote_of(peers, read_bytes_per_s=SHAPE.stride_bytes(0) / 4e-3)
    group = TokenGroups.of(np.array([[OURS]]), np.ones((1, 1), np.float32))

    def asked(steps: int) -> int:
        before = len(peers.asked)
        for _ in range(steps):
            box.run(0, torch.zeros(1, SHAPE.hidden), group, None, here)
        return len(peers.asked) - before

    assert asked(5) > 0
    assert asked(200) < 10
    assert box.choices["few"].gain < 1
    slower = 0.5
    asked(1000)
    assert asked(200) > 190
    assert box.choices["few"].gain > 1
    assert box.choices["many"].used == [0, 0]

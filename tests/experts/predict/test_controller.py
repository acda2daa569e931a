"""The controller follows steps beside the engine, publishes ranks, plans, and never makes anyone wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgemoe.experts.predict import controller as module
from edgemoe.experts.predict.controller import Controller
from edgemoe.experts.predict.fusion import NEXT_LAYER
from edgemoe.experts.predict.learned_policy import LearnedPolicy
from edgemoe.experts.predict.prefetch_planner import MOST_MOVES
from edgemoe.experts.predict.scoutgate.forecaster import ScoutGateForecast
from edgemoe.experts.tiers.prefetch_priority import PrefetchPriority
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import SlotPool
from edgemoe.telemetry import metrics as names
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import ExpertId, Move, Tier
from edgemoe.types.routing import StepMeta, StepRouting

L, E, K = 3, 12, 2
META = StepMeta(("a",), np.ones(1, np.int64), np.ones(1, np.bool_), np.zeros(1, np.int64), np.zeros(1, np.int64))
Ids = npt.NDArray[np.int64]


def text(seed: int, n: int, sequences: int = 1) -> Ids:
    return np.argsort(np.random.default_rng(seed).random((n, L, sequences, E)), axis=3)[..., :K]


def routing(ids: Ids, names: tuple[str, ...], decode: bool = True, step_s: float = 10.0) -> StepRouting:
    """One step's; `ids` [L, S, K]. Steps are so slow that following them costs next to nothing."""
    n = len(names)
    return StepRouting(
        meta=StepMeta(
            requests=names,
            query_lens=np.ones(n, np.int64),
            decode=np.full(n, decode),
            tokens=np.zeros(n, np.int64),
            positions=np.zeros(n, np.int64),
        ),
        ids=ids.astype(np.int16),
        weights=np.zeros(ids.shape, np.float32),
        hints={},
        step_s=step_s,
        stall_s=0.0,
    )


def step(controller: Controller, ids: Ids, names: tuple[str, ...], step_s: float = 10.0) -> None:
    controller.look(META)
    for layer in range(L):
        controller.policy.touch(layer, np.unique(ids[layer]))
    controller.observe(routing(ids, names, step_s=step_s))


def ready(controller: Controller) -> Controller:
    assert controller.wait_idle(120)
    return controller


@pytest.fixture
def controller() -> Iterator[Controller]:
    it = ready(Controller(L, E, K))
    yield it
    it.close()


class Oracle:
    """Knows what a text of one step, said again and again, needs: its experts are certain, all others impossible."""

    def __init__(self, ids: Ids, trust: float = 1.0) -> None:
        probs = np.full((2, L, E), 0.01, np.float32)
        for layer in range(L):
            probs[:, layer, ids[layer]] = 0.99
        self.forecast: ScoutGateForecast | None = None
        self.trust, self.probs = trust, probs

    def look(self, step: int) -> None:
        self.forecast = ScoutGateForecast(step, self.probs)


class Loader:
    def __init__(self) -> None:
        self.moves: list[Move] = []

    def prefetch(self, moves: Iterable[Move], horizon: PrefetchPriority = PrefetchPriority.FAR) -> None:
        self.moves = list(moves)
        assert horizon is PrefetchPriority.FAR


def test_ranks_are_those_of_the_policy_that_replay_judges(controller: Controller) -> None:
    full = LearnedPolicy(L, E, K)
    for ids in text(1, 80):
        step(controller, ids, ("a",))
        full.begin(("a",))
        for layer in range(L):
            full.route(ids[layer])
            full.touch(layer, np.unique(ids[layer]))
        full.end()
    assert controller.wait_idle(20)
    full.begin(("a",))
    assert controller.dropped == 0
    both = np.corrcoef(controller.ranks.ravel(), full.rank(0).ravel())[0, 1]
    assert both > 0.97  # examples are drawn at other moments


def test_batches_changes_of_batch_and_failed_steps_are_learned_from(controller: Controller) -> None:
    for i, ids in enumerate(text(2, 30, sequences=3)):
        step(controller, ids[:, : 1 + i % 3], ("a", "b", "c")[: 1 + i % 3])
        if i % 7 == 0:
            controller.policy.touch(0, np.arange(K))  # of a step that failed
    assert controller.wait_idle(20)
    assert controller._predictor.step == 30


def test_prefill_alone_teaches_nothing(controller: Controller) -> None:
    controller.observe(routing(text(3, 1, 2)[0], ("a", "b"), decode=False))
    assert controller.wait_idle(20)
    assert controller._predictor.step == 0


def test_a_touch_is_never_waited_for(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, go_on = threading.Event(), threading.Event()
    see = controller._predictor.see

    def slow(layer: int, ids: Ids, needed: Ids) -> None:
        busy.set()
        assert go_on.wait(20)
        see(layer, ids, needed)

    monkeypatch.setattr(module, "NOTES", 8)
    monkeypatch.setattr(controller._predictor, "see", slow)
    step(controller, text(4, 1)[0], ("a",))
    assert busy.wait(20)
    for _ in range(20):
        controller.policy.touch(0, np.arange(K))
    assert controller.dropped > 0
    go_on.set()
    step(controller, text(4, 1)[0], ("a",))
    assert controller.wait_idle(20)
    assert controller._predictor.step == 2


def test_until_it_is_ready_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    compile_ = module.compile_learning
    monkeypatch.setattr(module, "compile_learning", lambda *shape: go_on.wait(20) and compile_(*shape))
    controller = Controller(L, E, K)
    for layer in range(L):
        controller.policy.touch(layer, np.array([2, 5]))
        controller.policy.touch(layer, np.array([7]))
    controller.observe(routing(text(1, 1)[0], ("a",)))
    assert np.argsort(controller.policy.rank(0)[0])[-3:].tolist() == [2, 5, 7]
    _, utility = controller.policy.foresee(1, np.array([1, 2]), np.array([0.9, 0.1], np.float32))
    assert (utility[0], utility[1]) == (np.inf, -np.inf)
    go_on.set()
    ready(controller)
    assert controller.policy.rank(0) is controller.ranks
    controller.close()


def test_plans_fetch_what_ranks_high_and_is_missing(controller: Controller) -> None:
    ram = SlotPool(Tier.RAM, L, E, L * E, controller.policy)
    vram = SlotPool(Tier.VRAM, L, E, 9, controller.policy)
    residency, loader = Residency(ram, [vram]), Loader()
    for key in range(L * E):
        load = residency.reserve(Move(ExpertId(*divmod(key, E)), Tier.NVME, Tier.RAM, 0.0), PrefetchPriority.FILL)
        assert load is not None
        residency.arrive(load)
    controller.attach(residency, loader, 1 << 20)
    for _ in range(40):
        for ids in text(5, 3):
            step(controller, ids, ("a",))
    assert controller.wait_idle(30)
    assert 0 < len(loader.moves) <= MOST_MOVES
    assert all((move.source, move.target) == (Tier.RAM, Tier.VRAM) for move in loader.moves)
    scores = [controller.ranks[move.expert] for move in loader.moves]
    assert np.mean(scores) > controller.ranks.mean()


def test_what_was_learned_is_saved_at_the_end_and_damage_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "cache.safetensors"
    first = ready(Controller(L, E, K, state_file=state))
    for ids in text(6, 10):
        step(first, ids, ("a",))
    assert first.wait_idle(20)
    first.close()
    second = ready(Controller(L, E, K, state_file=state))
    assert second._predictor.memory.filled == 10
    second.close()
    state.write_bytes(b"nonsense")
    third = ready(Controller(L, E, K, state_file=state))
    assert "learning begins anew" in caplog.text
    third.close()


class Meter:
    """Processor time: a millisecond for a step that is followed, a tenth for one that is not."""

    def __init__(self) -> None:
        self.spent_s, self.controller = 0.0, None

    def __call__(self) -> float:
        self.spent_s += 1e-3 if self.controller is None or self.controller.following else 1e-4
        return self.spent_s


@pytest.fixture
def metered() -> Iterator[Controller]:
    meter = Meter()
    meter.controller = controller = ready(Controller(L, E, K, clock=meter))
    yield controller
    controller.close()


def test_of_steps_that_leave_little_time_a_part_is_followed_and_all_are_remembered(metered: Controller) -> None:
    for ids in text(7, 200):
        step(metered, ids, ("a",), step_s=1e-2)
        assert metered.wait_idle(20)
    followed = 200 - metered.glances
    metrics = metered.metrics()
    assert metrics[names.named(names.LEARNED_STEPS, how="followed")] == followed
    assert metrics[names.LEARNED_SECONDS] == pytest.approx(1e-3 * followed + 1e-4 * metered.glances, abs=2e-3)
    assert 1e-3 * followed + 1e-4 * metered.glances == pytest.approx(200 * module.SHARE * 1e-2, rel=0.1)
    assert metered._predictor.memory.filled == metered._predictor.step == 200


def test_steps_that_leave_no_time_are_left_out_until_there_is_some(metered: Controller) -> None:
    for ids in text(8, 100):
        step(metered, ids, ("a",), step_s=1e-6)
        assert metered.wait_idle(20)
    assert metered._predictor.step < 10
    for ids in text(9, 5):
        step(metered, ids, ("a",))
        assert metered.wait_idle(20)
    assert metered.following


def drive_with(oracle: Oracle, always: Ids, seed: int) -> tuple[Controller, FloatArray]:
    """Steps that need `always`, hidden from the predictor by noise of other sequences' names; the ranks in the end."""
    controller = ready(Controller(L, E, K, forecaster=oracle))
    random = np.random.default_rng(seed)
    for _ in range(150):
        ids = always if random.random() < 0.5 else text(int(random.integers(1 << 30)), 1)[0]
        oracle.probs[0] = 0.01
        for layer in range(L):
            oracle.probs[0, layer, ids[layer]] = 0.99
        controller.look(META)
        oracle.look(controller.step)
        for layer in range(L):
            controller.policy.touch(layer, np.unique(ids[layer]))
        controller.observe(routing(ids, ("a",)))
        assert controller.wait_idle(20)
    oracle.probs[0] = 0.01
    for layer in range(L):
        oracle.probs[0, layer, always[layer]] = 0.99
    controller.look(META)
    oracle.look(controller.step)
    controller.policy.touch(0, np.unique(always[0]))
    assert controller.wait_idle(20)
    ranks = controller.ranks.copy()
    controller.close()
    return controller, ranks


def test_a_forecaster_that_is_right_earns_its_weight_and_orders_what_is_to_come() -> None:
    always = text(10, 1)[0]
    controller, ranks = drive_with(Oracle(always), always, 11)
    assert controller._blend.mix.eta(0) > 0.5
    for layer in range(1, L):
        best = set(np.argsort(-ranks[layer])[:K].tolist())
        assert best == set(always[layer].ravel().tolist())


def test_without_trust_a_forecaster_changes_nothing() -> None:
    always = text(12, 1)[0]
    controller, ranks = drive_with(Oracle(always, trust=0.0), always, 13)
    np.testing.assert_array_equal(ranks, controller._predictor.scores)


def test_a_gates_chance_moves_worth_as_far_as_gates_were_right(controller: Controller) -> None:
    random = np.random.default_rng(14)
    experts = np.arange(E)
    for ids in text(15, 200):
        controller.look(META)
        for layer in range(L):
            chance = np.full(E, 0.05, np.float32)
            chance[ids[layer]] = 0.9
            controller.foresee(layer, experts, chance)
            controller.policy.touch(layer, np.unique(ids[layer]))
        controller.observe(routing(ids, ("a",)))
        assert controller.wait_idle(20)
    assert controller._blend.mix.eta(NEXT_LAYER) > 0.7
    likely = random.integers(0, E)
    chance, utility = controller.foresee(1, experts, np.where(experts == likely, 0.95, 0.02).astype(np.float32))
    assert chance.argmax() == utility.argmax() == likely
    assert utility[likely] > controller.ranks[1, likely]


def test_a_prefetch_must_be_worth_more_than_what_goes_for_it_by_the_hysteresis() -> None:
    utilities = []
    for hysteresis in (0.0, 0.2):
        controller = Controller(L, E, K, hysteresis=hysteresis)
        ready(controller)
        chance = np.full(E, 0.3, np.float32)
        utilities.append(controller.foresee(1, np.arange(E), chance)[1])
        controller.close()
    np.testing.assert_allclose(utilities[0] - utilities[1], np.log(1.2 / 0.8), rtol=1e-5)

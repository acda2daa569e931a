"""The controller follows steps beside the engine, publishes ranks and plans, and never delays a layer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from support.kept import KERNELS
from support.waiting import wait_until

from edgemoe.experts.predict import controller as module
from edgemoe.experts.predict import predictive_policy as foresight
from edgemoe.experts.predict.controller import PredictionController, PredictorFiles
from edgemoe.experts.predict.forecast_blend import NEXT_LAYER, ExpertForecast
from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.experts.predict.prefetch_planner import LEAST_CHANCE, MOST_MOVES, WINDOW, PrefetchPlanner
from edgemoe.experts.predict.routing_memory import LOOKS
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool
from edgemoe.telemetry import metrics as names
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.step import StepMeta, StepRouting

L, E, K = 3, 12, 2
SIZES = ExpertGeometry(L, E, K, hidden=16, width=16, dtype="float32")  # of one page, like slots
Ids = npt.NDArray[np.int64]
Choices = npt.NDArray[np.int16]


def text(seed: int, n: int, sequences: int = 1) -> Ids:
    return np.argsort(np.random.default_rng(seed).random((n, L, sequences, E)), axis=3)[..., :K]


def routing(ids: Ids, names: tuple[str, ...], decode: bool = True, step_s: float = 10.0) -> StepRouting:
    """Builds the routing of one step from `ids` [L, S, K]. Steps are so slow that following them costs next to
    nothing.
    """
    return StepRouting(
        meta=meta(names, decode),
        ids=ids.astype(np.int16),
        weights=np.zeros(ids.shape, np.float32),
        hints={},
        step_s=step_s,
        stall_s=0.0,
    )


def meta(names: tuple[str, ...], decode: bool = True) -> StepMeta:
    n = len(names)
    return StepMeta(names, np.ones(n, np.int64), np.full(n, decode), np.zeros(n, np.int64), np.zeros(n, np.int64))


def begin(controller: PredictionController, names: tuple[str, ...] = ("a",)) -> Choices:
    """Begins a step, and returns the array for its choices."""
    choices = np.full((L, len(names), K), -1, np.int16)
    controller.on_step_begun(meta(names), choices)
    return choices


def step(controller: PredictionController, ids: Ids, names: tuple[str, ...], step_s: float = 10.0) -> None:
    """Runs one step, and waits until the controller has learned from it."""
    choices = begin(controller, names)
    for layer in range(L):
        choices[layer] = ids[layer]
        controller.policy.touch(layer, np.unique(ids[layer]))
        controller.policy.rank(layer)
    controller.observe(routing(ids, names, step_s=step_s))
    assert controller.wait_idle(20)


def started(**options: Any) -> PredictionController:
    """Builds a controller, and waits until it is ready."""
    kept = PredictorFiles(options.pop("state", None), KERNELS)
    controller = PredictionController(L, E, K, kept=kept, **options)
    assert controller.wait_idle(120)
    return controller


@pytest.fixture
def controller() -> Iterator[PredictionController]:
    it = started()
    yield it
    it.close()


class Oracle:
    """Forecasts a text that repeats one step: its experts are certain, all others impossible."""

    def __init__(self, ids: Ids, trust: float = 1.0) -> None:
        probs = np.full((2, L, E), 0.01, np.float32)
        for layer in range(L):
            probs[:, layer, ids[layer]] = 0.99
        self.forecast: ExpertForecast | None = None
        self.trust, self.probs = trust, probs

    def set_needed(self, ids: Ids) -> None:
        """Sets the experts that it forecasts for this step."""
        self.probs = self.probs.copy()
        self.probs[0] = 0.01
        for layer in range(L):
            self.probs[0, layer, ids[layer]] = 0.99

    def forecast_at(self, step: int) -> None:
        self.forecast = ExpertForecast(step, self.probs)


class Loader:
    def __init__(self) -> None:
        self.moves: list[Move] = []

    def prefetch(self, moves: Iterable[Move], priority: PrefetchPriority = PrefetchPriority.FAR) -> None:
        self.moves = list(moves)
        assert priority is PrefetchPriority.FAR

    def miss_costs(self, tier: Tier) -> list[tuple[float, float]]:
        return [(0.0, 0.0)]  # not measured yet


def test_ranks_equal_the_policy_s_in_replay(controller: PredictionController) -> None:
    full = LearnedPolicy(L, E, K)
    for ids in text(1, 80):
        choices = begin(controller)
        full.begin(("a",))
        for layer in range(L):
            full.route(ids[layer])
            full.touch(layer, np.unique(ids[layer]))
            choices[layer] = ids[layer]
            controller.policy.rank(layer)
            assert controller.wait_idle(20)
            np.testing.assert_allclose(controller.policy.rank(layer), full.rank(layer), atol=0.02)  # rounding
        controller.observe(routing(ids, ("a",)))
        assert controller.wait_idle(20)
        full.end()
    assert controller.predictive.predictor.learner.updates > 20


def test_every_layer_of_every_step_counts_once_despite_failures(controller: PredictionController) -> None:
    for i, ids in enumerate(text(2, 40, sequences=3)):
        if i % 7 == 0:
            begin(controller)  # fails before its first layer
        step(controller, ids[:, : 1 + i % 3], (f"a{i // 5}", f"b{i // 3}", "c")[: 1 + i % 3])
    predictor = controller.predictive.predictor
    assert predictor.memory.filled == sum(1 + i % 3 for i in range(40))
    assert (predictor.history.visits == 4 + 40).all()


def test_a_step_that_only_prefills_counts_as_none(controller: PredictionController) -> None:
    both = StepMeta(
        ("a", "b"), np.ones(2, np.int64), np.zeros(2, np.bool_), np.zeros(2, np.int64), np.zeros(2, np.int64)
    )
    controller.on_step_begun(both, text(3, 1, 2)[0].astype(np.int16))
    controller.policy.rank(L - 1)
    controller.observe(routing(text(3, 1, 2)[0], ("a", "b"), decode=False))
    assert controller.wait_idle(20)
    assert controller.predictive.predictor.step == 0
    assert (controller.predictive.predictor.history.visits == 4).all()


def test_ranks_of_layers_that_ran_are_new_at_once_and_none_is_undefined_before_the_first_look() -> None:
    predictor = NextUsePredictor(L, E, K)
    assert np.isfinite(predictor.ranks).all()
    predictor.set_looks(0)
    choices = np.full((L, 1, K), -1, np.int16)
    predictor.begin(("a",), choices, np.zeros(1, np.int64))
    for layer, row in enumerate(([3, 5], [1, 2], [7, 8])):
        before = predictor.ranks.copy()
        choices[layer] = row
        predictor.update_ranks()
        assert np.isfinite(predictor.ranks).all()
        assert (predictor.ranks[layer] != before[layer]).all()
        assert set(np.argsort(-predictor.ranks[layer])[:K].tolist()) == set(row)
        others = np.arange(L) != layer
        np.testing.assert_array_equal(predictor.ranks[others], before[others])


def test_a_step_is_followed_by_the_thread_alone_that_runs_it(
    controller: PredictionController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delayed second thread would enter the next step and treat all of its layers as run."""
    follow, followers = NextUsePredictor.update_ranks, list[threading.Thread]()

    def noted(predictor: NextUsePredictor, layers: int = 0) -> None:
        followers.append(threading.current_thread())
        follow(predictor, layers)

    monkeypatch.setattr(NextUsePredictor, "update_ranks", noted)
    begin(controller)[:] = text(4, 1)[0]
    link = threading.Thread(target=controller.policy.rank, args=(L - 1,))
    link.start()
    link.join()
    assert not followers
    controller.policy.rank(L - 1)
    assert followers == [threading.current_thread()]


def test_computations_for_peers_are_not_learned(controller: PredictionController) -> None:
    choices = begin(controller)
    for layer, row in enumerate(text(4, 1)[0]):
        controller.policy.touch(layer, np.arange(4, 4 + K))  # for a peer
        controller.policy.rank(layer)
        choices[layer] = row
        controller.policy.rank(layer)
    assert (controller.predictive.predictor.history.last[:, 4 : 4 + K] == 0).sum() == np.isin(
        choices, np.arange(4, 4 + K)
    ).sum()


def test_a_thread_that_is_late_is_not_waited_for(
    controller: PredictionController, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, go_on = threading.Event(), threading.Event()
    work = controller.predictive.predictor.work

    def slow(wait_s: float = 0.0) -> bool:
        busy.set()
        assert go_on.wait(60)
        return work(wait_s)

    monkeypatch.setattr(controller.predictive.predictor, "work", slow)
    controller.predictive.predictor.wake()
    assert busy.wait(60)
    for ids in text(4, 4):
        choices = begin(controller)
        choices[:] = ids
        controller.policy.rank(L - 1)
        controller.observe(routing(ids, ("a",)))
    assert controller.predictive.dropped == 2
    go_on.set()
    assert controller.wait_idle(20)
    step(controller, text(4, 1)[0], ("a",))
    assert controller.predictive.predictor.memory.filled == 3


def test_until_it_is_ready_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    link = module.link_predictor
    monkeypatch.setattr(module, "link_predictor", lambda directory: go_on.wait(60) and link(directory))
    controller = PredictionController(L, E, K, kept=PredictorFiles(None, KERNELS))
    for layer in range(L):
        controller.policy.touch(layer, np.array([2, 5]))
        controller.policy.touch(layer, np.array([7]))
    begin(controller)
    controller.observe(routing(text(1, 1)[0], ("a",)))
    assert np.argsort(controller.policy.rank(0)[0])[-3:].tolist() == [2, 5, 7]
    _, utility = controller.policy.fuse_chances(1, np.array([1, 2]), np.array([0.9, 0.1], np.float32))
    assert (utility[0], utility[1]) == (np.inf, -np.inf)
    go_on.set()
    assert controller.wait_idle(120)
    assert controller.policy.rank(0) is controller.predictive.predictor.ranks
    controller.close()


def test_closing_ends_the_process_that_compiles(tmp_path: Path) -> None:
    controller = PredictionController(L, E, K, kept=PredictorFiles(None, tmp_path))
    wait_until(lambda: any(tmp_path.glob("*.lock")))
    controller.close()
    wait_until(lambda: not any(thread.name == "controller" for thread in threading.enumerate()))
    assert not controller.ready
    assert not any(tmp_path.glob("*.o"))


def test_a_thread_that_fails_says_so_falls_back_and_starts_again(
    controller: PredictionController, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RESTART_S", 0.0)
    again, begin_ = threading.Event(), controller._begin
    monkeypatch.setattr(controller, "_begin", lambda: again.wait(60) and begin_())
    broken = controller.predictive.predictor
    monkeypatch.setattr(broken, "pop_awaited", lambda: 1 / 0)
    choices = begin(controller)
    choices[:] = text(5, 1)[0]
    controller.observe(routing(text(5, 1)[0], ("a",)))
    wait_until(lambda: not controller.ready and "least recently used" in caplog.text)
    for layer in range(L):
        controller.policy.touch(layer, np.array([4]))
    assert (controller.policy.rank(0).argmax(axis=1) == 4).all()
    again.set()
    assert controller.wait_idle(120)
    assert controller.predictive.predictor is not broken
    step(controller, text(5, 1)[0], ("a",))
    assert controller.predictive.predictor.memory.filled == 1


def bring(residency: Residency, expert: ExpertId, source: Tier, target: Tier) -> None:
    load = residency.reserve(Move(expert, source, target, 0.0), PrefetchPriority.FILL)
    assert load is not None
    residency.complete_load(load)


def tiers(controller: PredictionController) -> tuple[Residency, Loader]:
    """Builds tiers with all experts in RAM and room for nine in VRAM; the loader keeps the controller's prefetches."""
    ram = SlotPool(Tier.RAM, L, E, L * E, controller.policy)
    vram = SlotPool(Tier.VRAM, L, E, 9, controller.policy)
    residency, loader = Residency(ram, [vram]), Loader()
    for key in range(L * E):
        bring(residency, ExpertId(*divmod(key, E)), Tier.NVME, Tier.RAM)
    controller.attach(residency, loader, SIZES)
    return residency, loader


def test_plans_fetch_missing_experts_of_high_rank(controller: PredictionController) -> None:
    _, loader = tiers(controller)
    for _ in range(40):
        for ids in text(5, 3):
            step(controller, ids, ("a",))
    assert 0 < len(loader.moves) <= MOST_MOVES
    assert all((move.source, move.target) == (Tier.RAM, Tier.VRAM) for move in loader.moves)
    assert all(LEAST_CHANCE <= move.chance <= 1 for move in loader.moves)
    ranks = controller.policy.rank(0)
    assert np.mean([ranks[move.expert] for move in loader.moves]) > ranks.mean()


@pytest.mark.parametrize("why", ["no time for looks", "a prompt", "a failure"])
def test_plans_are_withdrawn_when_no_new_one_is_made(
    why: str, controller: PredictionController, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loader = tiers(controller)
    for ids in text(5, 6):
        step(controller, ids, ("a",))
    assert loader.moves
    if why == "no time for looks":
        for ids in text(5, 12):
            step(controller, ids, ("a",), step_s=0.0)
    elif why == "a prompt":
        controller.observe(routing(text(5, 1)[0], ("a",), decode=False))
    else:
        monkeypatch.setattr(controller.predictive.predictor, "pop_awaited", lambda: 1 / 0)
        begin(controller)
        controller.observe(routing(text(5, 1)[0], ("a",)))
    wait_until(lambda: not loader.moves)


def test_needs_before_a_plan_do_not_count(controller: PredictionController) -> None:
    predictor = NextUsePredictor(L, E, K)
    residency, _ = tiers(controller)
    plans = PrefetchPlanner(residency, Loader(), SIZES, 0.1)
    for expert in range(9):  # VRAM is full
        bring(residency, ExpertId(0, expert), Tier.RAM, Tier.VRAM)
    ranks, lowest = np.zeros((L, E), np.float32), np.array([-6.0], np.float32)
    ranks[0, 0] = lowest[0]  # expert 0 of layer 0 is needed just before the first plan, and never again
    needs = plans._estimates[0].needs
    before = needs.chance_there(lowest)
    for number in range(WINDOW + 2):
        choices = np.full((L, 1, K), -1, np.int16)
        predictor.begin(("a",), choices, np.zeros(1, np.int64))
        choices[0] = [2, 3] if number else [0, 1]
        predictor.update_ranks()
        plans.plan(ranks, predictor)
        choices[1:] = [10, 11]
        predictor.end()
        predictor.work()
    assert needs.judged == 1
    assert needs.chance_there(lowest) < before


def test_learned_state_is_saved_at_the_end_and_damage_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "cache.safetensors"
    first = started(state=state)
    for ids in text(6, 10):
        step(first, ids, ("a",))
    first.close()
    second = started(state=state)
    assert second.predictive.predictor.memory.filled == 10
    second.close()
    state.write_bytes(b"nonsense")
    third = started(state=state)
    assert "learning begins anew" in caplog.text
    third.close()


def test_learned_state_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.05)
    state = tmp_path / "cache.safetensors"
    crashing = started(state=state)
    for ids in text(6, 10):
        step(crashing, ids, ("a",))
    crashing.predictive.blend.mix.loss[:] = np.arange(crashing.predictive.blend.mix.loss.size).reshape(
        crashing.predictive.blend.mix.loss.shape
    )[::-1]
    step(crashing, text(6, 1)[0], ("a",))
    wait_until(lambda: state.exists() and load_file(state)["written"][0] == 11)
    again = started(state=state)  # the first one was not closed
    assert again.predictive.predictor.memory.filled == 11
    np.testing.assert_array_equal(again.predictive.blend.mix.loss, crashing.predictive.blend.mix.loss)
    np.testing.assert_array_equal(again.predictive.blend.etas, crashing.predictive.blend.etas)
    again.close()
    crashing.close()


class Meter:
    """Processor time: a millisecond for a step with all updates, a tenth for one without."""

    def __init__(self) -> None:
        self.spent_s, self.controller = 0.0, None

    def __call__(self) -> float:
        looks = 0 if self.controller is None else self.controller.predictive.looks
        self.spent_s += 1e-4 + 9e-4 * looks / LOOKS
        return self.spent_s


@pytest.fixture
def metered() -> Iterator[PredictionController]:
    meter = Meter()
    meter.controller = controller = started(clock=meter)
    yield controller
    controller.close()


def test_steps_that_leave_little_time_get_fewer_looks_and_all_are_learned_from(metered: PredictionController) -> None:
    for ids in text(7, 200):
        step(metered, ids, ("a",), step_s=1e-2)
    metrics = metered.metrics()
    assert metrics[names.named(names.LEARNED_STEPS, how="followed")] == metered.predictive.studies
    assert metered.predictive.studies + metered.predictive.glances == 200
    assert metrics[names.LEARNED_SECONDS] == pytest.approx(200 * foresight.SHARE * 1e-2, rel=0.1)
    assert metered.predictive.predictor.memory.filled == metered.predictive.predictor.step == 200
    assert metered.predictive.predictor.learner.updates > 50


def test_looks_come_back_with_the_time_for_them(metered: PredictionController) -> None:
    for ids in text(8, 50):
        step(metered, ids, ("a",), step_s=1e-6)
    assert metered.predictive.looks == 0
    assert metered.predictive.predictor.memory.filled == 50
    for ids in text(9, 6):
        step(metered, ids, ("a",))
    assert metered.predictive.looks == LOOKS


def drive_with(oracle: Oracle, always: Ids, seed: int) -> tuple[PredictionController, FloatArray]:
    """Runs steps that need `always`, among noise of other sequences; returns the controller and its final ranks."""
    controller = started(forecaster=oracle)
    random = np.random.default_rng(seed)
    for _ in range(150):
        ids = always if random.random() < 0.5 else text(int(random.integers(1 << 30)), 1)[0]
        oracle.set_needed(ids)
        choices = begin(controller)
        oracle.forecast_at(controller.predictive.step)
        for layer in range(L):
            choices[layer] = ids[layer]
            controller.policy.rank(layer)
            assert controller.wait_idle(20)
        controller.observe(routing(ids, ("a",)))
        assert controller.wait_idle(20)
    oracle.set_needed(always)
    choices = begin(controller)
    oracle.forecast_at(controller.predictive.step)
    choices[0] = always[0]
    controller.policy.rank(0)
    assert controller.wait_idle(20)
    ranks = controller.policy.rank(0).copy()
    controller.close()
    return controller, ranks


def test_a_correct_forecaster_gains_weight_and_orders_future_needs() -> None:
    always = text(10, 1)[0]
    controller, ranks = drive_with(Oracle(always), always, 11)
    assert controller.predictive.blend.mix.eta(1) > 0.5  # after a quarter of the layers
    for layer in range(1, L):
        best = set(np.argsort(-ranks[layer])[:K].tolist())
        assert best == set(always[layer].ravel().tolist())


def test_without_trust_a_forecaster_changes_nothing() -> None:
    always = text(12, 1)[0]
    controller, ranks = drive_with(Oracle(always, trust=0.0), always, 13)
    np.testing.assert_array_equal(ranks, controller.predictive.predictor.scores)


def test_a_gates_chance_moves_worth_as_far_as_gates_were_right(controller: PredictionController) -> None:
    random = np.random.default_rng(14)
    experts = np.arange(E)
    for ids in text(15, 200):
        choices = begin(controller)
        for layer in range(L):
            chance = np.full(E, 0.05, np.float32)
            chance[ids[layer]] = 0.9
            controller.policy.fuse_chances(layer, experts, chance)
            choices[layer] = ids[layer]
            controller.policy.rank(layer)
        controller.observe(routing(ids, ("a",)))
        assert controller.wait_idle(20)
    assert controller.predictive.blend.mix.eta(NEXT_LAYER) > 0.7
    likely = random.integers(0, E)
    chance, utility = controller.policy.fuse_chances(
        1, experts, np.where(experts == likely, 0.95, 0.02).astype(np.float32)
    )
    assert chance.argmax() == utility.argmax() == likely
    assert utility[likely] > controller.policy.rank(0)[1, likely]


def test_a_prefetch_must_exceed_the_evicted_expert_s_value_by_the_hysteresis() -> None:
    utilities = []
    for hysteresis in (0.0, 0.2):
        controller = started(hysteresis=hysteresis)
        chance = np.full(E, 0.3, np.float32)
        utilities.append(controller.policy.fuse_chances(1, np.arange(E), chance)[1])
        controller.close()
    np.testing.assert_allclose(utilities[0] - utilities[1], np.log(1.2 / 0.8), rtol=1e-5)

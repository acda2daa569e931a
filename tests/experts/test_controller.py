"""The controller follows steps beside the engine, publishes ranks, plans, and never makes anyone wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgemoe.experts import controller as module
from edgemoe.experts.controller import Controller
from edgemoe.experts.full import Full
from edgemoe.experts.pool import Pool
from edgemoe.experts.residency import Horizon, Residency
from edgemoe.types import Move, StepRouting, Tier

L, E, K = 3, 12, 2
Ids = npt.NDArray[np.int64]


def text(seed: int, n: int, sequences: int = 1) -> Ids:
    return np.argsort(np.random.default_rng(seed).random((n, L, sequences, E)), axis=3)[..., :K]


def routing(ids: Ids, names: tuple[str, ...], decode: bool = True) -> StepRouting:
    """One step's; `ids` [L, S, K]."""
    n = len(names)
    return StepRouting(
        requests=names,
        query_lens=np.ones(n, np.int64),
        decode=np.full(n, decode),
        tokens=np.zeros(n, np.int64),
        positions=np.zeros(n, np.int64),
        ids=ids.astype(np.int16),
        weights=np.zeros(ids.shape, np.float32),
        hints={},
        step_s=0.0,
        stall_s=0.0,
    )


def step(controller: Controller, ids: Ids, names: tuple[str, ...]) -> None:
    for layer in range(L):
        controller.policy.touch(layer, np.unique(ids[layer]))
    controller.observe(routing(ids, names))


@pytest.fixture
def controller() -> Iterator[Controller]:
    it = Controller(L, E, K)
    yield it
    it.close()


class Mover:
    def __init__(self) -> None:
        self.moves: list[Move] = []

    def prefetch(self, moves: Iterable[Move], horizon: Horizon = Horizon.FAR) -> None:
        self.moves = list(moves)
        assert horizon is Horizon.FAR


def test_ranks_are_those_of_the_policy_that_replay_judges(controller: Controller) -> None:
    full = Full(L, E, K)
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


def test_plans_fetch_what_ranks_high_and_is_missing(controller: Controller) -> None:
    ram = Pool(Tier.RAM, L, E, L * E, controller.policy)
    vram = Pool(Tier.VRAM, L, E, 9, controller.policy)
    for key in range(L * E):
        ram.settle(ram.place(ram.free.pop(), *divmod(key, E), 0, 0))
    residency, mover = Residency(ram, [vram]), Mover()
    controller.attach(residency, mover, 1 << 20)
    for _ in range(40):
        for ids in text(5, 3):
            step(controller, ids, ("a",))
    assert controller.wait_idle(30)
    assert 0 < len(mover.moves) <= module.MOST_MOVES
    assert all((move.source, move.target) == (Tier.RAM, Tier.VRAM) for move in mover.moves)
    scores = [controller.ranks[move.expert] for move in mover.moves]
    assert np.mean(scores) > controller.ranks.mean()


def test_what_was_learned_is_saved_at_the_end_and_damage_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "cache.safetensors"
    first = Controller(L, E, K, state_file=state)
    for ids in text(6, 10):
        step(first, ids, ("a",))
    assert first.wait_idle(20)
    first.close()
    second = Controller(L, E, K, state_file=state)
    assert second._predictor.memory.filled == 10
    second.close()
    state.write_bytes(b"nonsense")
    third = Controller(L, E, K, state_file=state)
    assert "learning begins anew" in caplog.text
    third.close()

"""Experts of prompts are remembered like decoded ones, and a prompt's end forecasts its continuation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from support.kept import KERNELS

from edgemoe.experts.predict.controller import PredictionController, PredictorFiles
from edgemoe.experts.predict.next_use import NextUsePredictor, link_predictor
from edgemoe.experts.predict.next_use_step import MOST, PROMPTS, TRACKS
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.step import StepMeta, StepRouting

L, E, K = 3, 70, 4  # more experts than a word has bits
Ids = npt.NDArray[np.int16]


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    link_predictor(KERNELS)


def text(seed: int, n: int) -> Ids:
    """Draws routes of n tokens [L, n, K]."""
    return np.argsort(np.random.default_rng(seed).random((L, n, E)), axis=2)[:, :, :K].astype(np.int16)


def decode(predictor: NextUsePredictor, ids: Ids, name: str) -> None:
    for token in ids.swapaxes(0, 1):
        begin(predictor, name)[:] = token[:, None]
        predictor.end()
        assert predictor.work()


def begin(predictor: NextUsePredictor, name: str) -> Ids:
    choices = np.full((L, 1, K), -1, np.int16)
    assert predictor.begin((name,), choices, np.zeros(1, np.int64))
    return choices


def add_prompt(predictor: NextUsePredictor, ids: Ids, name: str) -> None:
    assert predictor.add_prompt(name, ids)
    predictor.work()


def likeliest(predictor: NextUsePredictor, n: int = K) -> list[set[int]]:
    return [set(row) for row in np.argsort(-predictor.scores, axis=1)[:, :n].tolist()]


def chosen(ids: Ids, token: int) -> list[set[int]]:
    return [set(row) for row in ids[:, token].tolist()]


def test_a_prompt_is_remembered_as_if_it_had_been_decoded() -> None:
    ids, told, decoded = text(1, 60), NextUsePredictor(L, E, K), NextUsePredictor(L, E, K)
    add_prompt(told, ids[:, :25], "a")
    add_prompt(told, ids[:, 25:50], "a")  # in two parts
    decode(told, ids[:, 50:], "a")
    decode(decoded, ids, "a")
    for name in ("chosen", "soon", "before", "after"):
        assert np.array_equal(getattr(told.memory, name), getattr(decoded.memory, name)), name
    assert told.history.visits.tolist() == [14.0] * L  # averages count decoded tokens only


@pytest.mark.parametrize("worked", [(), ("begun",), ("told",), ("begun", "told")], ids=str)
def test_accepted_drafts_are_remembered_as_if_they_had_been_decoded(worked: tuple[str, ...]) -> None:
    """Whenever the thread beside the steps works."""
    ids, drafted, decoded = text(1, 60), NextUsePredictor(L, E, K), NextUsePredictor(L, E, K)
    for at in range(0, 60, 4):
        begin(drafted, "a")[:] = ids[:, [at]]
        if "begun" in worked:
            drafted.work()
        assert drafted.add_prompt("a", ids[:, at + 1 : at + 4], behind=True)
        if "told" in worked:
            drafted.work()
        drafted.end()
        assert drafted.work()
    decode(decoded, ids, "a")
    for name in ("chosen", "soon", "before", "after"):
        assert np.array_equal(getattr(drafted.memory, name), getattr(decoded.memory, name)), name
    again = ids[:, :20]
    for predictor in (drafted, decoded):
        decode(predictor, again, "again")
    assert likeliest(drafted) == likeliest(decoded) == chosen(ids, 20)


def test_a_repeated_prompt_s_continuation_is_predicted() -> None:
    ids, predictor = text(2, 60), NextUsePredictor(L, E, K)
    add_prompt(predictor, ids, "prompt")
    decode(predictor, text(3, 40), "between")
    decode(predictor, ids[:, :20], "again")
    assert likeliest(predictor) == chosen(ids, 20)


def test_the_first_token_after_a_prompt_is_foreseen_before_its_first_layer_runs() -> None:
    ids, predictor = text(4, 60), NextUsePredictor(L, E, K)
    decode(predictor, ids, "before")
    decode(predictor, text(5, 20), "between")
    add_prompt(predictor, ids[:, :30], "again")
    begin(predictor, "again")
    predictor.work()
    assert likeliest(predictor) == chosen(ids, 30)


def test_a_recomputed_sequence_continues_from_its_prompt() -> None:
    ids, predictor = text(6, 60), NextUsePredictor(L, E, K)
    decode(predictor, ids, "before")
    decode(predictor, text(7, 5), "a")
    add_prompt(predictor, ids[:, :30], "a")  # another text, in place of its former one
    begin(predictor, "a")
    predictor.work()
    assert likeliest(predictor) == chosen(ids, 30)


def test_prompts_beside_decoding_sequences_are_told_apart() -> None:
    policy, ids, mine = LearnedPolicy(L, E, K), text(8, 40), text(9, 10)
    replay = Replay(policy, ExpertGeometry(L, E, K, 1, 1, "float32"))
    for token in range(10):
        lengths = np.array([1, 4])
        meta = StepMeta(("mine", "theirs"), lengths, np.array([True, False]), *np.zeros((2, 5), np.int64))
        replay.step(ReplayedStep(meta, np.concatenate([mine[:, [token]], ids[:, 4 * token : 4 * token + 4]], axis=1)))
    memory = policy.predictor.memory
    assert memory.written == 50
    alone = NextUsePredictor(L, E, K)
    add_prompt(alone, ids, "theirs")
    theirs = np.flatnonzero(np.isin(memory.chosen[0, 0, :50], alone.memory.chosen[0, 0, :40]))
    assert np.array_equal(memory.soon[theirs], alone.memory.soon[:40])
    assert policy.predictor.history.visits.tolist() == [14.0] * L  # averages count decoded tokens only


def test_accepted_drafts_are_remembered_behind_their_sequences_own_tokens() -> None:
    controller, ids = PredictionController(L, E, K, kept=PredictorFiles(None, KERNELS)), text(8, 6)
    assert controller.wait_idle(120)
    nothing = np.zeros(6, np.int64)
    drafted = StepMeta(("a",), np.array([6]), np.ones(1, np.bool_), nothing, nothing, drafted=np.array([5]))
    step = StepRouting(drafted, ids, np.zeros(ids.shape, np.float32), {}, 1.0, 0.0)
    controller.on_step_begun(drafted, ids)
    controller.observe(step.without_rejected(np.array([3])))
    assert controller.wait_idle(20)
    memory = controller.predictive.predictor.memory
    alone = NextUsePredictor(L, E, K)
    add_prompt(alone, ids[:, :4], "a")
    assert memory.written == 4
    assert np.array_equal(memory.chosen[..., :4], alone.memory.chosen[..., :4])
    controller.close()


def test_one_prompt_does_not_push_out_all_that_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgemoe.experts.predict.next_use.MOST_SLOTS", 80)
    predictor = NextUsePredictor(L, E, K)
    add_prompt(predictor, text(10, 400), "a")
    assert predictor.memory.written == 80 // MOST


def test_prompts_wait_until_there_is_no_more_room_for_them() -> None:
    predictor, ids = NextUsePredictor(L, E, K), text(11, 2)
    assert [predictor.add_prompt(str(i), ids) for i in range(PROMPTS + 1)] == [True] * PROMPTS + [False]
    predictor.work()
    assert predictor.memory.written == 2 * PROMPTS
    assert predictor.add_prompt("more", ids)


def test_the_controller_learns_from_steps_that_only_prefill() -> None:
    controller, ids = PredictionController(L, E, K, kept=PredictorFiles(None, KERNELS)), text(12, 30)
    assert controller.wait_idle(120)
    lengths = np.array([10, 20])
    meta = StepMeta(("a", "b"), lengths, np.zeros(2, np.bool_), *np.zeros((2, 30), np.int64))
    controller.on_step_begun(meta, ids)
    controller.observe(StepRouting(meta, ids, np.zeros(ids.shape, np.float32), {}, 1.0, 0.0))
    assert controller.wait_idle(20)
    assert controller.predictive.predictor.memory.written == 30
    assert (controller.predictive.predictor.memory.before[[0, 10]] == -1).all()
    controller.close()


def test_prompts_are_skipped_with_more_sequences_than_alignments() -> None:
    policy, ids = LearnedPolicy(L, E, K), text(13, TRACKS + 3)
    lengths, decodes = np.array([1] * TRACKS + [3]), np.array([True] * TRACKS + [False])
    meta = StepMeta(tuple(map(str, range(TRACKS + 1))), lengths, decodes, *np.zeros((2, TRACKS + 3), np.int64))
    Replay(policy, ExpertGeometry(L, E, K, 1, 1, "float32")).step(ReplayedStep(meta, ids))
    assert policy.predictor.memory.written == TRACKS

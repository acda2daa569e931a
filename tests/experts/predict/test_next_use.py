"""The predictor recalls past successors, learns weights for its experts, stays bounded and survives restarts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from support.kept import KERNELS

from edgemoe.experts.predict import routing_memory as recall
from edgemoe.experts.predict.next_use import NextUsePredictor, link_predictor, read_state, write_state
from edgemoe.experts.predict.online_mlp import LEARNING_RATE
from edgemoe.experts.predict.routing_memory import DECAY, HORIZON_TOKENS, NONE, RoutingMemory

L, E, K = 3, 70, 4  # more experts than a word has bits
Ids = npt.NDArray[np.int64]


def text(seed: int, n: int) -> Ids:
    """Draws routes of n tokens [n, L, K]."""
    return np.argsort(np.random.default_rng(seed).random((n, L, E)), axis=2)[:, :, :K]


def words_of(token: Ids) -> npt.NDArray[np.uint64]:
    words = np.zeros((L, 2), np.uint64)
    for layer, row in enumerate(token):
        for expert in row.tolist():
            words[layer, expert >> 6] |= np.uint64(1 << (expert & 63))
    return words


def drive(predictor: NextUsePredictor, ids: Ids, names: tuple[str, ...] = ("a",)) -> None:
    """Runs whole steps, [n, L, S, K] or, for one sequence, [n, L, K]."""
    for token in ids.reshape(len(ids), L, len(names), K):
        choices = begin(predictor, names)
        for layer, rows in enumerate(token):
            choices[layer] = rows
            predictor.update_ranks()
            predictor.work()
        predictor.end()
        assert predictor.work()


def begin(predictor: NextUsePredictor, names: tuple[str, ...] = ("a",)) -> npt.NDArray[np.int16]:
    """Begins a step, and returns the array for its choices."""
    choices = np.full((L, len(names), K), -1, np.int16)
    assert predictor.begin(names, choices, np.arange(len(names)))
    return choices


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    link_predictor(KERNELS)


def test_memory_tells_how_soon_each_expert_was_needed_again() -> None:
    ids, memory, last = text(1, 60), RoutingMemory(L, E, 100), NONE
    for token in ids:
        last = memory.append(words_of(token), last)
    for at in range(60):
        for layer in range(L):
            for expert in range(E):
                later = [t for t in range(at + 1, 60) if expert in ids[t, layer]]
                tokens = later[0] - at - 1 if later else HORIZON_TOKENS
                expected = round(255 * DECAY**tokens) if tokens < HORIZON_TOKENS else 0
                assert memory.soon[at, layer * E + expert] == expected


def test_interleaved_sequences_are_remembered_apart_also_when_the_ring_comes_round() -> None:
    memory, last = RoutingMemory(L, E, 7), {"a": NONE, "b": NONE}
    for i, token in enumerate(text(2, 40)):
        name = "ab"[i % 3 == 0]
        slot = memory.append(words_of(token), last[name])
        last = {other: NONE if at == slot else at for other, at in last.items()} | {name: slot}
        linked = memory.before[memory.before != NONE]
        assert len(set(linked.tolist())) == len(linked)
        assert (memory.before[: memory.filled] != np.arange(memory.filled)).all()
    assert memory.filled == 7


def test_how_often_an_expert_is_needed_is_counted_for_ever() -> None:
    predictor = NextUsePredictor(L, E, K)
    history = predictor.history
    history.visits[:], history.count[:] = 2.0**24, 2.0**23
    drive(predictor, np.zeros((200, L, K), np.int64) + np.arange(K))
    assert (history.visits != 2.0**24).all()
    often = history.count / history.visits[:, None]
    assert (often[:, :K] > 0.5).all()
    assert (often[:, K:] < 0.5).all()


def test_repeated_text_is_foreseen() -> None:
    ids = text(4, 40)
    predictor = NextUsePredictor(L, E, K)
    drive(predictor, np.concatenate([ids, ids, ids[:20]]))
    top = np.argsort(-predictor.scores, axis=1)[:, :K]
    assert np.mean([len(set(a) & set(b)) for a, b in zip(top.tolist(), ids[20].tolist(), strict=True)]) > 0.9 * K


def test_successors_are_recalled_also_from_the_middle_of_a_token() -> None:
    ids = text(12, 40)
    predictor = NextUsePredictor(L, E, K)
    drive(predictor, np.concatenate([ids, ids]))
    choices = begin(predictor, ("new",))  # a sequence without a past
    for layer in range(2):
        choices[layer] = ids[20, layer]
        predictor.update_ranks()
        predictor.work()
    assert set(np.argsort(-predictor.scores[2])[:K].tolist()) == set(ids[20, 2].tolist())
    assert set(np.argsort(-predictor.scores[0])[:K].tolist()) == set(ids[21, 0].tolist())


def test_a_future_layer_is_worth_more_than_one_that_has_run() -> None:
    predictor = NextUsePredictor(L, E, K)
    drive(predictor, text(5, 3))
    choices = begin(predictor)
    choices[: L - 1] = text(6, 1)[0, : L - 1, None]
    predictor.update_ranks()
    phase = predictor.phase
    assert phase[L - 1] > phase[0] > phase[1]
    assert phase.tolist() == [predictor.phase_of(layer) for layer in range(L)]


def test_a_batch_is_aligned_sequence_by_sequence() -> None:
    one, two = text(7, 30), text(8, 30)
    predictor = NextUsePredictor(L, E, K)
    for _ in range(3):
        drive(predictor, np.stack([one, two], axis=2), ("one", "two"))
    top = set(np.argsort(-predictor.scores[0])[: 2 * K].tolist())
    assert len(top & (set(one[0, 0].tolist()) | set(two[0, 0].tolist()))) >= 2 * K - 2


def test_sequences_that_come_back_go_on_where_they_were() -> None:
    ids = text(13, 60)
    predictor = NextUsePredictor(L, E, K)
    drive(predictor, np.concatenate([ids, ids]), ("first",))
    for i in range(20):
        drive(predictor, ids[i : i + 1], ("second",))
        drive(predictor, ids[i + 30 : i + 31], ("third",))
    memory, latest = predictor.memory, predictor.memory.written - 1
    assert memory.before[latest] == latest - 2
    assert memory.before[latest - 1] == latest - 3


def test_nothing_is_undefined_before_anything_is_known() -> None:
    predictor = NextUsePredictor(L, E, K)
    for _ in range(3):
        assert np.isfinite(predictor.scores).all()
        drive(predictor, text(14, 1))


def test_a_step_that_comes_too_soon_is_not_learned_from() -> None:
    predictor = NextUsePredictor(L, E, K)
    for token in text(15, 2):
        begin(predictor)[:, 0] = token
        predictor.end()
    assert not predictor.begin(("a",), np.full((L, 1, K), -1, np.int16), np.zeros(1, np.int64))
    assert predictor.work()
    assert predictor.work()
    assert not predictor.work()
    assert predictor.step == predictor.memory.filled == 2


def test_without_updates_the_alignment_follows_the_text() -> None:
    ids = text(16, 40)
    predictor = NextUsePredictor(L, E, K)
    drive(predictor, np.concatenate([ids, ids, ids[:10]]))
    predictor.set_looks(0)
    drive(predictor, ids[10:14])
    assert predictor.looking == 0
    for layer, row in enumerate(ids[14]):
        assert len(set(np.argsort(-predictor.scores[layer])[: 2 * K].tolist()) & set(row.tolist())) >= K - 1


def test_learned_state_survives_a_restart(tmp_path: Path) -> None:
    before, after = NextUsePredictor(L, E, K), NextUsePredictor(L, E, K)
    drive(before, text(9, 80))
    write_state(tmp_path / "state.safetensors", before.learned())
    assert after.restore(read_state(tmp_path / "state.safetensors"))
    assert np.array_equal(after.memory.soon[:80], before.memory.soon[:80])
    assert np.array_equal(after.memory.before[:80], before.memory.before[:80])
    assert np.array_equal(after.learner.weights, before.learner.weights)
    assert np.array_equal(after.history.rates, before.history.rates)
    for predictor in (before, after):
        begin(predictor, ("new",))
        predictor.work()
        predictor.end()
        predictor.work()
    assert after.scores == pytest.approx(before.scores, abs=1e-4)


@pytest.mark.parametrize("slots", [32, 64])
def test_a_ring_that_has_come_round_survives_too(slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgemoe.experts.predict.next_use.MOST_SLOTS", 32)
    before = NextUsePredictor(L, E, K)
    drive(before, text(10, 75))
    monkeypatch.setattr("edgemoe.experts.predict.next_use.MOST_SLOTS", slots)
    after = NextUsePredictor(L, E, K)
    write_state(tmp_path / "state", before.learned())
    assert after.restore(read_state(tmp_path / "state"))
    turn = 75 % 32
    assert np.array_equal(after.memory.chosen[:, :, :32], np.roll(before.memory.chosen, -turn, axis=2))
    assert after.memory.filled == 32
    assert after.memory.before[:32].tolist() == [NONE, *range(31)]


@pytest.mark.parametrize("damage", ["weights", "rates"])
def test_a_state_whose_weights_do_not_fit_gives_its_memory(damage: str) -> None:
    before, after = NextUsePredictor(L, E, K), NextUsePredictor(L, E, K)
    drive(before, text(17, 30))
    learned = before.learned()
    other = {"weights": learned["weights"][:-2], "rates": np.full_like(learned["rates"], np.nan)}
    fresh = after.learner.weights.copy()
    assert after.restore(learned | {damage: other[damage]})
    assert np.array_equal(after.memory.soon[:30], before.memory.soon[:30])
    assert np.array_equal(after.learner.weights, fresh)


@pytest.mark.parametrize("damage", ["absent", "garbage", "bfloat16", "other model", "out of range"])
def test_a_state_that_does_not_fit_is_left_alone(damage: str, tmp_path: Path) -> None:
    path, fresh = tmp_path / "state", NextUsePredictor(L, E, K)
    if damage == "garbage":
        path.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    elif damage == "bfloat16":
        save_file({"shape": torch.zeros(3, dtype=torch.bfloat16)}, path)
    elif damage == "other model":
        write_state(path, NextUsePredictor(L, E + 1, K).learned())
    elif damage == "out of range":
        other = NextUsePredictor(L, E, K)
        drive(other, text(11, 5))
        learned = other.learned()
        write_state(path, learned | {"before": np.full_like(learned["before"], 1000)})
    assert not fresh.restore(read_state(path) or {})
    assert fresh.memory.filled == 0


def test_the_scoring_weights_move_far_less_per_minibatch_than_the_trained_ones() -> None:
    predictor, ids = NextUsePredictor(L, E, K), text(18, 500)
    drive(predictor, ids[:400])
    moved = []
    for token in ids[400:]:
        before = predictor.learner.weights.copy()
        drive(predictor, token[None])
        moved.append(np.abs(predictor.learner.weights - before).max())
    assert 0 < max(moved) < LEARNING_RATE / 5


def test_after_a_restart_learning_goes_on_from_the_weights_that_were_kept() -> None:
    before, after = NextUsePredictor(L, E, K), NextUsePredictor(L, E, K, seed=1)
    drive(before, text(19, 120))
    assert after.restore(before.learned())
    for token in text(20, 100):
        if after.learner.updates:
            break
        drive(after, token[None])
    assert after.learner.updates == 1
    moved = np.abs(after.learner.weights - before.learner.weights).max()
    assert 0 < moved <= LEARNING_RATE


def test_memory_is_bounded_for_large_models() -> None:
    assert NextUsePredictor(61, 256, 8).memory.soon.nbytes <= 64 << 20
    assert NextUsePredictor(2, 8, 2).memory.slots > recall.HORIZON_TOKENS

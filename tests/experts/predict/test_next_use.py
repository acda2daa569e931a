"""The predictor recalls what followed, learns whom to believe, stays bounded and survives restarts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgemoe.experts.predict import routing_memory as recall
from edgemoe.experts.predict.next_use import NextUsePredictor
from edgemoe.experts.predict.routing_memory import DECAY, HORIZON, NONE, RoutingHistory, RoutingMemory

L, E, K = 3, 70, 4  # more experts than a word has bits
Ids = npt.NDArray[np.int64]


def text(seed: int, n: int) -> Ids:
    """Routes of n tokens [n, L, K]."""
    return np.argsort(np.random.default_rng(seed).random((n, L, E)), axis=2)[:, :, :K]


def words_of(token: Ids) -> npt.NDArray[np.uint64]:
    words = np.zeros((L, 2), np.uint64)
    for layer, row in enumerate(token):
        for expert in row.tolist():
            words[layer, expert >> 6] |= np.uint64(1 << (expert & 63))
    return words


def drive(predictor: NextUsePredictor, ids: Ids, name: str = "a") -> None:
    for token in ids:
        predictor.begin((name,))
        for layer, row in enumerate(token):
            predictor.see(layer, row[None, :], row)
        predictor.end()


def test_memory_tells_how_soon_each_expert_was_needed_again() -> None:
    ids, memory, last = text(1, 60), RoutingMemory(L, E, 100), NONE
    for token in ids:
        last = memory.append(words_of(token), last)
    for at in range(60):
        for layer in range(L):
            for expert in range(E):
                later = [t for t in range(at + 1, 60) if expert in ids[t, layer]]
                tokens = later[0] - at - 1 if later else HORIZON
                expected = round(255 * DECAY**tokens) if tokens < HORIZON else 0
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


def test_what_followed_the_same_tokens_is_recalled() -> None:
    ids, memory = text(3, 50), RoutingMemory(L, E, 100)
    track = RoutingHistory(memory, K, 8)
    for token in [*ids, *ids[10:13]]:
        track.begin()
        for layer, row in enumerate(token):
            track.see(layer, row)
        track.end()
        track.matched[track.last] = 0
    track.begin()
    track.align(0, 8)
    assert track.slots[track.weights[: track.n].argmax()] == 13
    assert track.best > 0.9
    never = np.ones(L * E, np.float32)
    track.recall(never, 0, L, 0)
    likeliest = np.argsort(never.reshape(L, E), axis=1)[:, :K]
    assert (np.sort(likeliest) == np.sort(ids[13])).all()


def test_repeated_text_is_foreseen() -> None:
    ids = text(4, 40)
    predictor = NextUsePredictor(L, E, K)
    drive(predictor, np.concatenate([ids, ids, ids[:20]]))
    predictor.begin(("a",))
    top = np.argsort(-predictor.scores, axis=1)[:, :K]
    assert np.mean([len(set(a) & set(b)) for a, b in zip(top.tolist(), ids[20].tolist(), strict=True)]) > 0.9 * K


def test_a_layer_that_is_to_come_is_worth_more_than_one_that_has_run() -> None:
    predictor = NextUsePredictor(L, E, K)
    drive(predictor, text(5, 3))
    predictor.begin(("a",))
    for layer in range(L - 1):
        row = text(6, 1)[0, layer]
        predictor.see(layer, row[None, :], row)
    phase = predictor.phase
    assert phase[L - 1] > phase[0] > phase[1]


def test_a_batch_is_aligned_sequence_by_sequence() -> None:
    one, two = text(7, 30), text(8, 30)
    predictor = NextUsePredictor(L, E, K)
    for _ in range(3):
        for a, b in zip(one, two, strict=True):
            predictor.begin(("one", "two"))
            for layer in range(L):
                ids = np.stack([a[layer], b[layer]])
                predictor.see(layer, ids, np.unique(ids))
            predictor.end()
    predictor.begin(("one", "two"))
    top = set(np.argsort(-predictor.scores[0])[: 2 * K].tolist())
    assert len(top & (set(one[0, 0].tolist()) | set(two[0, 0].tolist()))) >= 2 * K - 2


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    before, after = NextUsePredictor(L, E, K), NextUsePredictor(L, E, K)
    drive(before, text(9, 80))
    before.save(tmp_path / "state.safetensors")
    assert after.load(tmp_path / "state.safetensors")
    assert np.array_equal(after.memory.soon[:80], before.memory.soon[:80])
    assert np.array_equal(after.memory.before[:80], before.memory.before[:80])
    assert np.array_equal(after.learner.weights, before.learner.weights)
    assert np.array_equal(after.rates, before.rates)
    before.begin(("new",))
    after.begin(("new",))
    assert after.scores == pytest.approx(before.scores, abs=1e-5)


def test_a_ring_that_has_come_round_survives_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgemoe.experts.predict.next_use.MOST_SLOTS", 32)
    before, after = NextUsePredictor(L, E, K), NextUsePredictor(L, E, K)
    drive(before, text(10, 75))
    before.save(tmp_path / "state")
    assert after.load(tmp_path / "state")
    turn = 75 % 32
    assert np.array_equal(after.memory.chosen, np.roll(before.memory.chosen, -turn, axis=2))


@pytest.mark.parametrize("damage", ["absent", "garbage", "other model", "out of range"])
def test_a_state_that_does_not_fit_is_left_alone(damage: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path, fresh = tmp_path / "state", NextUsePredictor(L, E, K)
    if damage == "garbage":
        path.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    elif damage == "other model":
        NextUsePredictor(L, E + 1, K).save(path)
    elif damage == "out of range":
        other = NextUsePredictor(L, E, K)
        drive(other, text(11, 5))
        other.save(path)
        state = load_file(path)
        state["before"] = np.full_like(state["before"], 1000)
        save_file(state, path)
    assert not fresh.load(path)
    assert fresh.memory.filled == 0


def test_memory_is_bounded_for_large_models() -> None:
    assert NextUsePredictor(61, 256, 8).memory.soon.nbytes <= 64 << 20
    assert NextUsePredictor(2, 8, 2).memory.slots > recall.HORIZON

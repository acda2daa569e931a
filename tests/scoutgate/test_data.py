"""Data sets: written data is read unchanged, splits keep requests whole, damage is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from support.synthetic import EXPERTS, TOP_K, dataset, requests

from edgemoe.experts.predict.scoutgate_model import NO_TOKEN, ScoutGateShape
from edgemoe.types.step import StepMeta, StepRouting
from scoutgate.convert import public_meta, public_requests, requests_of
from scoutgate.data import SPLITS, Batches, Meta, Recording, Routes, flat_ids, gather, k_hot, write

SHAPE = ScoutGateShape(EXPERTS, TOP_K, embedding=4)


def test_written_data_is_read_unchanged(tmp_path: Path) -> None:
    recording = Recording(dataset(tmp_path, 20))
    for request, start in zip(requests(20), recording.starts, strict=False):
        part = slice(start, start + len(request.tokens))
        np.testing.assert_array_equal(recording.tokens[part], request.tokens)
        np.testing.assert_array_equal(recording.ids[part], request.ids)
        np.testing.assert_array_equal(recording.decode[part], request.decode)


def test_no_request_is_in_two_splits(tmp_path: Path) -> None:
    recording = Recording(dataset(tmp_path, 60))
    positions = [recording.positions(split) for split in SPLITS]
    assert sum(map(len, positions)) == recording.count
    owners = [set(recording.request[p].tolist()) for p in positions]
    assert not owners[0] & owners[1]
    assert not owners[0] & owners[2]
    assert not owners[1] & owners[2]


def test_equal_prompts_share_a_split() -> None:
    tokens, ids = np.arange(9, dtype=np.int32), np.zeros((9, 1, 1), np.int16)
    first = Routes(tokens, ids, np.arange(9) >= 5)
    second = Routes(np.where(np.arange(9) >= 5, 7, tokens).astype(np.int32), ids, np.arange(9) >= 5)
    assert first.group(0) == second.group(1)


def test_a_window_never_reaches_into_the_request_before(tmp_path: Path) -> None:
    recording = Recording(dataset(tmp_path, 6))
    begin = int(recording.starts[3])
    inputs = gather(recording, np.array([begin, begin + 2]), SHAPE)
    assert inputs.tokens[0, :-1].tolist() == [NO_TOKEN] * 7
    assert inputs.tokens[1, -3:].tolist() == recording.tokens[begin : begin + 3].tolist()
    assert (inputs.previous[0] == SHAPE.total).all()
    assert inputs.previous[1].tolist() == flat_ids(recording.ids[begin + 1 : begin + 2], EXPERTS)[0].tolist()


def test_the_next_token_is_unknown_at_the_end_of_a_request(tmp_path: Path) -> None:
    recording = Recording(dataset(tmp_path, 6))
    last = int(recording.starts[2]) - 1
    inputs = gather(recording, np.array([last - 1, last]), SHAPE)
    assert inputs.known.tolist() == [[True, True], [True, False]]
    assert k_hot(inputs, SHAPE)[0].sum(-1).tolist() == [len(EXPERTS) * TOP_K] * 2


def test_every_epoch_has_an_order_of_its_own_that_the_seed_repeats(tmp_path: Path) -> None:
    recording = Recording(dataset(tmp_path, 40))

    def epochs() -> list[list[int]]:
        batches = Batches(recording, "train", SHAPE, 64, seed=3)
        return [[int(b.tokens[0, -1]) for b in batches] for _ in range(2)]

    first, again = epochs(), epochs()
    assert first == again
    assert first[0] != first[1]


@pytest.mark.parametrize("name", ["tokens", "ids", "decode"])
def test_a_truncated_data_set_is_refused(tmp_path: Path, name: str) -> None:
    dataset(tmp_path, 5)
    file = tmp_path / f"{name}.bin"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=name):
        Recording(tmp_path)


def test_a_folder_that_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a data set"):
        Recording(tmp_path)
    dataset(tmp_path, 5)
    record = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**record, "format": 9}))
    with pytest.raises(ValueError, match="another format"):
        Recording(tmp_path)


def test_routes_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    meta = Meta("m", (4, 4), 1)
    good = np.zeros((3, 2, 1), np.int16)
    tokens, decode = np.zeros(3, np.int32), np.ones(3, bool)
    with pytest.raises(ValueError, match="does not have"):
        write(tmp_path, meta, [Routes(tokens, good + 4, decode)])
    with pytest.raises(ValueError, match="shape"):
        write(tmp_path, meta, [Routes(tokens, good[:2], decode)])
    with pytest.raises(ValueError, match="not a data set"):
        Recording(tmp_path)


def test_a_public_table_becomes_a_data_set_without_tokens(tmp_path: Path) -> None:
    layer = "|".join(["1 2 3 4"] * 24)
    table = tmp_path / "t.ids.csv.gz"
    with gzip.open(table, "wt") as text:
        text.write("req,pos,ids\n" + "".join(f"{r},{p},{layer}\n" for r in (4, 9) for p in range(3)))
    meta = public_meta([table])
    assert (meta.layers, meta.top_k, meta.model) == (24, 4, "openai/gpt-oss-20b")
    assert write(tmp_path / "data", meta, public_requests(table)) == 6
    recording = Recording(tmp_path / "data")
    assert not recording.has_tokens
    assert recording.starts.tolist() == [0, 3, 6]


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "t.csv.gz"
    with gzip.open(table, "wt") as text:
        text.write("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a routing table"):
        public_meta([table])


def step(requests: dict[str, tuple[int, list[int], bool]], seed: int = 0) -> StepRouting:
    """Builds a step of requests of (position, tokens, decode); its routes are 10 * token + layer."""
    tokens = np.array([t for _, part, _ in requests.values() for t in part])
    ids = (tokens[None, :, None] * 10 + np.arange(2)[:, None, None] + seed).astype(np.int16)
    return StepRouting(
        meta=StepMeta(
            requests=tuple(requests),
            query_lens=np.array([len(part) for _, part, _ in requests.values()]),
            decode=np.array([decode for _, _, decode in requests.values()]),
            tokens=tokens,
            positions=np.array([p + i for p, part, _ in requests.values() for i in range(len(part))]),
        ),
        ids=ids,
        weights=np.ones(ids.shape, np.float32),
        hints={},
        step_s=0.0,
        stall_s=0.0,
    )


def test_recorded_steps_become_whole_requests() -> None:
    steps = [
        step({"a": (0, [1, 2], False)}),
        step({"a": (2, [3], False), "b": (0, [7], False)}),
        step({"b": (1, [8], True), "a": (3, [4], True)}),
    ]
    a, b = sorted(requests_of(steps), key=lambda routes: routes.tokens[0])
    assert (a.tokens.tolist(), a.decode.tolist()) == ([1, 2, 3, 4], [False, False, False, True])
    assert (b.tokens.tolist(), b.decode.tolist()) == ([7, 8], [False, True])
    assert a.ids[:, :, 0].tolist() == [[10, 11], [20, 21], [30, 31], [40, 41]]


def test_a_pre_empted_request_is_recorded_once() -> None:
    steps = [
        step({"a": (0, [1, 2], False)}),
        step({"a": (2, [3], True)}),
        step({"a": (0, [1, 2, 3, 4], False)}, seed=1),
    ]
    (a,) = requests_of(steps)
    assert a.tokens.tolist() == [1, 2, 3, 4]
    assert a.decode.tolist() == [False, False, True, False]
    assert a.ids[0, 0, 0] == 11


def test_a_request_of_the_same_name_elsewhere_is_another() -> None:
    steps = [step({"a": (0, [1, 2], False)}), step({"a": (9, [5], True)})]
    assert [r.tokens.tolist() for r in requests_of(steps)] == [[1, 2], [5]]

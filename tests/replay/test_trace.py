"""Traces of every format, taken in turn, batched, and refused where they are damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from support.replay_kit import LAW, random_trace

from edgemoe.config.settings import RecordSettings
from edgemoe.errors import ConfigError
from edgemoe.replay.trace import Trace, load, parse_table, strip_template
from edgemoe.telemetry.recorder import Recorder
from edgemoe.telemetry.routing_recording import RecordingHeader
from edgemoe.types.step import StepMeta, StepRouting

TABLE = "seq,pos,ids\n0,0,3 1|2 0\n0,1,1 0|2 3\n1,0,0 2|1 3\n"


def test_a_table_is_read_request_by_request() -> None:
    first, second = parse_table(TABLE)
    assert first.tolist() == [[[1, 3], [0, 2]], [[0, 1], [2, 3]]]
    assert second.tolist() == [[[0, 2], [1, 3]]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n", "first line"),
        ("seq,pos,ids\n0,0\n", "three columns"),
        ("seq,pos,ids\n0,0,1 2|3 4\n0,1,1 2\n", "shapes"),
        ("seq,pos,ids\n0,0,1 2|3\n", "different numbers"),
        ("seq,pos,ids\n0,0,1 1|3 4\n", "twice"),
        ("seq,pos,ids\n0,0,1 x|3 4\n", "invalid literal"),
        ("seq,pos,ids\n0,0,1 2|3 40000\n", "40000"),
    ],
)
def test_a_damaged_table_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.ids.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        load([file])


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.ids.csv.gz"
    file.write_bytes(gzip.compress(TABLE.encode())[:-9])
    with pytest.raises(ConfigError, match="no routing table"):
        load([file])


def test_files_are_taken_in_turn_by_request(tmp_path: Path) -> None:
    a, b = tmp_path / "a.ids.csv", tmp_path / "b.ids.csv"
    a.write_text(TABLE)
    b.write_text("req,pos,ids\n9,5,0 1|0 1\n")
    assert [len(ids) for ids in load([a, b]).requests] == [2, 1, 1]
    assert load([a, b]).experts == 4
    assert load([a, b], limit=3).tokens == 3
    assert [len(ids) for ids in load([tmp_path]).requests] == [2, 1, 1]


def test_traces_of_two_models_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.ids.csv"
    other.write_text("seq,pos,ids\n0,0,1 2\n")
    with pytest.raises(ConfigError, match="not of one model"):
        load([LAW, other])


def test_a_batch_takes_a_token_of_each_request_and_fills_up() -> None:
    lengths = (3, 1, 2)
    requests = [np.full((n, 1, 1), i, np.int16) for i, n in enumerate(lengths)]
    assert [step.requests for step in Trace(requests, 4).steps(2)] == [(0, 1), (0, 2), (0, 2)]
    trace = random_trace(1)
    assert sum(len(step.requests) for step in trace.steps(3)) == trace.tokens


def test_tokens_of_a_template_are_left_out() -> None:
    random = np.random.default_rng(0)
    head, tail = random.integers(0, 8, (5, 2, 3)), random.integers(0, 8, (3, 2, 3))
    requests = [np.concatenate([head, random.integers(8, 16, (4, 2, 3)), tail]).astype(np.int16) for _ in range(2)]
    assert [len(ids) for ids in strip_template(requests)] == [12, 4]


def test_recordings_give_each_request_the_tokens_of_its_decode_steps(tmp_path: Path) -> None:
    recorder = Recorder(RecordSettings(dir=str(tmp_path)), RecordingHeader("digest", 3, 16, 2))
    draw = np.random.default_rng(0)
    lens = ((4, 1), (1, 1), (3, 2), (1, 1))  # a prompt; drafts add rows to a step
    all_ids = [np.argsort(draw.random((3, sum(each), 16)), axis=2)[:, :, :2].astype(np.int16) for each in lens]
    for each, ids in zip(lens, all_ids, strict=True):
        tokens = np.zeros(sum(each), np.int64)
        decode = np.array([each[0] != 4, True])
        meta = StepMeta(("a", "b"), np.array(each), decode, tokens, tokens, np.zeros(2, np.int64))
        recorder.add(StepRouting(meta, ids, np.ones(ids.shape, np.float32), {}, 0.0, 0.0))
    recorder.close()
    a, b = load([tmp_path]).requests
    rows = {"b": [ids[:, each[0] :] for each, ids in zip(lens, all_ids, strict=True)]}
    rows["a"] = [ids[:, : each[0]] for each, ids in zip(lens[1:], all_ids[1:], strict=True)]
    for read, parts in ((b, rows["a"]), (a, rows["b"])):
        assert np.array_equal(read, np.concatenate(parts, axis=1).swapaxes(0, 1))

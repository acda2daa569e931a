"""Recordings come back as they were, stay within bounds, and damaged ones are refused."""

from __future__ import annotations

import stat
import struct
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgemoe.config.settings import RecordSettings
from edgemoe.errors import StoreError
from edgemoe.replay.trace import load
from edgemoe.telemetry import recorder as recorder_module
from edgemoe.telemetry.recorder import BLOCK_STEPS, FILE_BYTES, Recorder
from edgemoe.telemetry.routing_recording import (
    AHEAD,
    MAGIC,
    OWN,
    SUFFIX,
    RecordingHeader,
    read_recording,
    recordings_in,
)
from edgemoe.types.step import StepMeta, StepRouting

HEADER = RecordingHeader("digest", 3, 16, 2)
WITH_STATES = RecordingHeader("digest", 3, 16, 2, hidden=6, bf16=True)


def step(seed: int, decode: tuple[bool, ...] = (True, False), lens: tuple[int, ...] = (1, 4)) -> StepRouting:
    random, tokens = np.random.default_rng(seed), sum(lens)
    return StepRouting(
        meta=StepMeta(
            requests=tuple(f"r{i}" for i in range(len(lens))),
            query_lens=np.array(lens),
            decode=np.array(decode),
            tokens=random.integers(0, 1 << 17, tokens),
            positions=np.arange(tokens),
            conversations=random.integers(1, 1 << 56, len(lens)),
        ),
        ids=np.argsort(random.random((3, tokens, 16)), axis=2)[:, :, :2].astype(np.int16),
        weights=random.random((3, tokens, 2)).astype(np.float32),
        hints={},
        step_s=0.1,
        stall_s=0.0,
    )


def record(
    directory: Path, steps: list[StepRouting], file_bytes: int = FILE_BYTES, max_bytes: int = 1 << 30
) -> list[Path]:
    recorder = Recorder(RecordSettings(dir=str(directory), max_bytes=max_bytes), HEADER, file_bytes)
    for each in steps:
        recorder.add(each)
    recorder.close()
    assert recorder.dropped == 0
    return sorted(directory.glob("*.routes"))


def test_steps_come_back_as_they_were(tmp_path: Path) -> None:
    steps = [step(i) for i in range(BLOCK_STEPS + 5)]
    (file,) = record(tmp_path / "new", steps)
    header, read = read_recording(file)
    assert header == HEADER
    for before, after in zip(steps, read, strict=True):
        assert after.meta.requests == before.meta.requests
        for name in ("query_lens", "decode", "tokens", "positions", "conversations"):
            assert np.array_equal(getattr(after.meta, name), getattr(before.meta, name))
        assert np.array_equal(after.ids, before.ids)
        assert after.weights == pytest.approx(before.weights, abs=1e-3)


def hinted(number: int, tokens: int) -> StepRouting:
    """Returns a step that only decodes, with hints, or with one sequence that does not decode, without."""
    plain = step(number, (True,) * tokens, (1,) * tokens)
    hints = {AHEAD: np.random.default_rng(number).random((3, tokens, 16), np.float32)} if number % 3 else {}
    return replace(plain, hints=hints)


def test_hints_come_back_where_they_are_asked_for(tmp_path: Path) -> None:
    steps = [hinted(number, tokens=1 + number % 5) for number in range(2 * BLOCK_STEPS)]
    for asked in (True, False):
        header = RecordingHeader("digest", 3, 16, 2, hints=asked)
        recorder = Recorder(RecordSettings(dir=str(tmp_path / str(asked))), header, 100_000)
        for each in steps:
            recorder.add(each)
        recorder.close()
        read = [each for file in sorted((tmp_path / str(asked)).iterdir()) for each in read_recording(file)[1]]
        for before, after in zip(steps, read, strict=True):
            assert np.array_equal(after.ids, before.ids)
            assert after.hints.keys() == (before.hints.keys() if asked else set())
            for distance, hints in after.hints.items():
                assert hints == pytest.approx(before.hints[distance], abs=1e-3)


def test_a_step_without_requests_shifts_no_hints(tmp_path: Path) -> None:
    steps = [step(0, (), ()), hinted(1, tokens=2), hinted(2, tokens=1)]
    recorder = Recorder(RecordSettings(dir=str(tmp_path)), RecordingHeader("digest", 3, 16, 2, hints=True))
    for each in steps:
        recorder.add(each)
    recorder.close()
    (file,) = tmp_path.iterdir()
    for before, after in zip(steps, read_recording(file)[1], strict=True):
        assert after.hints.keys() == before.hints.keys()
        for distance, hints in after.hints.items():
            assert hints == pytest.approx(before.hints[distance], abs=1e-3)


def with_states(number: int, tokens: int, bf16: bool) -> StepRouting:
    """Returns a step with hidden states of width 6 and gate outputs, or every third step without."""
    plain = hinted(number, tokens)
    if number % 3 == 1:
        return plain
    random = np.random.default_rng(number)
    states = 100 * random.standard_normal((3, tokens, 6), np.float32)
    if bf16:
        states.view(np.uint32)[:] &= np.uint32(0xFFFF0000)
    own = random.random((3, tokens, 16)).astype(np.float16).astype(np.float32)
    return replace(plain, hints=plain.hints | {OWN: own}, hidden=states)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("hints", [True, False])
def test_hidden_states_come_back_exactly(hints: bool, bf16: bool, tmp_path: Path) -> None:
    steps = [with_states(number, 1 + number % 5, bf16) for number in range(BLOCK_STEPS + 100)]
    header = RecordingHeader("digest", 3, 16, 2, hints, 6, bf16)
    recorder = Recorder(RecordSettings(dir=str(tmp_path)), header, 100_000)
    for each in steps:
        recorder.add(each)
    recorder.close()
    read = [each for file in sorted(tmp_path.iterdir()) for each in read_recording(file)[1]]
    for before, after in zip(steps, read, strict=True):
        assert np.array_equal(after.ids, before.ids)
        assert after.hints.keys() == {each for each in before.hints if hints or each == OWN}
        assert (after.hidden is None) == (before.hidden is None)
        if before.hidden is not None:
            assert np.array_equal(after.hidden, before.hidden)
            assert np.array_equal(after.hints[OWN], before.hints[OWN])


def test_a_step_with_more_hidden_states_than_may_wait_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "WAITING_BYTES", 300_000)
    recorder = Recorder(RecordSettings(dir=str(tmp_path)), RecordingHeader("digest", 3, 16, 2, False, 6), 10_000)
    small, large = with_states(0, 2, False), with_states(0, 3000, False)
    for each in (small, large, small):
        recorder.add(each)
    recorder.close()
    assert recorder.dropped == 1
    assert [len(each.meta.tokens) for file in tmp_path.iterdir() for each in read_recording(file)[1]] == [2, 2]


def test_only_the_owner_may_read_them(tmp_path: Path) -> None:
    (file,) = record(tmp_path / "new", [step(0)])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_files_rotate_and_the_oldest_go(tmp_path: Path) -> None:
    steps = [step(i, (False,), (60,)) for i in range(6 * BLOCK_STEPS)]
    files = record(tmp_path, steps, file_bytes=60_000, max_bytes=200_000)
    assert len(files) > 1
    assert sum(file.stat().st_size for file in files) <= 200_000
    *_, last = read_recording(files[-1])[1]
    assert np.array_equal(last.ids, steps[-1].ids)


def test_a_step_larger_than_a_file_takes_the_room_of_older_ones(tmp_path: Path) -> None:
    record(tmp_path, [step(i, (False,), (60,)) for i in range(400)], file_bytes=20_000, max_bytes=100_000)
    assert len(list(tmp_path.glob("*.routes"))) > 1
    large = step(1, (False,), (16_000,))
    record(tmp_path, [large], file_bytes=20_000, max_bytes=100_000)
    (file,) = tmp_path.glob("*.routes")
    assert file.stat().st_size > 100_000
    (last,) = read_recording(file)[1]
    assert np.array_equal(last.ids, large.ids)


def test_no_more_than_the_bound_waits_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "WAITING_BYTES", 100_000)
    go_on = threading.Event()
    write = Recorder._write
    monkeypatch.setattr(Recorder, "_write", lambda self, block: go_on.wait(60) and write(self, block))
    recorder = Recorder(RecordSettings(dir=str(tmp_path)), HEADER, 20_000)
    for number in range(400):
        recorder.add(step(number, (False,), (60,)))
    assert recorder.dropped > 100
    assert sum(filled.bytes for filled in recorder._full) <= 100_000
    go_on.set()
    recorder.close()
    kept = sum(len(list(read_recording(file)[1])) for file in tmp_path.glob("*.routes"))
    assert kept == 400 - recorder.dropped


def test_a_recording_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    (file,) = record(tmp_path, [step(i) for i in range(3 * BLOCK_STEPS)])
    file.write_bytes(file.read_bytes()[:-20])
    assert 0 < len(list(read_recording(file)[1])) < 3 * BLOCK_STEPS


@pytest.mark.parametrize("begun", [b"", struct.pack("<I", 3000) + b"\x78\x01\xab"], ids=["after a block", "within one"])
def test_zeros_that_power_loss_leaves_end_a_recording(begun: bytes, tmp_path: Path) -> None:
    (file,) = record(tmp_path, [step(i) for i in range(2 * BLOCK_STEPS)])
    whole, steps = file.read_bytes(), len(list(read_recording(file)[1]))
    file.write_bytes(whole + begun + bytes(8192))
    assert len(list(read_recording(file)[1])) == steps
    file.write_bytes(whole + begun + bytes(8192) + b"more")
    with pytest.raises(StoreError, match="is damaged"):
        list(read_recording(file)[1])


def test_recordings_that_ended_before_they_had_begun_are_left_out_of_their_folder(tmp_path: Path) -> None:
    (file,) = record(tmp_path, [step(i, decode=(True, True), lens=(1, 1)) for i in range(10)])
    whole = file.read_bytes()
    tokens = sum(map(len, load([tmp_path]).requests))
    for number, begun in enumerate((b"", bytes(4096), MAGIC[:3], MAGIC, whole[: len(MAGIC) + 9])):
        (tmp_path / f"{number}.routes").write_bytes(begun)
    assert recordings_in(tmp_path) == [file]
    assert sum(map(len, load([tmp_path]).requests)) == tokens
    (tmp_path / "9.routes").write_bytes(b"something else")
    with pytest.raises(StoreError, match="no recording"):
        load([tmp_path])


def test_a_recording_of_an_older_release_is_read(tmp_path: Path) -> None:
    (file,) = record(tmp_path, [step(0), step(1)])
    data, at = file.read_bytes(), len(MAGIC)
    older = bytearray(data[:at])
    for places in (4, 7):  # of the header and of the block, then
        (length,) = struct.unpack("<I", data[at : at + 4])
        values = msgspec.msgpack.decode(zlib.decompress(data[at + 4 : at + 4 + length]))
        block, at = zlib.compress(msgspec.msgpack.encode(values[:places])), at + 4 + length
        older += struct.pack("<I", len(block)) + block
    file.write_bytes(older)
    for number, after in enumerate(read_recording(file)[1]):
        assert np.array_equal(after.ids, step(number).ids)
        assert not len(after.meta.conversations)


@pytest.mark.parametrize("where", ["magic", "stream", "end", "shape", "expert", "states"])
def test_a_damaged_recording_is_refused(where: str, tmp_path: Path) -> None:
    recorder = Recorder(RecordSettings(dir=str(tmp_path)), HEADER if where != "states" else WITH_STATES)
    recorder.add(with_states(0, 5, True))
    recorder.close()
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    if where == "magic":
        data[0] ^= 1
    elif where == "stream":
        data[len(MAGIC) + 6] ^= 0xFF
    elif where == "end":  # of the last block, which says that it is so short
        (length,) = struct.unpack("<I", data[len(MAGIC) : len(MAGIC) + 4])
        at = len(MAGIC) + 4 + length
        (length,) = struct.unpack("<I", data[at : at + 4])
        data = data[:at] + struct.pack("<I", length - 4) + data[at + 4 : at + length]
    else:
        header = {
            "shape": RecordingHeader("digest", 3, 16, 3),
            "expert": RecordingHeader("digest", 3, 4, 2),
            "states": HEADER,
        }[where]
        block, rest = zlib.compress(msgspec.msgpack.encode(header)), data[len(MAGIC) :]
        (length,) = struct.unpack("<I", rest[:4])
        data = bytearray(MAGIC + struct.pack("<I", len(block)) + block) + rest[4 + length :]
    file.write_bytes(data)
    with pytest.raises(StoreError):
        list(read_recording(file)[1])


@pytest.mark.parametrize(
    "header",
    [
        RecordingHeader("digest", 0, 16, 2),
        RecordingHeader("digest", 3, 0, 0),
        RecordingHeader("digest", 3, 16, 0),
        RecordingHeader("digest", 3, 16, 17),
        RecordingHeader("digest", 3, 16, 2, hidden=-1),
    ],
)
def test_a_recording_of_an_impossible_model_is_refused_at_once(header: RecordingHeader, tmp_path: Path) -> None:
    block = zlib.compress(msgspec.msgpack.encode(header))
    (tmp_path / "file").write_bytes(MAGIC + struct.pack("<I", len(block)) + block)
    with pytest.raises(StoreError, match="is damaged"):
        read_recording(tmp_path / "file")


def test_a_directory_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"record\.dir"):
        Recorder(RecordSettings(dir=str(tmp_path / "file" / "below")), HEADER)


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    record(tmp_path, [step(i, (True, True), (1, 1)) for i in range(10)])
    trace = load([tmp_path])
    assert [len(ids) for ids in trace.requests] == [10, 10]


def test_a_file_that_somebody_deletes_meanwhile_ends_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *args: [tmp_path / f"0{SUFFIX}", *real(*args)])
    files = record(tmp_path, [step(i, (False,), (60,)) for i in range(40)], file_bytes=20_000, max_bytes=100_000)
    assert len(files) > 1

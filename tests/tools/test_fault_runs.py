"""The trials that the table of faults still lacks, and processes that run them side by side."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.waiting import wait_until

from tools.bench.fault_runs import MOST, Beside, Piece, complaints, ended_by_sigterm, lacking, piece_of
from tools.bench.fault_trial import TOKENS, Record

MAKER = """
import json, sys, time
name, most, status, *numbers = sys.argv[1:]
request = {"prefix": True, "complete": True, "right": True}
for number in numbers[: int(most)]:
    record = {"row": "kill-peer", "disk": "all", "absent_s": 2.0, "trial": int(number), "trial_s": 0.1}
    print(json.dumps(record | {"requests": [request], "died": []}), file=sys.stderr, flush=True)
print('{"event": "what a daemon logged"}', file=sys.stderr)
print("the end of", name, file=sys.stderr)
sys.exit(int(status))
"""


def record(**changes: object) -> Record:
    request = {"prefix": True, "complete": True, "right": True}
    return {"row": "kill-peer", "disk": "all", "absent_s": 2.0, "trial": 1, "requests": [request], "died": []} | changes


def test_missing_trials_are_those_without_a_matching_record() -> None:
    log = [
        record(disk="two-thirds", trial=0, absent_s=30.0, tokens=TOKENS),
        record(disk="two-thirds", trial=2, absent_s=2.0, tokens=TOKENS),  # no trial of that number is planned so
        record(disk="two-thirds", trial=1),  # from before trials had long requests
        record(disk="all", trial=1, tokens=TOKENS),
    ]
    assert lacking(log, ["kill-peer"], {"two-thirds": 4, "all": 2}) == [
        Piece("kill-peer", "two-thirds", 30.0, (2,)),
        Piece("kill-peer", "two-thirds", 2.0, (1, 3)),
        Piece("kill-peer", "all", 30.0, (0,)),
    ]
    assert lacking([], ["plan-change"], {"all": 2}) == [Piece("plan-change", "all", 2.0, (0, 1))]
    assert [len(piece.trials) for piece in lacking([], ["plan-change"], {"all": 2 * MOST + 1})] == [MOST, MOST, 1]
    assert lacking([], ["prefill-kill"], {"two-thirds": 2}) == []


def test_a_piece_is_told_to_its_process_by_a_word() -> None:
    piece = Piece("kill-peer", "two-thirds", 30.0, (1, 3))
    assert piece_of(piece.word) == piece
    for wrong in ("kill-peer", "kill-peer,half,2,1", "kill-all,all,2,1", "kill-peer,all,soon,1", "kill-peer,all,2,"):
        with pytest.raises(ValueError, match=r"."):
            piece_of(wrong)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"requests": [{"prefix": False, "complete": True, "right": False}]}, ["wrong tokens", "not complete"]),
        ({"requests": [{"prefix": True, "complete": False, "right": False}]}, ["not complete"]),
        ({"row": "kill-peer-1", "requests": [{"prefix": True, "complete": False, "right": False}]}, []),
        ({"died": ["b"], "pins_lost": 2, "leaked": 0.0}, ["pins_lost 2", "died: b"]),
    ],
)
def test_a_faulty_trial_is_named(changes: Record, wrong: list[str]) -> None:
    assert complaints(record(**changes)) == wrong


class Runs:
    """Pieces by name, with the most trials that one process runs, and its exit status."""

    def __init__(self, folder: Path, within_s: float = 60.0, **pieces: tuple[int, int]) -> None:
        self.said, self.started = io.StringIO(), list[str]()
        self.pieces = pieces
        self.maker = folder / "maker.py"
        self.maker.write_text(MAKER)
        console = Console(file=self.said, width=200)
        self.beside = Beside(self.command, time.monotonic() + within_s, console)

    def command(self, piece: Piece) -> list[str]:
        self.started.append(piece.row)
        most, status = self.pieces[piece.row]
        return [sys.executable, "-S", str(self.maker), piece.row, str(most), str(status), *map(str, piece.trials)]

    def run(self, at_once: int) -> None:
        self.beside.run([Piece(name, "all", 2.0, (1, 3, 5)) for name in self.pieces], at_once)


def test_all_pieces_are_made_and_one_that_fails_goes_on_unless_nothing_comes_of_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path, whole=(3, 0), fails=(1, 1), never=(0, 1))
    runs.run(2)
    assert sorted(runs.started) == ["fails"] * 3 + ["never", "whole"]
    assert runs.beside.made == 6
    assert runs.beside.failed.count("never,all,2,1+3+5") == 1
    said = runs.said.getvalue()
    assert "6 of 9, " in said
    assert "never,all,2,1+3+5 ended with status 1:\n" in said
    assert "\nthe end of never\n" in said
    assert "trial 5: 0.1 s, 1 of 1 right" in said


def test_nothing_begins_once_the_time_is_over(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 0.0, whole=(3, 0))
    runs.run(1)
    assert (runs.started, runs.beside.made, runs.beside.failed) == ([], 0, [])


def test_an_interruption_ends_the_processes_first(tmp_path: Path) -> None:
    runs, ended = Runs(tmp_path, sleeps=(1, 0)), tmp_path / "ended"
    runs.maker.write_text(
        "import pathlib, signal, sys, time\n"
        "def leave(*_):\n"
        f"    pathlib.Path({str(ended)!r}).touch()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "time.sleep(60)\n"
    )

    def end() -> None:
        wait_until((tmp_path / "begun").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    with pytest.raises(SystemExit), ended_by_sigterm():
        runs.run(1)
    assert ended.exists()
    assert runs.beside.failed == []

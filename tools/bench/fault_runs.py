"""Runs the trials that the table of faults lacks, in parallel processes, and shows the progress."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tools.bench.fault_rows import ROWS
from tools.bench.fault_trial import TOKENS, Record

MOST = 20  # trials of a piece, which costs the start of a cluster, and rows are done by several at once
DISKS = ("two-thirds", "all")  # of the store on each disk; with one replica it is a third
RECORD = '{"row": '  # how a trial's record begins
LAST_LINES = 15  # of a failed process's output
COUNTS = ("regressions", "let_in", "pins_lost", "leaked", "stale_obeyed", "wrong_obeyed")  # which must be 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Trials of one row on one cluster."""

    row: str
    disk: str
    absent_s: float
    trials: tuple[int, ...]

    @property
    def word(self) -> str:
        return f"{self.row},{self.disk},{self.absent_s:g},{'+'.join(map(str, self.trials))}"


def piece_of(word: str) -> Piece:
    """Parses `Piece.word`. Raises ValueError."""
    row, disk, absent_s, trials = word.split(",")
    if row not in ROWS or disk not in DISKS:
        raise ValueError(f"there is no row {row} with {disk} of the store")
    return Piece(row, disk, float(absent_s), tuple(map(int, trials.split("+"))))


def read(log: Path) -> list[Record]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def arrangement(record: Record) -> tuple[int, str]:
    """Returns the tokens of a request, and the share on disk; the oldest records lack both."""
    return record.get("tokens", 16), record.get("disk", DISKS[0])


def lacking(records: Iterable[Record], rows: Sequence[str], wanted: Mapping[str, int]) -> list[Piece]:
    """Returns the missing trials of each row, by disk; rows with separate prefill need the whole store."""
    done = {
        (record["row"], record.get("disk", DISKS[0]), record.get("absent_s"), record["trial"])
        for record in records
        if arrangement(record)[0] == TOKENS
    }
    pieces = []
    for disk, trials in wanted.items():
        for row in rows:
            if ROWS[row].apart and disk != "all":
                continue
            absent = ROWS[row].absent_s
            for which, absent_s in enumerate(absent):
                numbers = range(which, trials, len(absent))
                lacks = tuple(number for number in numbers if (row, disk, absent_s, number) not in done)
                pieces += [Piece(row, disk, absent_s, lacks[at : at + MOST]) for at in range(0, len(lacks), MOST)]
    return pieces


def complaints(record: Record) -> list[str]:
    """Returns the faults of a trial's record."""
    asked = record["requests"]
    spared = ROWS[record["row"]].replicas > 1
    found = [f"{name} {record[name]}" for name in COUNTS if record.get(name)]
    found += ["wrong tokens"] if not all(one["prefix"] for one in asked) else []
    found += ["not complete"] if spared and not all(one["complete"] and one["right"] for one in asked) else []
    return found + ([f"died: {', '.join(record['died'])}"] if record["died"] else [])


class Beside:
    """Runs pieces, each in a process of its own, several at once."""

    def __init__(self, command: Callable[[Piece], list[str]], ends_s: float, console: Console) -> None:
        """Runs pieces by `command`, which prints each trial's record on standard error, and starts none after
        `ends_s`.
        """
        self.made, self.failed = 0, list[str]()
        self._command, self._ends_s, self._console = command, ends_s, console
        self._pieces: deque[Piece] = deque()
        self._children: set[subprocess.Popen[str]] = set()
        self._lock, self._began_s, self._total = threading.Lock(), time.monotonic(), 0
        self._over = threading.Event()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = TaskID(0)

    @property
    def rate(self) -> float:
        """A column with the trials per minute."""
        return 60 * self.made / max(time.monotonic() - self._began_s, 1e-3)

    def run(self, pieces: Sequence[Piece], at_once: int) -> None:
        """Returns when all pieces have run, or the time is over. An exception ends the processes, too."""
        self._pieces.extend(pieces)
        self._total = sum(len(piece.trials) for piece in pieces)
        self._all = self._progress.add_task("all", total=self._total, rate="")
        with self._progress, ThreadPoolExecutor(at_once) as threads:
            working = [threads.submit(self._work) for _ in range(at_once)]
            try:
                for one in working:
                    one.result()
            finally:
                self._over.set()
                for child in self._children.copy():
                    child.send_signal(signal.SIGTERM)  # takes its test bed down

    def _work(self) -> None:
        while not self._over.is_set() and time.monotonic() < self._ends_s:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            made = self._make(piece)
            if made and len(made) < len(piece.trials):  # it failed, or the time is over
                rest = tuple(number for number in piece.trials if number not in made)
                self._pieces.append(Piece(piece.row, piece.disk, piece.absent_s, rest))

    def _make(self, piece: Piece) -> set[int]:
        """Returns the trials that were made."""
        made, said = set[int](), deque[str](maxlen=LAST_LINES)
        bar = self._progress.add_task(piece.word.rpartition(",")[0], total=len(piece.trials), rate="")
        pipe = subprocess.PIPE
        with subprocess.Popen(self._command(piece), stdout=subprocess.DEVNULL, stderr=pipe, text=True) as child:
            self._children.add(child)
            if self._over.is_set():
                child.terminate()
            assert child.stderr is not None
            for line in child.stderr:
                if line.startswith(RECORD):  # daemons' log lines may be among the rest
                    record = json.loads(line)
                    made.add(record["trial"])
                    self._note(record)
                    self._progress.advance(bar)
                else:
                    said.append(line)
        self._children.discard(child)
        self._progress.remove_task(bar)
        if (status := child.returncode) and not self._over.is_set():
            self.failed.append(piece.word)
            self._console.print(f"{piece.word} ended with status {status}:\n{''.join(said)}", markup=False)
        return made

    def _note(self, record: Record) -> None:
        with self._lock:
            self.made += 1
        wrong = complaints(record)
        if wrong or not self._console.is_terminal:
            right = sum(one["right"] for one in record["requests"])
            self._console.print(
                f"{self.made} of {self._total}, {self.rate:.1f} a minute: {record['row']} {record['disk']} "
                f"{record['absent_s']:g} s, trial {record['trial']}: {record['trial_s']:.1f} s, "
                f"{right} of {len(record['requests'])} right{''.join(f'; {what}' for what in wrong)}",
                markup=False,
                soft_wrap=True,
            )
        self._progress.update(self._all, advance=1, rate=f"{self.rate:.1f} a minute")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raises SystemExit in the block at SIGTERM."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

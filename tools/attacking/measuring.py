"""Measures one attack: rounds of the victim alone and under it, one after the other on one daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tools.attacking.attacked import ATTACKER, Attacked
from tools.attacking.with_key import ONE_STREAM

SETTLE_S = 2.0  # of an attack, before the victim begins
RECOVER_S = 60.0  # that recovery is waited for
SHORT_TOKENS = 16  # of an answer that tells whether the daemon has recovered
END_S = 30.0
FRESH = 5  # new connections of the victim's in each round


@dataclass(slots=True)
class Measured:
    """The figures of one attack: gaps of the victim, memory, recovery, log lines."""

    attack: str
    alone_s: list[float] = field(default_factory=list)  # gaps between the victim's tokens
    beside_s: list[float] = field(default_factory=list)  # beside one stream of the attacker's, its equal share
    under_s: list[float] = field(default_factory=list)
    begin_s: list[float] = field(default_factory=list)  # in the first answer, while the attacker has long steps left
    front_mb: float = 0.0  # peak
    engine_mb: float = 0.0  # peak
    engine_before_mb: float = 0.0
    fresh_s: float = 0.0  # the slowest answer on a new connection of the victim's
    files: int = 0  # of the front, open at once
    recover_s: float = 0.0
    log_lines: int = 0
    engines: int = 1  # started since the daemon was
    wrong: int = 0  # answers of the victim that were not as before
    answers: dict[str, int] = field(default_factory=dict)  # of the attacker, by status

    @property
    def ratio(self) -> float:
        """Returns the victim's p99 gap under the attack in undisturbed ones."""
        return p99(self.under_s) / p99(self.alone_s)

    @property
    def ratio_to_share(self) -> float:
        """Returns the victim's p99 gap under the attack in those beside one stream."""
        return p99(self.under_s) / p99(self.beside_s)

    def as_json(self) -> str:
        """Returns the figures without the single gaps."""
        whole = asdict(self)
        gaps = {name: whole.pop(name) for name in ("alone_s", "beside_s", "under_s", "begin_s")}
        for name, found in gaps.items():
            whole |= {f"{name}_{part}": round(np.percentile(found, part), 4) for part in (50, 99)} if found else {}
        return json.dumps(whole)


def p99(gaps_s: list[float]) -> float:
    """Returns the 99th percentile; infinite where there are none."""
    return float(np.percentile(gaps_s, 99)) if gaps_s else float("inf")


@contextmanager
def attacking(attack: str, attacked: Attacked, answers: dict[str, int]) -> Iterator[None]:
    """Attacks in a process of its own while the `with` block runs, and then adds up the answers."""
    command = [sys.executable, "-m", "tools.attacking.attacker", attack, attacked.address, attacked.keys[ATTACKER]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()  # it has begun
            yield
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                said, _ = child.communicate(timeout=END_S)
                for status, count in json.loads(said or "{}").items():
                    answers[status] = answers.get(status, 0) + count
            except subprocess.TimeoutExpired:
                child.kill()


def measure(attack: str, attacked: Attacked, rounds: int, tokens: int) -> Measured:
    """Measures an attack in some rounds."""
    seen = Measured(attack, engine_before_mb=attacked.now_mb())
    right = attacked.stream(tokens).text
    usual_s = min(sum(attacked.stream(SHORT_TOKENS).gaps_s) for _ in range(3))
    attacked.forget_peaks()
    before = attacked.log_lines()
    with attacking(attack, attacked, seen.answers):
        time.sleep(SETTLE_S)
        _add_answer(seen, seen.begin_s, attacked.stream(tokens), right)
    for _ in range(rounds):
        _add_answer(seen, seen.alone_s, attacked.stream(tokens), right)
        with attacking(ONE_STREAM, attacked, {}):
            time.sleep(SETTLE_S)
            _add_answer(seen, seen.beside_s, attacked.stream(tokens), right)
        with attacking(attack, attacked, seen.answers):
            time.sleep(SETTLE_S)
            _add_answer(seen, seen.under_s, attacked.stream(tokens), right)
            seen.fresh_s = max(seen.fresh_s, *(attacked.fresh_s() for _ in range(FRESH)))
            seen.files = max(seen.files, attacked.files())
            front, engine = attacked.peaks_mb()
            seen.front_mb, seen.engine_mb = max(front, seen.front_mb), max(engine, seen.engine_mb)
        seen.recover_s = max(seen.recover_s, _recovery_s(attacked, usual_s))
    seen.log_lines = attacked.log_lines() - before
    seen.engines = attacked.health()["engine"]["starts"]
    return seen


def _add_answer(seen: Measured, gaps_s: list[float], answer: Any, right: str) -> None:
    gaps_s += answer.gaps_s
    seen.wrong += answer.status != 200 or answer.text != right


def _recovery_s(attacked: Attacked, usual_s: float) -> float:
    """Returns the seconds until short answers take at most twice their usual time."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < RECOVER_S:
        asked_s = time.monotonic() - began_s
        if sum(attacked.stream(SHORT_TOKENS).gaps_s) <= 2 * usual_s:
            return asked_s
    return RECOVER_S

"""Runs a `llama-bench` program, of llama.cpp or of one derived from it, on a random model of the same shape.

Each measurement is a process of its own, which loads the model first. It decodes one sequence at a time.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

LIMIT_S = 600.0  # of one run


class LlamaBench:
    """One program and one file of weights."""

    def __init__(self, command: str, model: Path, threads: int) -> None:
        """Takes the program's path, with options of its own if need be."""
        self._command = [*shlex.split(command), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]

    def decode(self, steps: int) -> float:
        """Returns the mean seconds of a step of one sequence."""
        return 1 / self._tokens_per_s(0, steps)

    def prompt(self, tokens: int) -> float:
        """Returns the seconds of a prompt."""
        return tokens / self._tokens_per_s(tokens, 0)

    def _tokens_per_s(self, prompt: int, steps: int) -> float:
        command = [*self._command, "-p", str(prompt), "-n", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        try:
            (found,) = json.loads(done.stdout)
            return float(found["avg_ts"])
        except (ValueError, KeyError) as error:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-500:]}") from error

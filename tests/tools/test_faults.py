"""Three daemons in boxes of the test bed, through every kind of fault: three trials of each.

`python -m tools.bench.faults` runs the same trials by the hundred.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tools.bench.fault_rows import ROWS
from tools.bench.fault_trial import Answers, Record, Trial
from tools.bench.faults import cluster, references
from tools.testbed.bed import why_not
from tools.testbed.daemons import Cluster
from tools.testbed.float32_model import float32_demo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built"),
]


def _nothing(trial: Trial) -> Record:
    raise AssertionError("only a cluster of this kind is expected")


class Boxes:
    """One cluster at a time, as the rows need it."""

    def __init__(self, folder: Path) -> None:
        self.store = float32_demo(folder)
        self._answers: dict[int, Answers] = {}  # by the prompts' length
        self._folder, self._open = folder, ExitStack()
        self._kind: object = None
        self._cluster: Cluster | None = None

    def __call__(self, row: str) -> Cluster:
        kind = ROWS[row]
        wanted = replace(kind, run=_nothing)
        if self._cluster is None or self._kind != wanted:
            self.close()
            self._kind = wanted
            self._cluster = self._open.enter_context(cluster(self._folder / row, self.store, kind))
        return self._cluster

    def answers(self, row: str) -> Answers:
        """Returns the correct answers."""
        length = ROWS[row].prompt_tokens
        if length not in self._answers:
            self._answers[length] = references(self._folder, self.store, length)
        return self._answers[length]

    def close(self) -> None:
        self._open.close()
        self._cluster = None


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    made = Boxes(tmp_path_factory.mktemp("boxes"))
    yield made
    made.close()


@pytest.mark.parametrize("row", ROWS)
def test_a_fault_costs_no_request_and_no_token(row: str, boxes: Boxes) -> None:
    made = boxes(row)
    for number in range(3):
        found = ROWS[row].run(Trial(made, boxes.answers(row), random.Random(f"test {row} {number}")))
        assert all(request["prefix"] for request in found["requests"]), found  # never a wrong token
        if ROWS[row].replicas > 1:
            assert all(request["right"] and request["complete"] for request in found["requests"]), found
        else:
            assert all(request["complete"] or "missing_expert" in request["error"] for request in found["requests"])
        assert not found.get("stale_obeyed")
        assert not found.get("regressions")
        assert not found.get("pins_lost")
        assert not found.get("wrong_obeyed")
        assert not found.get("let_in")
        assert not found.get("leaked")
        assert found.get("guest") == found.get("expected")  # clients that behaved got their answers

"""Steps of few rows as a GPU runs them, without a GPU: right in every family, and without a question to the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import DISTINCT, FAMILIES, GRAPHED

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "interpreted_steps.py"


TOGETHER = 16  # cases in one process


JOINING = (
    "qwen3_moe by turns",
    "qwen3_5_moe by turns",
)  # sequences join and leave: plain layers, and layers with states
WITHOUT_GATES = "nemotron_h without latents"  # experts that read the hidden state itself


def turn(family: str) -> str:
    """Returns the case of a family that the gate runs: its own KV type or int8, by turns."""
    return family if tuple(FAMILIES).index(family) % 2 else f"{family} int8"


CASES = [case for family in GRAPHED for case in (family, f"{family} int8", f"{family} by turns")]
LIKE_OTHERS = ("olmoe", "glm4_moe", "minimax_m2")  # all that they have is in other families' steps
PLAIN = [
    family
    for family in DISTINCT
    if family in GRAPHED and f"{family} by turns" not in JOINING and family not in LIKE_OTHERS
]
GATE = [*JOINING, WITHOUT_GATES, *map(turn, PLAIN)]
SLOW = [case for case in CASES if case not in GATE]


def group_of(case: str) -> tuple[str, ...]:
    """Returns the cases that run in the same process."""
    cases = GATE if case in GATE else SLOW
    start = cases.index(case) // TOGETHER * TOGETHER
    return tuple(cases[start : start + TOGETHER])


@cache
def run_steps(cases: tuple[str, ...]) -> dict[str, Any]:
    """Returns the results of the script for each case."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, "float32", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*GATE, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_steps_of_few_rows_equal_eager_steps_and_do_not_wait(case: str) -> None:
    found = run_steps(group_of(case))[case]
    assert max(found["errors"]) < 1e-5
    assert found["asked"] == [], "the host would wait for the GPU"
    assert found["equal"], "logits depend on where the experts lie"

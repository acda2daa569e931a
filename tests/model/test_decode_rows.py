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
from support.tiny_models import FAMILIES

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "interpreted_steps.py"


TOGETHER = 6  # families in one process, half of whose time is imports


def group_of(family: str) -> tuple[str, ...]:
    """Returns the families that run in the same process."""
    names = tuple(FAMILIES)
    start = names.index(family) // TOGETHER * TOGETHER
    return names[start : start + TOGETHER]


@cache
def run_steps(families: tuple[str, ...]) -> dict[str, Any]:
    """Returns the results of the script for each family, with its own KV type and with int8."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, "float32", *families]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_few_rows_equal_eager_steps_and_do_not_wait(family: str) -> None:
    found = run_steps(group_of(family))
    for kept in (family, f"{family} int8"):
        assert max(found[kept]["errors"]) < 1e-5, kept
        assert found[kept]["asked"] == [], f"{kept}: the host would wait for the GPU"

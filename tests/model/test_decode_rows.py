"""Steps of few rows as a GPU runs them, without a GPU: right in every family, and without a question to the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models import FAMILIES

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "interpreted_steps.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_few_rows_equal_eager_steps_and_do_not_wait(family: str) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, "float32", family]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {family, f"{family} int8"}
    for kept, result in found.items():
        assert max(result["errors"]) < 1e-5, kept
        assert result["asked"] == [], f"{kept}: the host would wait for the GPU"

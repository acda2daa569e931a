"""Machine code for processors that are not at hand calls nothing that is not linked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.jit.compile_target import ARM, DOTPROD, KINDS
from edgemoe.jit.env import PROCESSOR

COMPILE_S = 3600.0  # of all code for all members of a group; two minutes of processor time
TESTS = Path(__file__).parents[1]
GROUPS = {name: kind.members for name, kind in KINDS.items()}
GROUPS |= {"cortex-a76": tuple(name for name, has in ARM.items() if has == DOTPROD), "generic": ("generic",)}


def _undefined(part: str, group: str, processors: tuple[str, ...]) -> dict[str, dict[str, list[str]]]:
    """Returns each processor's undefined symbols that are not linked, with the functions that use them."""
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    done = subprocess.run(
        [sys.executable, "-m", "support.every_code", part, *processors],
        env=os.environ | {PROCESSOR: group, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    assert set(found) == set(processors)
    return found


def test_kernels_call_nothing_that_is_not_linked() -> None:
    # Linking checks the kernels of processors whose code runs here: test_lesser_processors.py.
    assert _undefined("SAMPLE", "neoverse-n1", ("neoverse-n1",)) == {"neoverse-n1": {}}


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_S)
@pytest.mark.parametrize("group", GROUPS)
def test_no_code_for_any_processor_calls_unlinked_symbols(group: str) -> None:
    assert _undefined("ALL", group, GROUPS[group]) == {name: {} for name in GROUPS[group]}

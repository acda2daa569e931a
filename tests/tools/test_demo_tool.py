from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_answers_shows_every_tier_and_exits_0() -> None:
    done = subprocess.run([str(ROOT / "tools/demo")], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("tokens/s", "VRAM", "RAM", "NVME", "Bytes moved", "stopped cleanly"):
        assert word in done.stdout

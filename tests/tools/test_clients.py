"""Real clients, each in an environment of its own, against a daemon with the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.clients.client_catalog import CLIENTS, USES

ROOT = Path(__file__).parents[2]


def test_every_client_is_pinned_and_has_a_script_and_a_row_in_the_documentation() -> None:
    table = (ROOT / "docs/api.md").read_text().partition("## Clients")[2]
    for client in CLIENTS:
        assert (USES / client.script).is_file()
        assert all("==" in package or client.is_node for package in client.requires)
        assert f"| {client.package} |" in table


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first run installs them all
def test_every_client_works_with_every_feature() -> None:
    command = [sys.executable, "-m", "tools.clients", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    told = json.loads(done.stdout[done.stdout.index("[") :])
    assert {one["client"] for one in told} == {client.name for client in CLIENTS}
    failed = {
        one["client"]: one["trouble"] or one["features"]
        for one in told
        if one["trouble"] or any(one["features"].values())
    }
    assert (done.returncode, failed) == (0, {})

"""Four boxes with real daemons; two have the model, the others download it and serve meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.pulling import main
from tools.testbed.bed import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built"),
]


def test_two_boxes_pull_a_store_from_two_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scratch", str(tmp_path), "--width", "256", "--rounds", "2"]) == 0
    whole, served, died = map(json.loads, capsys.readouterr().out.splitlines())
    for row in (*whole["pullers"], served, *died["pullers"]):
        assert row["damaged"] == 0
    assert 0 < died["killed_a_at_mb"] < died["store_mb"]
    assert served["served_while_it_came"]
    assert served["experts_when_ready"] < served["experts_at_last"]
    assert served["answers_like_b"]

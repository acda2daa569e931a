"""Judgement of processes in a long run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tools.bench.soak import growth, process_tree, sample


def test_processes_are_told_apart_by_their_program_as_they_come_and_go() -> None:
    before = sample([os.getpid()])
    with subprocess.Popen([sys.executable, "-S", "-m", "code"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        child.stderr.read(1)  # it has begun
        pids = process_tree(os.getpid())
        during = sample(pids)
        child.communicate()
    assert {"rss_mb.code", "threads.code", "files.code"} <= during.keys()
    assert not {name for name in (*before, *sample(pids)) if name.endswith(".code")}


def test_growth_is_of_the_time_in_which_a_process_was_there() -> None:
    samples = [{"at_s": 36.0 * n, "rss_mb.a": 100.0 + n} for n in range(1, 101)]
    for one in samples[-20:]:
        one["rss_mb.b"] = 7.0
    found = growth(samples)
    assert found["rss_mb.a"]["per_hour"] == 100.0
    assert found["rss_mb.b"] == {"early": 7.0, "late": 7.0, "per_hour": 0.0}
    json.dumps(found, allow_nan=False)

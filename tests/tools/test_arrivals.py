"""Arrivals of the load generator."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tools.bench.arrivals import Shape, from_trace, poisson, stretch
from tools.bench.serve import Outcome, summarise

SHAPE = Shape(vocab=100, max_prompt_tokens=4096, max_output_tokens=64)


def test_an_azure_trace_keeps_its_order_and_lengths_and_takes_the_wanted_rate(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n10,5,7\n12,9,100\n13,3,1\n")
    arrivals = from_trace(path, rate=0.5, count=3, shape=SHAPE, seed=0)
    assert [len(a.prompt) for a in arrivals] == [5, 9, 3]
    assert [a.output_tokens for a in arrivals] == [7, 64, 1]
    assert [a.at_s for a in arrivals] == pytest.approx([0, 4, 6])


def test_equal_mooncake_hashes_become_equal_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [4, 8, 1]},
        {"timestamp": 9000, "input_length": 1030, "output_length": 5, "hash_ids": [4, 8, 2]},
    ]
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    first, second = from_trace(path, rate=1, count=9, shape=SHAPE, seed=0)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1030] != second.prompt[1024:1030]


def test_poisson_arrivals_are_the_same_for_the_same_seed_and_have_the_wanted_rate() -> None:
    one = poisson(4.0, 2000, SHAPE, seed=3, prompt_tokens=20, output=8)
    assert one == poisson(4.0, 2000, SHAPE, seed=3, prompt_tokens=20, output=8)
    assert one[-1].at_s == pytest.approx(500, rel=0.1)
    assert stretch(one, 8.0)[-1].at_s == pytest.approx(250, rel=0.01)


def test_goodput_counts_only_requests_that_meet_both_limits() -> None:
    good = Outcome(status=200, ttft_s=0.1, tokens=11, last_s=1.1, token_gaps_s=[0.1] * 10)
    late = Outcome(status=200, ttft_s=3.0, tokens=11, last_s=4.0)
    slow = Outcome(status=200, ttft_s=0.1, tokens=11, last_s=9.0)
    full = Outcome(status=429)
    result = summarise([good, late, slow, full], span_s=10.0, slo_ttft_s=1.0, slo_tpot_s=0.2)
    assert (result["completed"], result["rejected"], result["failed"]) == (3, 1, 0)
    assert result["goodput_per_s"] == pytest.approx(0.1)
    assert result["itl_ms"]["p50"] == pytest.approx(100)

"""The default policy without each of its parts: every request ends, and each part makes a difference."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tools.research.routing import routing_ablation
from tools.research.routing.routing_ablation import OTHERS, PARTS, outcome, returning, rows_of, run_of
from tools.research.simulate.decode_pool import DecodeCosts
from tools.research.simulate.decode_traffic import Source, counted
from tools.research.simulate.serving.serving_workload import mooncake

pytestmark = pytest.mark.slow  # compiles its own code
LAYERS, EXPERTS, TOP_K = 2, 16, 2
COSTS = DecodeCosts(step_s=0.01, token_s=0.0001, expert_s=0.001, experts=EXPERTS)
USERS, TURNS = 12, 10


def sources() -> list[Source]:
    rng = np.random.default_rng(0)
    answer = []
    for n in range(200):
        low = n % 2 * EXPERTS // 2
        ids = np.stack([rng.permutation(EXPERTS // 2)[:TOP_K] + low for _ in range(60 * LAYERS)])
        ids = ids.reshape(60, LAYERS, TOP_K).astype(np.int16)
        parts = [counted(part, EXPERTS) for part in (ids[:30], ids[30:], ids[26:30])]
        answer.append(Source("upper" if low else "lower", parts[0], 30, ids[30:], parts[1], parts[2]))
    return answer


def write(data: Path) -> None:
    """Writes conversations whose turns have one block more each, and users with a single request."""
    (data / "mooncake-fast25").mkdir()
    rng, turns, rows = np.random.default_rng(1), dict.fromkeys(range(USERS), 3), []
    for n in range(USERS * TURNS):
        user = int(rng.integers(USERS))
        turns[user] += 1
        ids = [0, *(1000 * (user + 1) + block for block in range(turns[user]))]
        rows.append({"timestamp": 1000 * n, "input_length": 512 * len(ids), "output_length": 40, "hash_ids": ids})
        once = [0, 10**6 + n]
        rows.append({"timestamp": 1000 * n + 1, "input_length": 1024, "output_length": 40, "hash_ids": once})
    with gzip.open(data / "mooncake-fast25/conversation.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_every_policy_serves_all_and_hits_are_fewer_without_looking_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(routing_ablation, "STARTS", 1)
    monkeypatch.setattr(routing_ablation, "REQUESTS", 100)
    load = returning(mooncake(tmp_path, "conversation", 1000, 0))
    assert [one.request for one in load.offered] == [str(n) for n in range(100)]
    assert len({one.user for one in load.offered}) == USERS
    run = run_of(tmp_path, sources(), COSTS, seed=0)
    met = {name: [outcome(run, COSTS, 6.0, 400_000, name)] * 2 for name in (*PARTS, *OTHERS)}
    hits = {name: found[0]["hit_rate"] for name, found in met.items()}
    assert hits["default"] > max(hits["without both of these"], hits["round robin"])
    assert min(found[0]["ended_per_s"] for found in met.values()) > 0
    rows = rows_of(met)
    assert [row["policy"] for row in rows] == [*PARTS, *OTHERS]
    assert 2 * TOP_K / 2 <= rows[0]["experts"] <= EXPERTS

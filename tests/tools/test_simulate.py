"""The simulator's times follow from what is asked for, what there is, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.simulate import __main__ as command
from tools.simulate.costs import ATTENTION_S, DENSE_PARTS, PROFILE, PROFILED_EXPERT, Costs, measured
from tools.simulate.events import Cluster, Prompts, simulate
from tools.simulate.study import MOST_SERVERS, Setting, outcome, placed_by, servers_of
from tools.simulate.workload import EXPERTS, Task, prompts_of

LAYERS, TOP_K = 2, 2
DENSE, LAUNCH, EXPERT, TOKEN, LINK, DELAY = 1.0, 0.5, 0.25, 0.125, 2.0, 10.0


def cluster(homes: list[list[list[bool]]]) -> Cluster:
    """Servers of one GPU, with homes [N][L][E]."""
    kept = np.array(homes)
    masks = sum(
        (kept[n].astype(np.uint64) << np.uint64(n) for n in range(len(kept))), np.zeros(kept.shape[1:], np.uint64)
    )
    gpus = np.ones(len(kept), np.int64)
    device = np.where(kept, 0, -1).astype(np.int8)
    return Cluster(masks, device, gpus, DENSE, 0.0, LAUNCH, EXPERT, TOKEN, LINK, DELAY)


def prompts(at_s: list[float], servers: list[int], routes: list[Any], emitted: int = 1) -> Prompts:
    """Prompts with all the same tokens, [T][L][k]."""
    count, tokens = len(at_s), np.array(routes, np.int16)
    firsts = np.zeros(count, np.int64)
    return Prompts(
        np.array(at_s), np.array(servers), firsts, np.full(count, len(tokens)), np.full(count, emitted), tokens
    )


BOTH = [[[True, True], [True, True]], [[True, True], [True, True]]]
SPLIT = [[[True, True], [False, True]], [[False, False], [True, True]]]
TWO_TOKENS = [[[0, 1], [0, 1]]] * 2  # a prompt of one, an answer of one


def test_what_is_all_at_home_takes_its_computing() -> None:
    result = simulate(prompts([3.0], [0], TWO_TOKENS), cluster(BOTH))
    layer = DENSE + LAUNCH + 2 * EXPERT + 2 * TOKEN
    assert result.end_s.tolist() == [3.0 + LAYERS * layer]
    assert result.local.tolist() == [4, 4, 0]


def test_a_layer_waits_for_its_call_over_both_links_and_back() -> None:
    result = simulate(prompts([0.0], [0], TWO_TOKENS), cluster(SPLIT))
    first = DENSE + LAUNCH + 2 * EXPERT + 2 * TOKEN
    second = DENSE + 2 * (LINK + DELAY) + LAUNCH + EXPERT + TOKEN
    assert result.end_s.tolist() == [first + second]
    assert result.local.tolist() == [3, 4, 1]
    assert result.waits.tolist() == [first + second - 2 * DENSE]


def test_a_prompt_is_one_step_and_each_further_token_another() -> None:
    routes = [[[0, 1], [0, 1]]] * 5
    result = simulate(prompts([0.0], [0], routes, emitted=3), cluster(BOTH))
    prefill = LAYERS * (DENSE + LAUNCH + 2 * EXPERT + 4 * TOKEN)
    decode = LAYERS * (DENSE + LAUNCH + 2 * EXPERT + 2 * TOKEN)
    assert result.first_s.tolist() == [prefill]
    assert result.end_s.tolist() == [prefill + 2 * decode]


def test_who_comes_second_waits_for_the_gpu() -> None:
    alone = simulate(prompts([0.0], [0], TWO_TOKENS), cluster(BOTH)).end_s[0]
    both = simulate(prompts([0.0, 0.0], [0, 0], TWO_TOKENS), cluster(BOTH)).end_s
    apart = simulate(prompts([0.0, 0.0], [0, 1], TWO_TOKENS), cluster(BOTH)).end_s
    assert apart.tolist() == [alone, alone]
    assert both.max() == 2 * alone
    assert both.min() > alone


def test_of_boxes_that_have_what_is_missing_the_fewest_are_called() -> None:
    homes = [
        [[False] * 3, [True] * 3],
        [[True, False, False], [True] * 3],
        [[False, True, True], [True] * 3],
        [[True] * 3, [True] * 3],
    ]
    result = simulate(prompts([0.0], [0], [[[0, 1, 2], [0, 1, 2]]] * 2), cluster(homes))
    assert result.local.tolist() == [3, 6, 1]


def test_costs_are_the_line_through_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / PROFILE).mkdir(parents=True)
    sizes = [(tokens, experts) for tokens in (1, 8, 64) for experts in (8, 16, 32)]
    lines = [f"{tokens},{experts},{20 + 5 * experts + 0.5 * 8 * tokens}" for tokens, experts in sizes]
    (tmp_path / PROFILE / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *lines]))
    dense = [f"{layer},{tokens},{3 + 0.25 * tokens}" for layer in set(DENSE_PARTS) for tokens in (1, 10, 100)]
    (tmp_path / PROFILE / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    costs = measured(tmp_path, 2 * PROFILED_EXPERT)
    assert [costs.launch_s, costs.expert_s, costs.token_s] == pytest.approx([20e-6, 10e-6, 1e-6])
    assert costs.dense_s == pytest.approx(len(DENSE_PARTS) * 3e-6 + ATTENTION_S)
    assert costs.dense_token_s == pytest.approx(len(DENSE_PARTS) * 0.25e-6)
    assert costs.slower(3.0).expert_s == pytest.approx(30e-6)


def test_gpus_are_dealt_as_the_papers_servers_have_them() -> None:
    assert servers_of(4) == [1, 1, 2]
    assert servers_of(16) == [1, 1, 2] * 4
    assert len(servers_of(64)) == MOST_SERVERS
    assert sum(servers_of(256)) == 256


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """Three tasks of short sequences, each with its own likings."""
    rng = np.random.default_rng(0)
    answer = []
    for _ in range(3):
        liking = rng.normal(0, 3, (LAYERS, EXPERTS))
        scores = liking + rng.gumbel(size=(80, 6, LAYERS, EXPERTS))
        routes = np.argsort(-scores, axis=3)[..., :TOP_K].astype(np.int16)
        answer.append(Task(tuple(routes[:40]), tuple(routes[40:])))
    return answer


COSTS = Costs(1e-4, 1e-6, 1e-5, 1e-5, 1e-6)


def test_placements_by_what_is_asked_for_and_faster_links_shorten_prompts(tasks: list[Task]) -> None:
    base = Setting(gpus=8, prompts=60, emitted=3, every_s=0.1, delay_s=1e-3)
    at_s = np.arange(60) * 0.01
    known: dict[str, Any] = {}
    uniform, ours = (
        outcome(replace(base, policy=name), tasks, COSTS, at_s, known) for name in ("uniform", "rendezvous")
    )
    assert ours["mean_s"] < uniform["mean_s"]
    assert ours["local"] > uniform["local"]
    slow = outcome(replace(base, mbit_s=1.0), tasks, COSTS, at_s, known)
    assert slow["mean_s"] > ours["mean_s"]
    assert slow["solved_s"] == 0.0, "the placement was known"
    again = outcome(base, tasks, COSTS, at_s, known)
    assert {k: v for k, v in again.items() if k[-6:] not in ("lved_s", "ran_s")} == {
        k: v for k, v in ours.items() if k[-6:] not in ("lved_s", "ran_s")
    }


def test_more_servers_than_a_cluster_may_have_are_several_clusters(tasks: list[Task]) -> None:
    setting = Setting(gpus=128, policy="uniform", prompts=96, emitted=2)
    known: dict[str, Any] = {}
    result = outcome(setting, tasks, COSTS, np.arange(96) * 1.0, known)
    assert len(known) == 1, "both are alike"
    assert 0 < result["local"] < 1


def test_the_answer_is_part_of_each_sequence(tasks: list[Task]) -> None:
    asked = prompts_of(tasks, np.arange(9.0), 3, 20, np.random.default_rng(1))
    assert (asked.emitted == 5).all(), "one token at least is the prompt's"
    for p in range(9):
        sequence = asked.routes[asked.first[p] : asked.first[p] + asked.tokens[p]]
        assert any(np.array_equal(sequence, each) for each in tasks[asked.server[p] % 3].unseen)


def test_memory_is_that_of_each_gpu(tasks: list[Task]) -> None:
    setting = Setting(gpus=4, share=0.4)
    placement = placed_by(setting, tasks, servers_of(4))
    for n, gpus in enumerate(servers_of(4)):
        for gpu in range(gpus):
            assert (placement.device[n] == gpu).sum() <= 0.4 * LAYERS * EXPERTS


def test_the_command_prints_a_line_for_each_setting(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "tasks_of", lambda _: tasks)
    monkeypatch.setattr(command, "measured", lambda *_: COSTS)
    words = ["scale", "--gpus", "4,8", "--every-s", "9", "--prompts", "9", "--seeds", "2"]
    assert command.main([str(tmp_path), *words, "--json", "--plot", str(tmp_path / "plot.png")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["line"], row["place"]) for row in rows] == [("every 9 s", 4), ("every 9 s", 8)]
    assert all(row["mean_s"] > 0 for row in rows)
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"

"""The simulator's times follow from requests, cluster and costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.research.placement.prism.models import demo
from tools.research.placement.prism.plans import NODES
from tools.research.placement.prism.profile import ASKED, Profile
from tools.research.simulate import __main__ as command
from tools.research.simulate import events
from tools.research.simulate.bed.bed_fitting import BedCosts, fit, took_s
from tools.research.simulate.bed.bed_runs import BedRun, BedRuns, usable
from tools.research.simulate.bed.scoring import halves, row_of, summary
from tools.research.simulate.costs import ATTENTION_S, DENSE_PARTS, PROFILE, PROFILED_EXPERT, Costs, measured
from tools.research.simulate.events import CORE_S, Cluster, Host, Prompts, all_computing, simulate
from tools.research.simulate.routed_workload import EXPERTS, Task, prompts_of
from tools.research.simulate.study import MOST_SERVERS, Setting, outcome, placed_by, servers_of

LAYERS, TOP_K = 2, 2
DENSE, LAUNCH, EXPERT, TOKEN, LINK, DELAY = 1.0, 0.5, 0.25, 0.125, 2.0, 10.0


def cluster(homes: list[list[list[bool]]], host: Host | None = None) -> Cluster:
    """Builds servers of one GPU, with homes [N][L][E]."""
    kept = np.array(homes)
    masks = sum(
        (kept[n].astype(np.uint64) << np.uint64(n) for n in range(len(kept))), np.zeros(kept.shape[1:], np.uint64)
    )
    gpus = np.ones(len(kept), np.int64)
    device = np.where(kept, 0, -1).astype(np.int8)
    host = host or all_computing(len(kept))
    return Cluster(masks, device, gpus, DENSE, 0.0, LAUNCH, EXPERT, TOKEN, LINK, DELAY, host)


def prompts(at_s: list[float], servers: list[int], routes: list[Any], emitted: int = 1) -> Prompts:
    """Builds prompts with equal tokens, [T][L][k]."""
    count, tokens = len(at_s), np.array(routes, np.int16)
    firsts = np.zeros(count, np.int64)
    return Prompts(
        np.array(at_s), np.array(servers), firsts, np.full(count, len(tokens)), np.full(count, emitted), tokens
    )


BOTH = [[[True, True], [True, True]], [[True, True], [True, True]]]
SPLIT = [[[True, True], [False, True]], [[False, False], [True, True]]]
TWO_TOKENS = [[[0, 1], [0, 1]]] * 2  # a prompt of one, an answer of one


def test_a_prompt_with_all_experts_at_home_takes_its_computing() -> None:
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


def test_the_second_prompt_waits_for_the_gpu() -> None:
    alone = simulate(prompts([0.0], [0], TWO_TOKENS), cluster(BOTH)).end_s[0]
    both = simulate(prompts([0.0, 0.0], [0, 0], TWO_TOKENS), cluster(BOTH)).end_s
    apart = simulate(prompts([0.0, 0.0], [0, 1], TWO_TOKENS), cluster(BOTH)).end_s
    assert apart.tolist() == [alone, alone]
    assert both.max() == 2 * alone
    assert both.min() > alone


FREE = Host(np.full(2, np.inf), 4, 0.0, 0.0, 0.0, 0.0, 0.0, np.ones(2, np.int64), 0.0)  # that step only


def test_a_boxs_prompts_step_together_and_share_its_experts() -> None:
    host = FREE._replace(step_s=100.0, prompt_s=10.0)
    result = simulate(prompts([0.0, 0.5], [0, 0], [[[0, 1], [0, 1]]] * 3, emitted=2), cluster(BOTH, host))
    one = DENSE + LAUNCH + 2 * EXPERT
    first = 100 + LAYERS * (10 + one + 2 * TOKEN)
    both = 100 + LAYERS * (10 + one + 4 * TOKEN)  # the first one's second token, the second one's prompt
    last = 100 + LAYERS * (one + 2 * TOKEN)
    assert result.first_s.tolist() == [first, first + both]
    assert result.end_s.tolist() == [first + both, first + both + last]
    assert result.boxes[0].tolist() == [1, last, 3 * LAYERS * 2, 0, 0, first + both + last]


def test_a_step_has_room_for_a_bounded_number_of_prompts() -> None:
    alone, pair, three = (
        simulate(prompts([0.0] * 3, [0] * 3, TWO_TOKENS), cluster(BOTH, FREE._replace(sequences=room))).end_s
        for room in (1, 2, 3)
    )
    assert len(set(alone.tolist())) == 3
    assert len(set(pair.tolist())) == len(set(three.tolist())) == 2, "the first one begins by itself"


def test_a_call_takes_time_of_both_boxes() -> None:
    base = simulate(prompts([0.0], [0], TWO_TOKENS), cluster(SPLIT, FREE)).end_s
    host = FREE._replace(call_s=3.0, serve_s=5.0)
    result = simulate(prompts([0.0], [0], TWO_TOKENS), cluster(SPLIT, host))
    assert result.end_s.tolist() == [base[0] + 8.0]
    assert result.boxes[1].tolist() == [0, 0, 0, 0, 0, 5.0 + LAUNCH + EXPERT + TOKEN]


def test_devices_compute_beside_the_processor_one_batch_after_the_other() -> None:
    slow = FREE._replace(read_s=50.0)
    alone = simulate(prompts([0.0], [0], TWO_TOKENS), cluster(BOTH, slow)).end_s
    assert alone.tolist() == [LAYERS * (DENSE + 2 * 50.0)], "the processor is done long before"
    shared = FREE._replace(read_s=50.0, devices=np.array([2, 1]))
    assert simulate(prompts([0.0], [0], TWO_TOKENS), cluster(BOTH, shared)).end_s.tolist() == [LAYERS * (DENSE + 50.0)]
    busy = simulate(prompts([0.0, 1.0], [0, 1], TWO_TOKENS), cluster(SPLIT, slow))
    assert busy.boxes[1, CORE_S] < 50.0, "no core works while a device does"
    called = DENSE + 2 * 50.0 + DENSE + LINK + DELAY  # time of the first box's call at the second
    assert busy.end_s[0] > called + 50.0 + LINK + DELAY, "which computes for itself then"


def test_a_box_is_held_back_once_its_share_of_a_period_is_used() -> None:
    idle = cluster(BOTH, FREE._replace(share=np.array([0.25, 1.0]), request_s=0.006))._replace(
        dense_s=0.0, launch_s=0.0, expert_s=0.0, token_s=0.0
    )
    result = simulate(prompts([0.0, 0.0, 0.1], [0, 1, 0], TWO_TOKENS), idle)
    assert result.end_s.tolist() == pytest.approx([0.021, 0.006, 0.121])  # 2.5 ms of each 10


def test_the_fewest_boxes_with_missing_experts_are_called() -> None:
    homes = [
        [[False] * 3, [True] * 3],
        [[True, False, False], [True] * 3],
        [[False, True, True], [True] * 3],
        [[True] * 3, [True] * 3],
    ]
    result = simulate(prompts([0.0], [0], [[[0, 1, 2], [0, 1, 2]]] * 2), cluster(homes))
    assert result.local.tolist() == [3, 6, 1]


def test_costs_are_the_line_through_the_measurements(tmp_path: Path) -> None:
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
    """Three tasks of short sequences, each with its own preferences."""
    rng = np.random.default_rng(0)
    answer = []
    for _ in range(3):
        liking = rng.normal(0, 3, (LAYERS, EXPERTS))
        scores = liking + rng.gumbel(size=(80, 6, LAYERS, EXPERTS))
        routes = np.argsort(-scores, axis=3)[..., :TOP_K].astype(np.int16)
        answer.append(Task(tuple(routes[:40]), tuple(routes[40:])))
    return answer


COSTS = Costs(1e-4, 1e-6, 1e-5, 1e-5, 1e-6)


def test_placements_by_activations_and_faster_links_shorten_prompts(tasks: list[Task]) -> None:
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


# --- against the test bed ----------------------------------------------------------------------------------------

CANNED = Path(__file__).parent / "data" / "testbed"


@pytest.fixture(scope="module")
def bed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BedRun]:
    """Measured runs, by method."""
    model = demo(tmp_path_factory.mktemp("bed"))
    with np.load(CANNED / "routes.npz") as kept:
        bits = {name: np.unpackbits(kept[name], axis=2) for name in kept}
    chosen = {name: each.nonzero()[2].reshape(*each.shape[:2], -1).astype(np.int16) for name, each in bits.items()}
    seen, asked = ({task: chosen[f"{part} {task}"] for task in model.tasks[:3]} for part in ("seen", "asked"))
    runs = BedRuns(model, Profile({task: [[]] * ASKED for task in asked}, {}, seen, asked))
    records = [json.loads(line) for line in (CANNED / "runs.jsonl").read_text().splitlines()]
    return {record["method"]: runs.read(record) for record in usable(records)}


def test_a_run_has_the_requests_that_it_had_on_the_test_bed(bed_runs: dict[str, BedRun]) -> None:
    for run in bed_runs.values():
        for box, node in enumerate(NODES):
            due = [at_s for at_s, _ in run.record["latency"][node]]
            assert run.prompts.at_s[run.prompts.server == box] == pytest.approx(due, abs=0.0051)
        assert (run.inside | ~run.homes).all()
        assert (run.inside.sum(axis=(1, 2)) <= [63, 63, 124]).all()


def test_simulated_boxes_do_the_same_as_on_the_test_bed(bed_runs: dict[str, BedRun]) -> None:
    for run in bed_runs.values():
        _, result = took_s(run, BedCosts())
        boxes = [run.record["boxes"][node] for node in NODES]
        for name, column in (("experts", events.EXPERTS), ("calls", events.CALLED)):
            assert result.boxes[:, column] == pytest.approx([box[name] for box in boxes], rel=0.35), name
        remote = [box["remote"] / box["experts"] for box in boxes]
        assert result.boxes[:, events.REMOTE] / result.boxes[:, events.EXPERTS] == pytest.approx(remote, abs=0.05)


def test_costs_of_one_run_predict_another(bed_runs: dict[str, BedRun]) -> None:
    costs = fit([bed_runs["uniform"]], most=2)
    for method in ("smartmoe", "published"):
        row = row_of(bed_runs[method], costs)
        assert row["measured_s"] == pytest.approx({"smartmoe": 0.227, "published": 0.147}[method])
        assert abs(row["error"]) < 0.45
        assert abs(row["error_at_speed"]) < 0.35


def test_errors_are_summed_up_by_run_and_by_mean_and_beside_a_second_measurement() -> None:
    same = {"model": "demo", "setting": "mixed", "pace": 0.4}
    figures = [("eplb", 1.0, 1.5), ("eplb", 2.0, 1.5), ("exact", 0.5, 0.6), ("uniform", 1.6, 1.4)]
    rows = [
        same | {"method": a, "measured_s": b, "simulated_s": c, "error": c / b - 1, "error_at_speed": 0.1}
        for a, b, c in figures
    ]
    found = summary(rows)
    assert found["error"] == pytest.approx((0.5 + 0.25 + 0.2 + 0.125) / 4, abs=1e-3)
    assert found["worst"] == 0.5
    assert found["error_of_means"] == pytest.approx((0.0 + 0.2 + 0.125) / 3, abs=1e-3)
    assert (found["measured_again"], found["measured_again_worst"]) == (0.75, 1.0)
    assert found["pairs_kept"] == [2, 3], "uniform was slower than eplb, and is simulated faster"


def test_no_run_is_scored_by_costs_of_its_own_method(bed_runs: dict[str, BedRun]) -> None:
    runs = [*bed_runs.values()] * 2
    scored = []
    for seen, unseen in halves(runs):
        assert {run.name for run in seen}.isdisjoint({run.name for run in unseen})
        scored += [run.name for run in unseen]
    assert sorted(scored) == sorted(run.name for run in runs)
    with pytest.raises(SystemExit, match="two methods"):
        halves([bed_runs["uniform"]])


def test_a_run_at_other_rates_than_the_models_is_refused(bed_runs: dict[str, BedRun]) -> None:
    run = bed_runs["uniform"]
    late = run.record | {
        "latency": {node: [[9.0 * at, took] for at, took in run.record["latency"][node]] for node in NODES}
    }
    with pytest.raises(SystemExit, match="other requests"):
        run._replace(record=late).check()

"""Prism's evaluation on the test bed: its requests, first placements, and tables."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgemoe.cluster.control.plan_store import read_plan
from tools.research.placement.prism.__main__ import main
from tools.research.placement.prism.models import STAND_INS, WORDS, Model, make_constructed, task_of, words_of
from tools.research.placement.prism.moving import moving_runs, moving_s, took_s
from tools.research.placement.prism.plans import METHODS, NODES, mixed_routes, place_by, room, write_plan
from tools.research.placement.prism.prism_runs import Machine, Run, requests_of
from tools.research.placement.prism.prism_tables import tables
from tools.research.placement.prism.profile import Profile, frequencies, overlap, skew
from tools.testbed.bed import why_not

RATE = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Two layers of the constructed checkpoint."""
    store = make_constructed(tmp_path_factory.mktemp("prism"), layers=2)
    rate = {"specialised": RATE, "mixed": RATE}
    return Model("constructed", store, 0.35, WORDS, {"specialised": 2, "mixed": 3}, rate, 1e-4, 0.25, 100)


@pytest.fixture(scope="module")
def routes(model: Model) -> dict[str, Any]:
    """The first gates' choices for each task's words, [T, 2, 6], without attention."""
    (checkpoint,) = model.store.parent.parent.glob("constructed-2-*/model.safetensors")
    weights = load_file(checkpoint)
    found = {}
    for number, task in enumerate(WORDS):
        state = weights["model.embed_tokens.weight"][np.concatenate(words_of(number, 20, 30))]
        state /= np.sqrt((state**2).mean(axis=1, keepdims=True))
        logits = np.stack([state @ weights[f"model.layers.{n}.mlp.gate.weight"].T for n in range(2)], axis=1)
        found[task] = np.argsort(-logits, axis=2)[:, :, :6].astype(np.int16)
    return found


RUN = Run("methods", "constructed", "eplb", ("mixed",), requests=400)


def test_every_method_gets_the_same_requests_as_often_as_is_said(model: Model) -> None:
    requests = requests_of(model, RUN, 10)
    assert requests == requests_of(model, replace(RUN, method="rendezvous", migrate_s=0.0), 10)
    assert requests != requests_of(model, replace(RUN, seed=1), 10)
    for box in range(3):
        mine = [one for one in requests if one.box == box]
        assert len(mine) == 400
        assert mine[-1].at_s == pytest.approx(400 / RATE, rel=0.15)
        own = np.mean([one.task == WORDS[3 + box] for one in mine])
        assert own == pytest.approx(0.6, abs=0.08)
        assert {one.task for one in mine} == set(WORDS[3:])


def test_one_setting_begins_as_the_other_ends(model: Model) -> None:
    requests = requests_of(model, replace(RUN, settings=("mixed", "specialised")), 10)
    first, second = requests[:1200], requests[1200:]
    assert max(one.at_s for one in first) <= min(one.at_s for one in second)
    assert all(one.task == WORDS[one.box] for one in second)


def test_tasks_of_the_constructed_model_choose_differently_and_layers_unevenly(routes: dict[str, Any]) -> None:
    found = {task: frequencies(each, 64) for task, each in routes.items()}
    assert all(each.sum(axis=1) == pytest.approx(6.0) for each in found.values())
    even, by_task = np.mean([skew(each) for each in found.values()], axis=0)
    assert 0.25 < even < by_task < 0.75
    pairs = [(found[a], found[b]) for a in WORDS for b in WORDS if a < b]
    alike, alike_by_task = (np.mean([overlap(a[n : n + 1], b[n : n + 1]) for a, b in pairs]) for n in range(2))
    assert 0.4 < alike_by_task < alike < 0.75


def test_a_tasks_prompts_are_of_its_words() -> None:
    for number in range(len(WORDS)):
        words = np.array(words_of(number, 5, 24))
        assert words.shape == (5, 24)
        assert (task_of(words) == number).all()
        assert words.min() >= 3


@pytest.mark.parametrize("method", [METHODS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[1:])])
def test_boxes_start_by_the_methods_plan_within_their_memory(
    method: str, model: Model, routes: dict[str, Any], tmp_path: Path
) -> None:
    profile = Profile({}, {}, routes, routes)

    class Folder:
        def state_dir(self, node: str) -> Path:
            return tmp_path / node

    placed = place_by(method, model, "specialised", profile)
    assert placed.homes.any(axis=0).all()
    assert (placed.homes.sum(axis=(1, 2)) <= room(model) * np.array([1, 1, 2])).all()
    write_plan(Folder(), model, placed.homes, method)  # type: ignore[arg-type]
    for number, node in enumerate(NODES):
        plan = read_plan((tmp_path / node / "plan").read_bytes())
        assert plan.policy == method
        assert (plan.homes_of(node) == placed.homes[number]).all()


def test_a_mixed_box_asks_for_its_own_task_most(model: Model, routes: dict[str, Any]) -> None:
    mixed = mixed_routes(model, "mixed", routes)
    assert len({len(each) for each in mixed}) == 1
    assert overlap(frequencies(mixed[0], 64), frequencies(routes[WORDS[3]], 64)) > 0.6


def record(method: str, seconds: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    """Builds the log record of a run of ten requests at each box that took this long."""
    run = asdict(replace(RUN, method=method, seed=seed, requests=10)) | asdict(Machine(0.4, 50.0, 2.0))
    box = {"nr_periods": 100, "nr_throttled": 25, "read_mb": 1.0, "forwarded": 0.0}
    return json.loads(json.dumps(run)) | {
        "latency": {node: [[float(n), seconds] for n in range(10)] for node in NODES},
        "samples": [[2.0, *[10, 4] * 3], [4.0, *[20, 5] * 3]],
        "boxes": dict.fromkeys(NODES, box),
        "foretold": [{"remote_share": 0.3}],
        "plans": [],
        "wrong": 0,
        "complete": 30,
        "of": 30,
        **more,
    }


def test_tables_compare_with_eplb_seed_by_seed_and_with_the_paper() -> None:
    lines = list(
        tables([record("eplb", 2.0), record("eplb", 3.0, 1), record("published", 1.0), record("published", 2.0, 1)])
    )
    (mine,) = [line for line in lines if line.startswith("| published")]
    assert "| 1.500 ± 0.500 | -41.7 ± 8.3 % | -11.0 | 0.750 | 0.700 | 0.25 / 0.25 / 0.25 | 0 of 60 |" in mine


def test_the_table_of_migration_tells_before_from_after() -> None:
    moved = {"settings": ["mixed", "specialised"], "begins_s": [0.0, 5.0], "part": "migration"}
    lines = list(tables([record("published", 1.0, **moved, samples=[[n, *[n, n * 0.5] * 3] for n in range(11)])]))
    assert "| every 60 s | 1.000 | 1.000 | 1.000 | 0.500 | 0.500 | 0 |" in lines[-1]


def test_requests_while_experts_moved_are_held_against_the_same_ones_without(model: Model) -> None:
    runs = [run for seed in range(2) for run in moving_runs(model, seed, 10, 1.0)]
    assert [run.method for run in runs] == ["moves", "stays", "stays", "moves"]
    assert requests_of(model, runs[0], 10) == requests_of(model, runs[1], 10) != requests_of(model, runs[2], 10)
    plans = [[3.5, 2, True, "better"], [4.0, 3, True, "a step"], [6.2, 4, False, "a step"]]
    moved = record("moves", 1.5, part="moving", plans=plans)
    still = record("stays", 1.0, part="moving")
    span = moving_s(moved)
    assert span == (3.5, 6.2)
    assert moving_s(still) is None
    assert len(took_s(moved, *span)) == 4 * 3  # due from 3 to 6 s at each box, or still under way
    assert len(took_s(still, *span)) == 4 * 3
    many = [each | {"seed": seed} for seed in range(2) for each in (moved, still)]
    (line,) = [line for line in tables(many) if line.startswith("| while")]
    assert line == "| while they moved | 24 | +50.0 % | +50.0 % | 1500 / 1500 | 1000 / 1000 |"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")
def test_a_sitting_measures_missing_runs_and_every_answer_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, task in enumerate(STAND_INS):
        with gzip.open(tmp_path / f"{task}.jsonl.gz", "wt") as file:
            for n in range(20):
                file.write(json.dumps({"prompt": f"Task {number * 7}: {n * 37} and {n} of {task} are"}) + "\n")
    log = tmp_path / "log.jsonl"
    command = ["--prompts", str(tmp_path), "--log", str(log), "--work", str(tmp_path), "--models", "demo"]
    sizes = ["--requests", "6", "--seeds", "1", "--methods", "uniform,exact", "--parts", "methods"]
    assert main([*command, *sizes, "--minutes", "6"]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["method"] for each in records] == ["uniform", "exact"] * 2
    for each in records:
        assert each["complete"] == each["of"] == 18
        assert not each["wrong"]
        assert all(box["nr_periods"] for box in each["boxes"].values())
        assert 0 < each["boxes"]["a"]["remote"] < each["boxes"]["a"]["experts"]
        assert each["homes"] == ([48, 48, 96] if each["method"] == "uniform" else [57, 57, 114])
    capsys.readouterr()
    assert main([*command, *sizes, "--list"]) == 0
    assert capsys.readouterr().out.count("there") == 4
    assert main([*command, "--plots", str(tmp_path)]) == 0
    assert (tmp_path / "prism_latency.png").stat().st_size > 1000

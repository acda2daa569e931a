"""Live routing: requests in turn, the log, and the tables."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgemoe.cluster.control.messages import LoadReport
from edgemoe.cluster.control.requests import offer_queue
from edgemoe.policy.routing.marginal_union import DecodeTimes, UnionTerm
from edgemoe.policy.routing.offers import RoutingTarget, WaitingRequest
from edgemoe.policy.routing.signatures import ModelSizes
from edgemoe.types.expert_signatures import ExpertDemand
from tools.research.placement.prism.models import STAND_INS, WORDS, Model, words_of
from tools.research.routing.blind import blind_residency, union
from tools.research.routing.live.__main__ import main
from tools.research.routing.live.live_plots import draw
from tools.research.routing.live.live_tables import TIMES, tables
from tools.research.routing.live.sitting import Sitting
from tools.research.routing.live.terms import TOKENS, USERS, asked
from tools.testbed.bed import why_not

MODEL = Model("constructed", Path(), 0.35, WORDS, {}, {}, 1e-4, 0.25, 0)


def sitting(folder: Path, rounds: int = 3, scale: float = 1.0) -> Sitting:
    return Sitting(folder, folder, folder / "log.jsonl", rounds, scale)


def record(variant: str, number: int, seconds: float, part: str = "apart", **more: Any) -> dict[str, Any]:
    """Builds the log record of a round in which everything took this long."""
    handed = {"edgemoe_handed_over_requests_total": 2.0, "edgemoe_kv_pull_failures_total": 0.0}
    about = {"part": part, "model": "demo", "variant": variant, "round": number, "share": 0.5, "per_s": 5.0}
    return about | dict.fromkeys(TIMES, seconds) | handed | {"complete": 10, "of": 10} | more


def test_every_round_has_all_variants_in_turn_and_logged_ones_are_not_repeated(tmp_path: Path) -> None:
    mine = sitting(tmp_path)
    turns = [(0, "x"), (0, "y"), (1, "y"), (1, "x"), (2, "x"), (2, "y")]
    assert list(mine.rounds_of(("x", "y"), part="apart", model=MODEL)) == turns
    mine.note({"ttft_mean_s": 0.1}, variant="y", round=1, part="apart", model=MODEL)
    assert list(mine.rounds_of(("x", "y"), part="apart", model=MODEL)) == [each for each in turns if each != (1, "y")]
    assert len(list(sitting(tmp_path, scale=0.5).rounds_of(("x", "y"), part="apart", model=MODEL))) == 6
    found = mine.record(part="apart", variant="y", round=1, model=MODEL)
    assert found is not None
    assert found["ttft_mean_s"] == 0.1


def test_rounds_differ_and_a_round_is_the_same_for_all_variants(tmp_path: Path) -> None:
    prompts = {task: words_of(number, 40, 24) for number, task in enumerate(WORDS)}
    requests, users = asked(sitting(tmp_path), MODEL, prompts, 5.0, 1)
    assert asked(sitting(tmp_path), MODEL, prompts, 5.0, 1) == (requests, users)
    assert asked(sitting(tmp_path), MODEL, prompts, 5.0, 2)[0] != requests
    assert {one.output_tokens for one in requests} == {TOKENS}
    assert set(users) <= {f"u{n}" for n in range(USERS)}
    by_user = {
        user: {task for task in WORDS if list(one.prompt) in prompts[task]}
        for one, user in zip(requests, users, strict=True)
    }
    assert by_user == {user: {WORDS[int(user[1:]) % len(WORDS)]} for user in by_user}


def test_a_change_is_that_of_the_same_round() -> None:
    lines = list(
        tables([record("mixed", n, 1.0 + n) for n in range(3)] + [record("apart", n, 1.5 + 1.5 * n) for n in (2, 0, 1)])
    )
    (mine,) = [line for line in lines if "apart against mixed" in line]
    assert mine.count("+50.0 ± 0.0 %") == len(TIMES)
    assert "| demo | 0.5 | apart | 1.5e+03, 3e+03, 4.5e+03 |" in "\n".join(lines)


def test_plots_show_the_logged_records(tmp_path: Path) -> None:
    rounds = [record(name, n, 1.0, "load") for name in ("pull", "local") for n in range(2)]
    draw(
        [*rounds, record("pull, simulated", 0, 0.5, "load"), record("mixed", 0, 1.0), record("apart", 0, 2.0)], tmp_path
    )
    assert all((tmp_path / f"routing_{name}.png").stat().st_size > 1000 for name in ("live", "apart"))


def test_blind_leaders_lack_exactly_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two equal engines one has the request's experts far away."""
    chance = np.array([[0.9, 0.9, 0.0, 0.0]], np.float32)
    offers = [WaitingRequest("0", 16, 0.0, 10, 10.0, chance=chance)]
    apart_s = {}
    for blind in (False, True):
        if blind:
            monkeypatch.setattr(offer_queue, "resident_of", blind_residency.unheard)
        views = [told(place, far) for place, far in (("far", b"\1\1\0\0"), ("near", b"\0\0\1\1"))]
        far, near = UnionTerm(DecodeTimes(1.0, 0.1))(offers, views)[:, 0]
        apart_s[blind] = far - near
    assert apart_s[False] > 1.0
    assert apart_s[True] == pytest.approx(0.0)
    assert not union.nothing(UnionTerm(DecodeTimes(1.0, 0.1)), offers, views).any()


def told(place: str, far: bytes) -> RoutingTarget:
    """Returns the view of an engine that has reported its experts' places."""
    choices = ExpertDemand(b"\xff" * 4, far, (1.0,), 1.0, 0.1)
    use = LoadReport(engine="x", slots=4, capacity=8, blocks=64, free_blocks=64, choices=choices)
    return offer_queue.PromptMemory().on_report(place, use, ModelSizes(1, 4), 0.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")
def test_a_sitting_measures_missing_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").mkdir()
    for number, task in enumerate(STAND_INS):
        with gzip.open(tmp_path / "prompts" / f"{task}.jsonl.gz", "wt") as file:
            for n in range(20):
                file.write(json.dumps({"prompt": f"Task {number * 7}: {n * 37} and {n} of {task} are"}) + "\n")
    (tmp_path / "azure-llm-2023").mkdir()
    with gzip.open(tmp_path / "azure-llm-2023" / "conv.csv.gz", "wt") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens"])
        writer.writerows([0.2 * n, 200 + 10 * n, 80] for n in range(60))
    command = ["--data", str(tmp_path), "--log", str(tmp_path / "log"), "--work", str(tmp_path), "--models", "demo"]
    sizes = ["--rounds", "2", "--scale", "0.1"]
    assert main([*command, *sizes, "--parts", "apart,terms"]) == 0
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [each["part"] for each in records] == ["costs", *["apart"] * 8, *["terms"] * 12]
    assert all(each["complete"] == each["of"] for each in records[1:])
    assert all(each["read_mb"] > 0 < each["misses"] for each in records[9:])
    handed = {each["variant"]: each["edgemoe_handed_over_requests_total"] for each in records[1:9]}
    assert handed["apart"] > 0 == handed["mixed"]
    capsys.readouterr()
    assert main([*command, *sizes, "--parts", "apart,terms"]) == 0
    assert len((tmp_path / "log").read_text().splitlines()) == len(records)
    assert "apart against mixed" in capsys.readouterr().out

"""The benchmark of kinds scores its stated tokens against the best of four, and its sums equal a replay's counts."""

from __future__ import annotations

import gzip
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from support.kept import KERNELS

from edgemoe.experts.predict.next_use import link_predictor
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.run import replay
from tools.research.cache import cache_gap as module

LAYERS, EXPERTS, TOP_K = 2, 16, 2
MACHINE = BoxSpec(1e-3, 1 << 20, 8e9, 3e9, 1.0, False)


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """A run over tables of requests whose experts change slowly."""
    link_predictor(KERNELS)
    monkeypatch.setattr(module, "WINDOWS", {"cold": slice(0, 30), "warm": slice(60, 90)})
    monkeypatch.setattr(module, "FEWEST", 20)
    random = np.random.default_rng(0)
    folder = tmp_path / "deepseek-v2-lite-esft"
    folder.mkdir()
    for kind in module.MODELS[folder.name]:
        lines = ["seq,pos,ids"]
        for request in range(9):
            at = random.integers(EXPERTS, size=LAYERS)
            for token in range(10):
                at = (at + (random.random(LAYERS) < 0.4)) % EXPERTS
                lines.append(f"{request},{token}," + "|".join(f"{each} {(each + 5) % EXPERTS}" for each in at))
        (folder / f"{kind}.ids.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return Namespace(
        traces=tmp_path, out=tmp_path / "out", kinds=["de-law"], orders=2, seeds=1, before=25, between=0, batch=1,
        prompt=0.0, label="learned", against=None,
    )  # fmt: skip


def test_requests_parts_sum_to_the_closed_gap(args: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    module.run_all(args)
    for window, span in module.WINDOWS.items():
        closed = []
        for order in range(2):
            missed = {}
            for name in (*module.YARDSTICKS, "learned.0"):
                with np.load(args.out / f"de-law.{order}.{name}.npz") as kept:
                    assert kept["places"].tolist() == list(range(90))
                    missed[name] = kept["missed"][span].sum(0)
            best = np.min([missed[name] for name in ("lru", "lfu", "lfru", "ewma")], axis=0)
            closed.append((best - missed["learned.0"]) / (best - missed["belady"]))
        parts = module.Scored(args.out, "de-law", window, 2).closed("learned")[1]
        assert parts.sum(0) == pytest.approx(np.mean(closed, axis=0))
        assert len(parts) <= 9  # a request scored in two orders is one request
    module.report(args)
    assert capsys.readouterr().out.count("| de-law |") == 2
    (args.out / "de-law.1.learned.0.npz").unlink()
    with pytest.raises(FileNotFoundError, match="no run of learned for de-law, order 1"):
        module.Scored(args.out, "de-law", "cold", 2).closed("learned")


def test_misses_equal_a_replay_s_and_are_not_counted_twice(args: Namespace) -> None:
    module.run_all(args)
    work = module.workload(args, "de-law", 1)
    slots = [round(share * LAYERS * EXPERTS) for share in module.SHARES]
    file = args.out / "de-law.1.belady.npz"
    with np.load(file) as kept:
        late = (work.trace.tokens - 90.5) / work.trace.tokens
        replayed = replay(work.trace, "belady", slots, 1, late, MACHINE)
        assert kept["missed"].sum(0).tolist() == [each.misses for each in replayed]
    written_ns = file.stat().st_mtime_ns
    module.run_all(args)
    assert file.stat().st_mtime_ns == written_ns


def test_other_kinds_come_before_and_where_it_was_asked_for_in_between(args: Namespace) -> None:
    args.between = 20
    work = module.workload(args, "de-law", 0)
    own = [at in work.names for at in range(len(work.trace.requests))]
    assert own == [False] * 3 + [True] * 5 + [False] * 2 + [True] * 4
    assert sorted(work.names.values()) == list(range(9))


def test_of_requests_with_prompts_only_decoded_tokens_are_scored(args: Namespace) -> None:
    args.prompt = 0.4
    module.run_all(args)
    with np.load(args.out / "de-law.0.learned.0.npz") as kept:
        assert kept["places"].tolist() == [place for place in range(90) if place % 10 >= 4]
        assert kept["missed"].sum() > 0

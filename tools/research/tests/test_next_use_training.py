"""The next-use network learns successions, is read back unchanged, and serves its trained model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from edgemoe.errors import ConfigError
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.run import replay
from edgemoe.replay.trace import Trace
from scoutgate.module import Recipe
from tools.research.cache.next_use import next_use_data as nextuse_data
from tools.research.cache.next_use import next_use_train as nextuse_train
from tools.research.cache.next_use.model import (
    AFTER,
    FROM_HERE,
    RECORD,
    WEIGHTS,
    NextUseNet,
    NextUseShape,
    write_export,
)
from tools.research.cache.next_use.network import NetworkPolicy
from tools.research.cache.next_use.next_use_data import Routing
from tools.research.cache.replay import main as replay_command
from tools.research.cache.replay import nextuse

L, E, K = 3, 12, 2
SHAPE = NextUseShape(L, E, K, looks=3, token=16, context=16, key=8, rank=8, hidden=4)
MACHINE = BoxSpec(1e-3, 1 << 20, 1e9, 1e9, 1.0, False)


def cycles(requests: int = 50, tokens: int = 30, seed: int = 0) -> list[np.ndarray]:
    """Draws requests that follow one of two cycles of routes, [T, L, k] each; only past tokens identify the cycle."""
    rng = np.random.default_rng(seed)
    walks = rng.permuted(np.tile(np.arange(E), (2, L, 1)), axis=2)  # [cycle, L, E]
    made = []
    for _ in range(requests):
        walk, start = walks[rng.integers(2)], rng.integers(E)
        at = (start + np.arange(tokens)) % E
        made.append(np.stack([np.sort(np.stack([w[at], w[(at + 1) % E]], 1), 1) for w in walk], 1).astype(np.int16))
    return made


def table(requests: list[np.ndarray], path: Path) -> Path:
    lines = ["seq,pos,ids"]
    for number, ids in enumerate(requests):
        for pos, row in enumerate(ids):
            lines.append(f"{number},{pos},{'|'.join(' '.join(map(str, layer)) for layer in row)}")
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def options(folder: Path, *more: str) -> list[str]:
    fixed = ["--share", "0.6", "--experts", str(E), "--out", str(folder / "run"), "--to", str(folder / "export")]
    return [str(folder / "cycles.ids.csv.gz"), *fixed, "--no-progress", "--device", "cpu", "--threads", "1", *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, and the network trained on its first part."""
    folder = tmp_path_factory.mktemp("nextuse")
    table(cycles(), folder / "cycles.ids.csv.gz")
    nextuse_train.train(nextuse_train.arguments(options(folder, "--steps", "120")))
    return folder


def test_it_learns_more_than_an_untrained_network(folder: Path) -> None:
    told = json.loads((folder / "export" / RECORD).read_text())["metrics"]["log_loss"]
    routing = Routing(cycles()[:30], NextUseShape(L, E, K, looks=3))
    module = nextuse_train.NextUseModule(routing.shape, Recipe(), 0.0, 1, 0.0).eval()
    batches = nextuse_data.Glances(routing, seed=None, batches=nextuse_train.VALIDATION_BATCHES)
    with torch.no_grad():
        untrained = float(np.mean([module.loss(batch).item() for batch in batches]))
    assert told < 0.8 * untrained


def test_replay_takes_the_network_as_a_policy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder / "cycles.ids.csv.gz"), "--score-from", "0.6", "--capacity", "0.35", "--json"]
    words += ["--policies", "lru,nextuse", "--no-prefetch", "--next-use", str(folder / "export")]
    assert replay_command(words) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    missed = {row["policy"]: row["miss_ratio"] for row in rows}
    assert missed["nextuse"] < missed["lru"]


def test_a_killed_training_goes_on_where_it_ended(tmp_path: Path) -> None:
    table(cycles(), tmp_path / "cycles.ids.csv.gz")
    nextuse_train.train(nextuse_train.arguments(options(tmp_path, "--steps", "60")))
    first = (tmp_path / "run" / "last.ckpt").stat().st_mtime_ns
    nextuse_train.train(nextuse_train.arguments(options(tmp_path, "--steps", "120")))
    assert (tmp_path / "run" / "last.ckpt").stat().st_mtime_ns > first
    steps = (tmp_path / "run" / "log" / "metrics.csv").read_text()
    assert "119" in steps.split(",")


def test_an_export_is_refused_where_it_is_damaged_or_for_another_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a next-use network export"):
        nextuse(tmp_path)
    write_export(tmp_path, NextUseNet(SHAPE), {}, {})
    with pytest.raises(ConfigError, match=r"3 layers of 12 experts.* 5 of 12"):
        nextuse(tmp_path)(Trace([np.zeros((4, 5, K), np.int16)], E), 1)
    (tmp_path / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(ConfigError, match="damaged"):
        nextuse(tmp_path)
    with pytest.raises(ConfigError, match="--next-use"):
        replay_command([str(folder / "cycles.ids.csv.gz"), "--policies", "nextuse"])


def test_the_served_network_equals_the_trained_one() -> None:
    """Forecasts step by step equal the batch computation of the loss."""
    torch.manual_seed(1)
    network = NextUseNet(SHAPE).eval().requires_grad_(False)
    requests = cycles(requests=3, tokens=14)
    policy, at = NetworkPolicy(network, L, E, K), 35  # the eighth token of the third request
    served: dict[int, np.ndarray] = {}
    for t, (number, ids) in enumerate((n, row) for n, request in enumerate(requests) for row in request):
        policy.begin((number,))
        served[0] = policy.nextuse.scores.copy()
        for layer, chosen in enumerate(ids):
            policy.route(chosen[None])
            policy.touch(layer, chosen.astype(np.int64))
            served[layer + 1] = policy.nextuse.scores.copy()
        policy.end()
        if t == at:
            break
    routing = Routing(requests, SHAPE)
    for look, done in enumerate(SHAPE.places):
        batch = routing.batch(look, 0, np.array([at]), np.arange(28))
        past = nextuse_train.before(network.tokens(batch.hot), batch.place, torch.cat([batch.asking, batch.memory]))
        context = network.context(network.history(past), batch.hot[torch.cat([batch.asking, batch.memory])], look)
        likeness = network.asked(context[:1]) @ network.key(context[1:]).T
        weights = likeness.masked_fill(batch.hidden, -1e4).softmax(1)
        parametric = network.parametric(context[:1]).view(1, 2, -1)
        planes = [network.weigh(parametric[:, p], weights @ batch.soon[p], batch.own[p], p) for p in (0, 1)]
        wanted = torch.where(torch.arange(L * E) < done * E, planes[AFTER], planes[FROM_HERE])
        np.testing.assert_allclose(served[done].ravel(), wanted[0].numpy(), atol=0.02)


def test_several_sequences_at_once_and_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.research.cache.next_use.network.MOST_SLOTS", 40)
    torch.manual_seed(1)
    network = NextUseNet(SHAPE).eval().requires_grad_(False)
    trace = Trace(cycles(requests=9, tokens=14), E)
    metrics = replay(
        trace, "nextuse", [12], 4, 0.5, MACHINE, {"nextuse": lambda trace, batch: NetworkPolicy(network, L, E, K)}
    )
    assert 0 < metrics[0].misses < metrics[0].demands


def test_too_short_a_trace_is_not_trained_on(tmp_path: Path) -> None:
    table(cycles(requests=2), tmp_path / "cycles.ids.csv.gz")
    with pytest.raises(ValueError, match="too few"):
        nextuse_train.train(nextuse_train.arguments(options(tmp_path)))


def test_times_to_the_next_need_equal_a_naive_count() -> None:
    requests = cycles(requests=3, tokens=9)
    routing, flat = Routing(requests, SHAPE), np.concatenate(requests).reshape(27, L, K)
    for t in (0, 5, 8, 9, 20, 26):
        for layer, expert in ((0, 3), (1, 7), (2, 0)):
            later = [s for s in range(t, 27) if expert in flat[s, layer]]
            own = [s for s in later if s // 9 == t // 9]
            key = layer * E + expert
            assert routing.until[t, key] == (later[0] - t if later else nextuse_data.NEVER)
            assert routing.until_own[t, key] == (own[0] - t if own else nextuse_data.NEVER)

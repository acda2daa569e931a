"""ScoutGate in the engine: forecasts off the compute thread, fitted to the model, scored while serving."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgemoe.config.settings import CacheSettings, ModelSettings, Settings
from edgemoe.errors import ConfigError
from edgemoe.experts.predict.scoutgate_forecaster import (
    ForecastTables,
    ScoutGateForecaster,
    TokenWindow,
    read_fitting_export,
)
from edgemoe.experts.predict.scoutgate_model import RECORD, WEIGHTS, ScoutGate, ScoutGateShape, write_export
from edgemoe.model.dense_weights import DenseMatrix
from edgemoe.telemetry import metrics as names
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import ExpertGeometry, ServedModel
from edgemoe.types.step import StepMeta, StepRouting

L, E, K, V, D = 3, 8, 2, 40, 16
SIZES = ExpertGeometry(L, E, K, hidden=D, width=D, dtype="float32")
SERVED = ServedModel("digest", SIZES)
MODEL = {"id": "the model", "digest": "digest", "tokenizer": "tokenizer"}
PROMISED = {"horizons": {"this_token": {"scoutgate": {"log_loss": 0.4}}}}


def embedding(width: int = D) -> DenseMatrix:
    rows = torch.randn(V, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return DenseMatrix(rows, ENCODINGS["bfloat16"], width)


def exported(folder: Path, *, variant: str = "source", hidden: int = 0, model: dict[str, str] = MODEL) -> Path:
    torch.manual_seed(2)
    shape = ScoutGateShape((E,) * L, K, D, hidden, variant=variant)
    write_export(folder, ScoutGate(shape), (torch.full((2 * L,), 0.8), torch.full((2 * L,), -0.1)), model, PROMISED)
    return folder


def meta(requests: tuple[str, ...], tokens: list[list[int]], positions: list[int], decode: list[bool]) -> StepMeta:
    flat = np.array([t for part in tokens for t in part])
    at = np.concatenate([np.arange(len(part)) + p for part, p in zip(tokens, positions, strict=True)])
    return StepMeta(requests, np.array([len(part) for part in tokens]), np.array(decode), flat, at)


def routing(of: StepMeta, ids: np.ndarray, step_s: float = 0.01, stall_s: float = 0.0) -> StepRouting:
    return StepRouting(
        meta=of,
        ids=ids.astype(np.int16),
        weights=np.ones(ids.shape, np.float32),
        hints={},
        step_s=step_s,
        stall_s=stall_s,
    )


def forecaster(clock: Callable[[], float] = lambda: 0.0, state_file: Path | None = None) -> ScoutGateForecaster:
    """Builds a forecaster whose thread takes no time by its clock."""
    return ScoutGateForecaster(SERVED, "tokenizer", embedding(), clock, state_file)


@pytest.fixture(params=["source", "context"])
def scoutgate(request: pytest.FixtureRequest, tmp_path: Path):
    scoutgate = forecaster()
    scoutgate.load(exported(tmp_path, variant=request.param))
    yield scoutgate
    scoutgate.close()


def run(scoutgate: ScoutGateForecaster, step: StepMeta, ids: np.ndarray | None = None) -> None:
    scoutgate.on_step_begun(step)
    assert scoutgate.wait_idle(10)
    if ids is not None:
        scoutgate.learn(routing(step, ids))
        assert scoutgate.wait_idle(10)


def test_the_forecast_is_the_networks_for_the_last_tokens_of_each_sequence(scoutgate: ScoutGateForecaster) -> None:
    rng = np.random.default_rng(0)
    prompts, ids = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7]], rng.integers(0, E, (L, 12, K))
    run(scoutgate, meta(("a", "b"), prompts, [0, 0], [False, False]), ids)
    assert scoutgate.forecast is None  # no sequence decodes yet
    run(scoutgate, meta(("a", "b"), [[8], [1]], [10, 2], [True, True]))
    assert scoutgate._tables is not None
    gate, each = scoutgate._tables.export.gate, []
    for tokens, row in (([4, 1, 5, 9, 2, 6, 5, 3, 8][-8:], 9), ([2, 7, 1], 11)):
        window = torch.tensor([-1] * (8 - len(tokens)) + tokens)[None]
        previous = torch.tensor((ids[:, row] + np.arange(L)[:, None] * E).reshape(1, -1))
        with torch.no_grad():
            logits = gate(gate.project(embedding().rows.float())[window.clamp_min(0)], window >= 0, previous)
        each.append(torch.sigmoid(0.8 * logits - 0.1).view(2, L, E))
    wanted = 1 - torch.stack([1 - p for p in each]).prod(0)
    assert scoutgate.forecast is not None
    np.testing.assert_allclose(scoutgate.forecast.probs, wanted.numpy(), atol=2e-3)


def test_rejected_drafts_leave_no_trace(scoutgate: ScoutGateForecaster) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, E, (L, 3 + 4, K))
    for name, step in (("a", [5, 9, 2, 7]), ("b", [5, 9])):
        run(scoutgate, meta((name,), [[3, 1, 4]], [0], [False]), ids[:, :3])
        drafted = replace(meta((name,), [step], [3], [True]), drafted=np.array([len(step) - 1]))
        scoutgate.on_step_begun(drafted)
        assert scoutgate.wait_idle(10)
        scoutgate.learn(routing(drafted, ids[:, 3 : 3 + len(step)]).without_rejected(np.array([1])))
        assert scoutgate.wait_idle(10)
    forecasts = []
    for name in ("a", "b"):
        run(scoutgate, meta((name,), [[6]], [5], [True]))
        assert scoutgate.forecast is not None
        assert list(scoutgate._tracks[name].tokens) == [3, 1, 4, 5, 9, 6]
        forecasts.append(scoutgate.forecast.probs)
    np.testing.assert_array_equal(*forecasts)


def test_a_restarted_sequence_forgets_its_past(scoutgate: ScoutGateForecaster) -> None:
    run(scoutgate, meta(("a",), [[3, 1, 4]], [0], [False]))
    run(scoutgate, meta(("a",), [[5]], [40], [True]))  # a replay: not the next position
    fresh = scoutgate.forecast
    run(scoutgate, meta(("b",), [[5]], [40], [True]))
    assert fresh is not None
    assert scoutgate.forecast is not None
    np.testing.assert_array_equal(fresh.probs, scoutgate.forecast.probs)


def test_live_figures_tell_recall_and_trust(scoutgate: ScoutGateForecaster) -> None:
    assert scoutgate.wait_idle(10)
    assert scoutgate.trust == 1.0
    for position in range(80):
        step = meta(("a",), [[position % V]], [position], [True])
        scoutgate.on_step_begun(step)
        assert scoutgate.wait_idle(10)
        forecast = scoutgate.forecast
        assert forecast is not None
        scoutgate.learn(routing(step, np.argsort(-forecast.probs[0], axis=1)[:, None, :K]))  # as was forecast
    assert scoutgate.wait_idle(10)
    metrics = scoutgate.metrics()
    assert metrics[names.named(names.SCOUTGATE_RECALL, horizon="0")] == pytest.approx(1.0)
    assert 0 <= metrics[names.SCOUTGATE_TRUST] <= 1
    assert metrics[names.SCOUTGATE_SECONDS] < 1.0


def disappoint(scoutgate: ScoutGateForecaster) -> None:
    """Feeds steps that need the least likely experts."""
    for position in range(100):
        step = meta(("a",), [[position % V]], [position], [True])
        scoutgate.on_step_begun(step)
        assert scoutgate.wait_idle(10)
        assert scoutgate.forecast is not None
        scoutgate.learn(routing(step, np.argsort(scoutgate.forecast.probs[0], axis=1)[:, None, :K]))
    assert scoutgate.wait_idle(10)


def test_trust_falls_where_forecasts_stop_coming_true(scoutgate: ScoutGateForecaster) -> None:
    disappoint(scoutgate)
    assert scoutgate.trust < 0.7


def test_trust_outlives_a_restart_but_not_its_export(tmp_path: Path) -> None:
    state, trust = tmp_path / "state.json", []
    for variant in ("source", "source", "context"):
        scoutgate = forecaster(state_file=state)
        scoutgate.load(exported(tmp_path / variant, variant=variant))
        assert scoutgate.wait_idle(10)
        trust.append(scoutgate.trust)
        disappoint(scoutgate)
        before = scoutgate.trust
        scoutgate.close()
        trust.append(before)
    assert trust[0] == 1.0
    assert trust[2] == trust[1] < 0.7  # as it was
    assert trust[4] == 1.0


@pytest.mark.parametrize("damaged", ["", "[]", '{"export": 1}', '{"export": "x", "scores": [{"weight": "a"}]}'])
def test_a_damaged_score_is_reset(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(damaged)
    scoutgate = forecaster(state_file=tmp_path / "state.json")
    scoutgate.load(exported(tmp_path))
    assert scoutgate.wait_idle(10)
    assert scoutgate.trust == 1.0
    scoutgate.close()


def test_its_memory_is_bounded(scoutgate: ScoutGateForecaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgemoe.experts.predict.scoutgate_forecaster.TRACKS", 5)
    for number in range(20):
        run(scoutgate, meta((f"r{number}",), [[1]], [0], [True]), np.zeros((L, 1, K), int))
    assert len(scoutgate._tracks) == 5
    assert list(scoutgate._ahead) == ["r19"]  # of the last step alone: each entry holds its whole batch


@pytest.mark.parametrize(
    ("served", "tokenizer", "what"),
    [
        (ServedModel("other", SIZES), "tokenizer", "digest"),
        (SERVED, "other", "tokenizer"),
        (ServedModel("digest", replace(SIZES, layers=L + 1)), "tokenizer", "layers x experts"),
        (ServedModel("digest", replace(SIZES, top_k=K + 1)), "tokenizer", "experts per token"),
    ],
)
def test_an_export_for_another_model_is_refused(tmp_path: Path, served: ServedModel, tokenizer: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"ScoutGate for the model: its .*{what}"):
        read_fitting_export(exported(tmp_path), served, tokenizer, embedding())


def test_an_export_that_cannot_be_fed_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a ScoutGate export"):
        read_fitting_export(tmp_path, SERVED, "tokenizer", embedding())
    with pytest.raises(ConfigError, match="embedding width"):
        read_fitting_export(exported(tmp_path / "a"), SERVED, "tokenizer", embedding(D + 1))
    with pytest.raises(ConfigError, match="hidden states"):
        read_fitting_export(exported(tmp_path / "b", variant="context", hidden=4), SERVED, "tokenizer", embedding())
    record = exported(tmp_path / "c") / RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": "0"}))
    with pytest.raises(ConfigError, match="damaged"):
        read_fitting_export(tmp_path / "c", SERVED, "tokenizer", embedding())
    (tmp_path / "c" / WEIGHTS).write_bytes(b"garbage")
    digest = hashlib.sha256(b"garbage").hexdigest()
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": digest}))
    with pytest.raises(ConfigError, match="cannot be used"):
        read_fitting_export(tmp_path / "c", SERVED, "tokenizer", embedding())
    record.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not a ScoutGate export"):
        read_fitting_export(tmp_path / "c", SERVED, "tokenizer", embedding())


def test_a_forecaster_that_does_not_fit_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from edgemoe.worker import cache_policy

    settings = Settings(model=ModelSettings(path=str(tmp_path)), cache=CacheSettings(scoutgate=str(tmp_path)))
    manifest = SimpleNamespace(files=())
    scoutgate = cache_policy.scoutgate_for(settings, manifest, SERVED, embedding())
    assert scoutgate is not None
    assert "serving without ScoutGate" in caplog.text
    run(scoutgate, meta(("a",), [[1]], [0], [True]), np.zeros((L, 1, K), int))
    assert scoutgate.forecast is None
    assert scoutgate.trust == 0.0
    exported(tmp_path)
    scoutgate.load(tmp_path)
    run(scoutgate, meta(("a",), [[2]], [1], [True]), np.zeros((L, 1, K), int))
    assert scoutgate.forecast is not None
    scoutgate.close()


def test_an_export_is_replaced_while_sequences_run_and_a_bad_one_is_not(tmp_path: Path) -> None:
    scoutgate = forecaster()
    scoutgate.load(exported(tmp_path / "a"))
    run(scoutgate, meta(("a",), [[3, 1, 4]], [0], [True]), np.zeros((L, 3, K), int))
    first = scoutgate.forecast
    scoutgate.load(exported(tmp_path / "b", variant="context"))
    run(scoutgate, meta(("a",), [[1]], [3], [True]), np.zeros((L, 1, K), int))
    second = scoutgate.forecast
    assert first is not None
    assert second is not None
    (tmp_path / "c").mkdir()
    with pytest.raises(ConfigError, match="not a ScoutGate export"):
        scoutgate.load(tmp_path / "c")
    run(scoutgate, meta(("b",), [[1]], [0], [True]), np.zeros((L, 1, K), int))
    assert scoutgate.forecast is not None
    assert scoutgate.forecast.step == 3
    assert (scoutgate.loads, scoutgate.refused) == (2, 1)
    scoutgate.close()


@pytest.mark.parametrize(
    ("step_s", "stall_s", "forecasts"),
    [(0.01, 0.0, 7), (0.01, 0.01, 40), (0.05, 0.0, 30), (0.2, 0.0, 100)],  # 0.3, 2, 1.5 and 6 ms a step to spend
)
def test_beyond_its_share_of_the_steps_time_it_skips_steps(
    step_s: float, stall_s: float, forecasts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, probs = [0.0], ForecastTables.probs

    def costly(self: ForecastTables, tracks: list[TokenWindow]) -> np.ndarray:
        now_s[0] += 0.005
        return probs(self, tracks)

    monkeypatch.setattr(ForecastTables, "probs", costly)
    scoutgate = forecaster(lambda: now_s[0])
    scoutgate.load(exported(tmp_path))
    made = set()
    for position in range(100):
        step = meta(("a",), [[1]], [position], [True])
        run(scoutgate, step)
        assert scoutgate.forecast is not None
        made.add(scoutgate.forecast.step)
        scoutgate.learn(routing(step, np.zeros((L, 1, K), int), step_s, stall_s))
        assert scoutgate.wait_idle(10)
    scoutgate.close()
    assert len(made) == pytest.approx(forecasts, abs=2)
    assert scoutgate.metrics()[names.SCOUTGATE_LEFT_OUT] == 100 - len(made)
    assert max(np.diff(sorted(made)), default=0) <= -(-100 // forecasts) + 2  # evenly


class Held(TorchDispatchMode):
    """Counts the bytes of new tensors while they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        known = {each.untyped_storage().data_ptr() for each in tensors}
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in known:
                size = each.untyped_storage().nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(each, self._drop, size)
        return out

    def _drop(self, size: int) -> None:
        self.now -= size


def test_an_export_is_loaded_beside_the_engines_embedding_without_another_copy_of_it(tmp_path: Path) -> None:
    vocabulary, width = 100_000, 256  # its own part of each token is 128 half floats wide
    served = ServedModel("digest", replace(SIZES, hidden=width))
    table = torch.zeros(vocabulary, width, dtype=torch.bfloat16)
    write_export(
        tmp_path,
        ScoutGate(ScoutGateShape((E,) * L, K, width)),
        (torch.ones(2 * L), torch.zeros(2 * L)),
        MODEL,
        PROMISED,
    )
    scoutgate = ScoutGateForecaster(served, "tokenizer", DenseMatrix(table, ENCODINGS["bfloat16"], width))
    with Held() as held:
        scoutgate.load(tmp_path)
    scoutgate.close()
    assert held.peak > vocabulary * 128 * 2
    assert held.peak < vocabulary * 128 * 2 + table.nbytes / 2

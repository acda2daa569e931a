"""Training, evaluation and export, end to end on routes that can be learnt."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.synthetic import EXPERTS, checkpoint, dataset

from edgemoe.demo import model_path
from edgemoe.experts.predict.scoutgate_model import ScoutGate, ScoutGateShape, read_export, write_export
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.packer import pack
from scoutgate.data import Recording
from scoutgate.embedding import load_embedding
from scoutgate.evaluate import Judged, judge_run, plot, positions_for, table
from scoutgate.module import KeepBest
from scoutgate.train import arguments, train

PASSES = 30


def run(folder: Path, out: Path, *more: str) -> Path:
    options = ["--data", str(folder / "data"), "--model", str(folder / "model"), "--out", str(out), "--no-progress"]
    return train(arguments([*options, "--batch", "128", "--lr", "0.01", "--device", "cpu", "--threads", "1", *more]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scoutgate")
    dataset(path / "data")
    checkpoint(path / "model")
    return path


@pytest.fixture(scope="module")
def judged(folder: Path) -> Judged:
    out = run(folder, folder / "run", "--passes", str(PASSES))
    return judge_run(out, folder / "data", folder / "model")


def test_weights_of_no_loss_never_take_the_place_of_good_ones(tmp_path: Path) -> None:
    network = ScoutGate(ScoutGateShape((3, 5), top_k=2, embedding=12))
    keep = KeepBest(tmp_path, network, dict)
    for loss in (0.5, float("nan"), 0.6):
        trainer = SimpleNamespace(callback_metrics={"log_loss": loss}, sanity_checking=False, global_step=1)
        keep.on_validation_end(trainer, None)  # type: ignore[arg-type]
    assert keep.best == 0.5
    assert json.loads((tmp_path / "best.json").read_text())["log_loss"] == 0.5


def test_it_learns_patterns_beyond_popularity_and_recency(judged: Judged) -> None:
    metrics = judged.metrics["horizons"]["this_token"]
    best_other = max(metrics[name]["recall_at_k"] for name in ("popularity", "ewma", "transition"))
    assert metrics["scoutgate"]["recall_at_k"] > best_other + 0.2
    assert metrics["scoutgate"]["log_loss"] < 0.8 * metrics["popularity"]["log_loss"]
    assert len(metrics["scoutgate"]["recall_per_layer"]) == len(EXPERTS)


def test_the_fusion_is_no_worse_than_its_best_input(judged: Judged) -> None:
    for metrics in judged.metrics["horizons"].values():
        inputs = (metrics[name]["log_loss"] for name in ("popularity", "ewma", "transition", "scoutgate"))
        assert metrics["fusion"]["log_loss"] <= min(inputs) * 1.02


def test_metrics_become_a_table_and_a_picture(judged: Judged, tmp_path: Path) -> None:
    assert "scoutgate" in table(judged.metrics)
    plot(judged, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_an_export_gives_the_same_forecasts(judged: Judged, tmp_path: Path) -> None:
    write_export(tmp_path, judged.gate, judged.calibration, judged.model, judged.metrics)
    back = read_export(tmp_path)
    assert back.record["model"] == {"id": "tests/synthetic", "digest": "d1", "tokenizer": "t1"}
    projected, present = torch.randn(4, 8, 128), torch.ones(4, 8, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(back.gate(projected, present), judged.gate(projected, present))
    torch.testing.assert_close(back.scale, judged.calibration[0])


def test_a_killed_run_goes_on_where_it_was(folder: Path) -> None:
    out = run(folder, folder / "killed", "--passes", "6")
    first = [int(line.split(",")[1]) for line in _log(out)]
    run(folder, out, "--passes", "12")
    second = [int(line.split(",")[1]) for line in _log(out)]
    assert min(second) > max(first)
    assert json.loads((out / "best.json").read_text())["step"] > max(first) / 2


def _log(out: Path) -> list[str]:
    files = sorted(out.glob("log*/metrics.csv"), key=lambda f: f.stat().st_mtime)
    return [line for line in files[-1].read_text().splitlines()[1:] if line]


def test_a_run_of_another_model_is_refused(folder: Path, tmp_path: Path, judged: Judged) -> None:
    other = dataset(tmp_path / "data")
    record = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**record, "experts": [8, 8, 8]}))
    with pytest.raises(ValueError, match="another model"):
        judge_run(folder / "run", other, folder / "model")


def test_a_folder_that_was_trained_from_other_data_is_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    out = run(folder, tmp_path / "run", "--passes", "2")
    dataset(tmp_path / "data", 60)
    checkpoint(tmp_path / "model")
    with pytest.raises(ValueError, match="a training from other data"):
        run(tmp_path, out, "--passes", "4")


def test_the_embedding_of_a_store_with_encoded_dense_weights_is_decoded(tmp_path: Path) -> None:
    pack(model_path(), tmp_path, wanted=WantedEncodings.parse("keep", "int8"))
    plain, found = load_embedding(model_path()), load_embedding(tmp_path)
    assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
    torch.testing.assert_close(found.float(), plain.float(), atol=0.02 * float(plain.abs().max()), rtol=0)


def test_a_request_longer_than_the_limit_is_scored_in_part(folder: Path) -> None:
    recording = Recording(folder / "data")
    for most in (1, 3, 10):
        assert 0 < len(positions_for(recording, "validation", 0, most)) <= most

"""Learning at the edge: a forecaster is replaced only by a better one."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.synthetic import checkpoint, dataset

from edgemoe.experts.predict.scoutgate_model import RECORD
from edgemoe.store.manifest import Manifest
from scoutgate import refresh
from scoutgate.data import Recording

FAST = ("--batch", "128", "--lr", "0.01")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(refresh, "LEAST_TOKENS", 1000)
    dataset(tmp_path / "data")
    checkpoint(tmp_path / "model")
    return tmp_path


def learn(folder: Path, run: str, passes: int) -> refresh.RefreshResult:
    paths = (folder / name for name in ("data", "model", "export", run))
    return refresh.refresh(*paths, 2.0, *FAST, "--passes", str(passes))


def test_a_forecaster_is_replaced_by_a_better_one_and_kept_from_a_worse(folder: Path) -> None:
    first = learn(folder, "first", 2)
    assert first.replaced
    assert first.old is None
    better = learn(folder, "second", 12)
    assert better.replaced
    assert better.old == pytest.approx(first.new, rel=0.02)  # judged as it will be used
    kept = (folder / "export" / RECORD).read_text()
    worse = learn(folder, "third", 1)
    assert not worse.replaced
    assert (folder / "export" / RECORD).read_text() == kept


@pytest.mark.parametrize("key", ["digest", "tokenizer"])
def test_a_forecaster_that_the_daemon_would_refuse_is_replaced(folder: Path, key: str) -> None:
    assert learn(folder, "first", 12).replaced
    record = folder / "export" / RECORD
    held = json.loads(record.read_text())
    held["model"][key] = "another"
    record.write_text(json.dumps(held))
    worse = learn(folder, "second", 1)
    assert (worse.old, worse.replaced) == (None, True)


def test_scored_data_fits_the_memory_of_the_nightly_service(tmp_path: Path) -> None:
    recording = Recording(dataset(tmp_path, 4))
    assert refresh.most_for(recording) == refresh.MOST_TOKENS
    recording.meta = replace(recording.meta, experts=(256,) * 58)
    assert refresh.most_for(recording) * 256 * 58 <= refresh.MOST_FORECASTS


def test_it_learns_for_the_model_that_the_daemon_serves(tmp_path: Path) -> None:
    config = tmp_path / "edgemoe.toml"
    config.write_text(f'[model]\nstore_dir = "{tmp_path}/stores"\n[record]\ndir = "/r"\n[cache]\nscoutgate = "/s"\n')
    served = refresh.from_settings(config)  # nothing named: the demo model
    assert served == (Path("/r"), served[1], Path("/s"))
    assert Manifest.load(served[1]).layers
    assert refresh.from_settings(config, str(served[1])) == served
    with pytest.raises(ValueError, match="nowhere"):
        refresh.from_settings(config, "/nowhere")
    config.write_text("")
    with pytest.raises(ValueError, match="nothing to learn from"):
        refresh.from_settings(config, str(served[1]))


def test_nothing_is_trained_from_too_little(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "LEAST_TOKENS", 10**9)
    with pytest.raises(ValueError, match="training begins at"):
        learn(folder, "run", 1)


def test_a_folder_that_cannot_be_written_to_is_named_before_any_training(folder: Path) -> None:
    (folder / "export").write_text("a file")
    with pytest.raises(ValueError, match=f"{folder}/export cannot be written to .*service install"):
        learn(folder, "run", 1)
    assert not (folder / "run").exists()


def test_errors_of_the_system_are_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: Path, model: str) -> tuple[Path, Path, Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/srv/export")

    monkeypatch.setattr(refresh, "from_settings", full)
    monkeypatch.setattr(sys, "argv", ["refresh", "--config", "edgemoe.toml"])
    with pytest.raises(SystemExit, match="No space left on device: '/srv/export'"):
        refresh.main()

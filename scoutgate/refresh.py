"""Trains on the edge from local recordings, and replaces the export in use only by a better one.

`python -m scoutgate.refresh --config FILE` takes recordings, model and export folder from the daemon's settings. Both
exports forecast the same held-out requests. Neither was trained on them, because the split is by conversation and
stays the same. `edgemoe reload` makes the daemon use it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe.cli.output import progress_bar
from edgemoe.config.loading import load
from edgemoe.durable import NewFile, make_folder
from edgemoe.errors import EdgemoeError
from edgemoe.experts.predict.scoutgate_model import its_and_ours, read_export, write_export
from edgemoe.rights import become_owner
from edgemoe.store.catalog import store_of
from scoutgate import baselines, calibrate, train
from scoutgate.convert import recordings
from scoutgate.data import Recording
from scoutgate.embedding import embedding_for
from scoutgate.evaluate import judge_run, positions_for, scoutgate_predictor
from scoutgate.metrics import Score

LEAST_TOKENS = 20_000  # recorded ones; with fewer nothing is trained
MOST_TOKENS, MOST_FORECASTS = 20_000, 40_000_000  # scored; of 4 bytes each
LEAST_GAIN = 0.005  # of log-loss, for the sake of which a forecaster is replaced


@dataclass(frozen=True)
class RefreshResult:
    """Log-loss (nats per expert) of the new forecaster and the one in use, and whether it was replaced."""

    new: float
    old: float | None
    replaced: bool


def most_for(recording: Recording) -> int:
    """Returns how many tokens may be scored: forecasts of all experts for each, by four, of two splits, are kept."""
    return min(MOST_TOKENS, MOST_FORECASTS // sum(recording.meta.experts))


def export_log_loss(directory: Path, recording: Recording, model: Path) -> float | None:
    """Returns the log-loss of an export's calibrated forecasts for the test split; None if it is absent or unfit."""
    try:
        found = read_export(directory)
    except ValueError:
        return None
    embedding, meta, shape = embedding_for(recording, model), recording.meta, found.shape
    for what, ours in (("digest", meta.digest), ("tokenizer", meta.tokenizer)):
        its, wanted = its_and_ours(found.record, what, ours)
        if its != wanted:
            return None
    if (shape.experts, shape.top_k, shape.embedding) != (meta.experts, meta.top_k, embedding.shape[1]) or shape.hidden:
        return None
    at = positions_for(recording, "test", 0, most_for(recording))
    scores = calibrate.logits(scoutgate_predictor(found.gate, recording, embedding)(at, 0))
    sizes = np.array(meta.experts)
    scale, shift = (t[: meta.layers].numpy().repeat(sizes) for t in (found.scale, found.shift))
    p = calibrate.sigmoid(scale * scores + shift).astype(np.float32)
    score = Score(meta.top_k)
    score.add(p, baselines.routes(recording, at) > 0)
    return score.metrics()["log_loss"]


def check_writable(folder: Path) -> None:
    """Makes an export's folder if it is missing. Raises ValueError if it cannot be written to."""
    try:
        make_folder(folder)
        NewFile(folder / ".probe").__exit__(None, None, None)
    except OSError as error:
        raise ValueError(
            f"cache.scoutgate: {folder} cannot be written to ({error.strerror}). Make the folder, owned by the user "
            "that trains (edgemoe for a service). Then run `edgemoe service install` again to open it to the service"
        ) from error


def refresh(data: Path, model: Path, target: Path, run: Path, max_minutes: float, *more: str) -> RefreshResult:
    """Trains in `run` (with `more` options of scoutgate.train) and writes `target` where that is better.

    Raises ValueError where nothing can be trained, or written: before it trains, which may take half an hour.
    """
    recording = Recording(data)
    if recording.count < LEAST_TOKENS:
        raise ValueError(f"{recording.count} tokens are recorded; training begins at {LEAST_TOKENS}")
    check_writable(target)
    options = ["--data", str(data), "--model", str(model), "--out", str(run), "--max-minutes", str(max_minutes)]
    fixed = ["--variant", "context", "--no-hidden", "--device", "cpu", "--threads", "1", "--no-progress"]
    train.train(train.arguments([*options, *fixed, *more]))
    judged = judge_run(run, data, model, most_for(recording))
    new = float(judged.metrics["horizons"]["this_token"]["scoutgate"]["log_loss"])
    old = export_log_loss(target, recording, model)
    better = old is None or new < old * (1 - LEAST_GAIN)
    if better:
        write_export(target, judged.gate, judged.calibration, judged.model, judged.metrics)
    return RefreshResult(new, old, better)


def from_settings(config: Path, model: str = "") -> tuple[Path, Path, Path]:
    """Recordings, store and export folder that the daemon uses. Raises ValueError where one is not set."""
    try:
        settings = load(config, [f"model.path={model}"] if model else []).settings
        written = (settings.model.store_dir, settings.record.dir, settings.cache.scoutgate)
        become_owner(*(Path(each) for each in written if each))
        store = Path(store_of(settings.model, progress_bar).path)
    except EdgemoeError as error:
        raise ValueError(str(error)) from error
    if not settings.record.dir or not settings.cache.scoutgate:
        raise ValueError(f"{config} sets no record.dir, or no cache.scoutgate: there is nothing to learn from, or for")
    return Path(settings.record.dir), store, Path(settings.cache.scoutgate)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scoutgate.refresh", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the daemon's settings")
    parser.add_argument("--model", default="", help="what it serves, where that is not in the settings")
    parser.add_argument("--max-minutes", type=float, default=30.0)
    options = parser.parse_args()
    try:
        records, store, target = from_settings(options.config, options.model)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    work = Path(tempfile.mkdtemp(prefix="scoutgate-"))
    try:
        recordings(records, store, work / "data", hints=False)
        verdict = refresh(work / "data", store, target, work / "run", options.max_minutes)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    word = "replaced" if verdict.replaced else "kept"
    print(f"log-loss {verdict.new:.4f} (new) against {verdict.old} (in use): {word}")


if __name__ == "__main__":
    main()

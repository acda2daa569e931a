"""Judges a trained ScoutGate on the test split, beside the baselines: `python -m scoutgate.evaluate`.

See docs/forecasting.md for the horizons. Every forecast is calibrated on the validation split, and so is the fusion of
all; nothing is fitted on the test split.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from edgemoe.durable import replace_file
from edgemoe.errors import EdgemoeError
from edgemoe.experts.predict.scoutgate_model import ScoutGate, ScoutGateShape
from edgemoe.rights import become_owner
from scoutgate import baselines, calibrate
from scoutgate.baselines import FloatArray, IntArray, Predictor
from scoutgate.data import Recording, gather
from scoutgate.embedding import embedding_for
from scoutgate.metrics import Score

HORIZONS = {"this_token": 0, "next_token": 1, "layer_ahead": 0}
FIT_ROWS = 200_000  # (token, expert) pairs that one calibration is fitted on


@dataclass(frozen=True)
class Judged:
    """The results that `evaluate` reports and `export` writes."""

    gate: ScoutGate
    calibration: tuple[Tensor, Tensor]  # scale and shift, [horizons * L] each
    model: dict[str, str]
    metrics: dict[str, Any]
    reliability: dict[str, dict[str, list[tuple[float, float, int]]]]  # horizon -> predictor -> bins


def load_run(run: Path) -> ScoutGate:
    """Loads the best weights of a training folder. Raises ValueError if there are none."""
    try:
        record = json.loads((run / "best.json").read_text(encoding="utf-8"))
        gate = ScoutGate(ScoutGateShape.from_dict(record["shape"]))
        gate.load_state_dict(load_file(run / "best.safetensors"))
    except (OSError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(f"{run} holds no trained ScoutGate: {error}") from error
    return gate.eval()


def scoutgate_predictor(gate: ScoutGate, recording: Recording, embedding: Tensor) -> Predictor:
    """Returns ScoutGate's forecasts, not yet calibrated."""
    shape = gate.shape
    with torch.no_grad():
        projected = gate.project(embedding.float())  # [V, d_proj]

    def predict(positions: IntArray, horizon: int) -> FloatArray:
        out = np.empty((len(positions), shape.total), np.float32)
        with torch.no_grad():
            for start in range(0, len(positions), 4096):
                x = gather(recording, positions[start : start + 4096], shape)
                logits = gate(projected[x.tokens.clamp_min(0)], x.tokens >= 0, x.previous, x.state)
                part = logits.view(len(x.tokens), shape.horizons, -1)[:, horizon]
                out[start : start + 4096] = part.sigmoid().numpy()
        return out

    return predict


def positions_for(recording: Recording, split: str, horizon: int, most: int, hinted: bool = False) -> IntArray:
    """Returns decoded tokens of whole requests (all tokens if none is marked), at most about `most`.

    With `hinted`, only tokens at which gates were asked one layer early.
    """
    at = recording.positions(split, decode_only=True)
    at = at if len(at) else recording.positions(split)
    at = at[recording.hinted(at)] if hinted else at
    if len(at) > most:
        whole = at[at < recording.starts[recording.request[at[most]]]]
        at = whole if len(whole) else at[:most]  # the first request alone is longer
    ends = recording.starts[recording.request[at] + 1]
    return at[at + horizon < ends]


class Comparison:
    """All predictors at one horizon: forecasts on validation and test, calibrated per layer, and their fusion."""

    def __init__(
        self, recording: Recording, predictors: Mapping[str, Predictor], horizon: int, most: int, hinted: bool
    ) -> None:
        self.meta, self.names = recording.meta, list(predictors)
        self.p: dict[str, dict[str, FloatArray]] = {}
        self.truth: dict[str, npt.NDArray[np.bool_]] = {}
        for split in ("validation", "test"):
            at = positions_for(recording, split, horizon, most, hinted)
            if not len(at):
                raise ValueError(f"the {split} split is empty; record more requests")
            self.p[split] = {name: predict(at, horizon) for name, predict in predictors.items()}
            self.truth[split] = baselines.routes(recording, at + horizon) > 0
        self.weights: dict[str, list[calibrate.Array]] = {}  # predictor -> per layer

    def spans(self) -> list[slice]:
        ends = np.cumsum(self.meta.experts)
        return [slice(int(e - n), int(e)) for e, n in zip(ends, self.meta.experts, strict=True)]

    def _features(self, split: str, names: list[str], span: slice) -> calibrate.Array:
        return np.stack([calibrate.logits(self.p[split][name][:, span]) for name in names], -1)  # [n, E, F]

    def score(self, name: str, names: list[str]) -> list[Score]:
        """Scores each layer's fusion of the forecasts `names`, fitted on validation and scored on test."""
        scores, self.weights[name] = [], []
        for span in self.spans():
            x, y = self._features("validation", names, span), self.truth["validation"][:, span]
            rows = slice(0, max(1, FIT_ROWS // x.shape[1]))
            weights = calibrate.fit(x[rows].reshape(-1, len(names)), y[rows].reshape(-1))
            score = Score(self.meta.top_k)
            score.add(calibrate.apply(weights, self._features("test", names, span)), self.truth["test"][:, span])
            scores.append(score)
            self.weights[name].append(weights)
        return scores

    def run(self) -> dict[str, list[Score]]:
        scores = {name: self.score(name, [name]) for name in self.names}
        scores["fusion"] = self.score("fusion", self.names)
        if "scoutgate" in self.names and len(self.names) > 1:
            scores["fusion_without_scoutgate"] = self.score("rest", [n for n in self.names if n != "scoutgate"])
        return scores


def best_ewma(recording: Recording, most: int) -> tuple[float, Predictor]:
    """Returns the rate and forecasts of the EWMA with the least log-loss on validation."""
    at = positions_for(recording, "validation", 0, min(most, 5000))
    truth = baselines.routes(recording, at) > 0

    def loss(rate: float) -> float:
        p = np.clip(baselines.ewma(recording, rate)(at, 0), 1e-4, 1 - 1e-4)
        return float(-np.log(np.where(truth, p, 1 - p)).mean())

    rate = min(baselines.EWMA_RATES, key=loss)
    return rate, baselines.ewma(recording, rate)


def judge(gate: ScoutGate, recording: Recording, embedding: Tensor, most: int = 20_000) -> Judged:
    rate, smoothed = best_ewma(recording, most)
    predictors: dict[str, Predictor] = {
        "popularity": baselines.popularity(recording),
        "ewma": smoothed,
        "transition": baselines.transition(recording, gate.shape.horizons),
        "scoutgate": scoutgate_predictor(gate, recording, embedding),
    }
    ahead = baselines.next_layer_gate(recording)
    if not all(len(positions_for(recording, split, 0, most, hinted=True)) for split in ("validation", "test")):
        ahead = None
    horizons: dict[str, Any] = {}
    reliability: dict[str, dict[str, list[tuple[float, float, int]]]] = {}
    calibration: list[calibrate.Array] = []
    for name, horizon in HORIZONS.items():
        if horizon >= gate.shape.horizons or (name == "layer_ahead" and ahead is None):
            continue
        here = {**predictors, "next_layer_gate": ahead} if name == "layer_ahead" and ahead else predictors
        comparison = Comparison(recording, here, horizon, most, hinted=name == "layer_ahead")
        scores = comparison.run()
        totals = {who: sum(parts[1:], parts[0]) for who, parts in scores.items()}
        horizons[name] = {
            who: {**total.metrics(), "recall_per_layer": [s.metrics()["recall_at_k"] for s in scores[who]]}
            for who, total in totals.items()
        }
        reliability[name] = {who: total.reliability() for who, total in totals.items()}
        if name != "layer_ahead":
            calibration += comparison.weights["scoutgate"]
    pairs = torch.tensor(np.array(calibration), dtype=torch.float32)  # [horizons * L, 2]
    meta = recording.meta
    model = {"id": meta.model, "digest": meta.digest, "tokenizer": meta.tokenizer}
    metrics = {"horizons": horizons, "ewma_rate": rate, "data": meta.notes}
    return Judged(gate, (pairs[:, 0], pairs[:, 1]), model, metrics, reliability)


def judge_run(run: Path, data: Path, model: Path | None, most: int = 20_000) -> Judged:
    """Raises ValueError where run, data and model do not fit each other."""
    gate, recording = load_run(run), Recording(data)
    embedding = embedding_for(recording, model)
    shape, meta = gate.shape, recording.meta
    if (shape.experts, shape.top_k, shape.embedding) != (meta.experts, meta.top_k, embedding.shape[1]):
        raise ValueError(f"{run} was trained for another model than {data} was recorded from")
    return judge(gate, recording, embedding, most)


def table(metrics: Mapping[str, Any]) -> str:
    """Formats the metrics as a text table, one row per forecast."""
    lines = []
    for horizon, judged in metrics["horizons"].items():
        lines.append(f"\n{horizon:26}{'recall@k':>10}{'@2k':>8}{'log-loss':>10}{'ECE':>8}")
        for who, f in judged.items():
            values = (
                f"{f['recall_at_k']:10.3f}{f['recall_at_2k']:8.3f}{f['log_loss']:10.4f}{f['calibration_error']:8.4f}"
            )
            lines.append(f"  {who:24}{values}")
    return "\n".join(lines)


def plot(judged: Judged, file: Path) -> None:
    """Plots the reliability of every forecast, and recall per layer, for each horizon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    horizons = list(judged.reliability)
    figure, axes = plt.subplots(2, len(horizons), figsize=(5 * len(horizons), 8), squeeze=False)
    for column, horizon in enumerate(horizons):
        top, bottom = axes[0, column], axes[1, column]
        top.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for who, bins in judged.reliability[horizon].items():
            top.plot([b[0] for b in bins], [b[1] for b in bins], marker="o", markersize=3, label=who)
            bottom.plot(judged.metrics["horizons"][horizon][who]["recall_per_layer"], marker="o", markersize=3)
        top.set(title=horizon, xlabel="forecast", ylabel="happened")
        bottom.set(xlabel="layer", ylabel="recall@k")
        top.legend(fontsize=7)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format=file.suffix.removeprefix(".") or "png")
    replace_file(file, drawn.getvalue(), 0o644)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scoutgate.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="training folder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="checkpoint or store of the recorded model")
    parser.add_argument("--most", type=int, default=20_000, help="tokens to score, at most")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args()
    try:
        become_owner(*([options.plot] if options.plot else []))
        judged = judge_run(options.run, options.data, options.model, options.most)
    except (ValueError, EdgemoeError) as error:
        raise SystemExit(str(error)) from error
    if options.plot:
        plot(judged, options.plot)
    print(table(judged.metrics))
    print(json.dumps({"reliability": judged.reliability, **judged.metrics}))


if __name__ == "__main__":
    main()

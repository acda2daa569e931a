"""Exports: the one form in which a trained predictor reaches a daemon, safetensors and JSON.

`python -m scoutgate.export` writes

    scoutgate.safetensors   the weights of ScoutGate, float32
    scoutgate.json          format, shape, model (id, digest, tokenizer hash), calibration, metrics, hash of the weights
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from edgemoe.durable import make_folder, replace_file
from edgemoe.experts.predict.scoutgate.model import ScoutGate, ScoutGateShape

FORMAT = 1
WEIGHTS, RECORD = "scoutgate.safetensors", "scoutgate.json"
MAX_WEIGHTS_BYTES = 1 << 30


@dataclass(frozen=True)
class Export:
    """A ScoutGate as read from disk. Calibrated: p = sigmoid(scale * s + shift), [horizons * L] each."""

    gate: ScoutGate
    scale: Tensor
    shift: Tensor
    record: dict[str, Any]

    @property
    def shape(self) -> ScoutGateShape:
        return self.gate.shape


def write_export(
    directory: Path, gate: ScoutGate, calibration: tuple[Tensor, Tensor], model: dict[str, str], metrics: dict[str, Any]
) -> None:
    """Writes an export; the JSON last, so that a half-written one is refused."""
    scale, shift = calibration
    record = {
        "shape": gate.shape.as_dict(), "model": model,
        "calibration": {"scale": scale.tolist(), "shift": shift.tolist()}, "metrics": metrics,
    }  # fmt: skip
    write_tensors(directory / WEIGHTS, directory / RECORD, gate.state_dict(), record)


def write_tensors(weights: Path, record: Path, values: Mapping[str, Tensor], told: dict[str, Any]) -> None:
    """Writes tensors and what is told of them, with format and hash; the JSON last."""
    make_folder(weights.parent)
    data = save({name: value.detach().cpu().float().contiguous() for name, value in values.items()})
    digest = hashlib.sha256(data).hexdigest()
    replace_file(weights, data, 0o644)
    replace_file(record, (json.dumps({"format": FORMAT, "sha256": digest, **told}, indent=1) + "\n").encode(), 0o644)


def read_export(directory: Path) -> Export:
    """Raises ValueError, saying what is wrong, where the directory holds no whole export of this format."""
    record, data = read_tensors(directory / WEIGHTS, directory / RECORD, "ScoutGate")
    try:
        gate = ScoutGate(ScoutGateShape.from_dict(record["shape"]))
        gate.load_state_dict(load(data))
        scale, shift = (torch.tensor(record["calibration"][k], dtype=torch.float32) for k in ("scale", "shift"))
        if scale.shape != shift.shape or scale.shape != (gate.shape.horizons * gate.shape.layers,):
            raise ValueError("the calibration does not fit the shape")
        if not all(t.isfinite().all() for t in (*gate.state_dict().values(), scale, shift)):
            raise ValueError("it holds numbers that are not finite")
        if not 0.0 <= promised_loss(record) < math.inf:
            raise ValueError("its log-loss is no number")
        if not all(isinstance(v, str) for v in record["model"].values()):
            raise ValueError("the model is not named")
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{directory} holds a ScoutGate that cannot be used: {error}") from error
    return Export(gate.eval().requires_grad_(False), scale, shift, record)


def its_and_ours(record: dict[str, Any], what: str, ours: str) -> tuple[str, str]:
    """Returns the model's `what` by an export's record, and ours; an empty one is taken for the other, and fits all."""
    its = str(record["model"].get(what) or ours)
    return its, ours or its


def promised_loss(record: dict[str, Any]) -> float:
    """Returns the log-loss of this token's forecast on held-out requests; 0 where the export does not say."""
    figures = record["metrics"].get("horizons", {}).get("this_token", {}).get("scoutgate", {})
    return float(figures.get("log_loss", 0.0))


def read_tensors(weights: Path, record: Path, what: str) -> tuple[dict[str, Any], bytes]:
    """Returns the record and the safetensors bytes of an export. Raises ValueError if it is incomplete."""
    try:
        told = json.loads(record.read_text())
        if weights.stat().st_size > MAX_WEIGHTS_BYTES:
            raise ValueError(f"{weights} is too large for a {what}")
        data = weights.read_bytes()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{record.parent} is not a {what} export: {error}") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise ValueError(f"{record} is not of format {FORMAT}; export the predictor again")
    if hashlib.sha256(data).hexdigest() != told.get("sha256"):
        raise ValueError(f"{weights} is damaged, or belongs to another {record.name}; export the predictor again")
    return told, data

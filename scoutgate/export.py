"""Exports: the one form in which a trained predictor reaches a daemon, safetensors and JSON.

`python -m scoutgate.export --run DIR --data DIR --model DIR --to DIR` calibrates the best weights on the validation
split, judges them on the test split, and writes

    scoutgate.safetensors   the weights of scoutgate.model.ScoutGate, float32
    scoutgate.json          format, shape, model (id, digest, tokenizer hash), calibration, metrics, hash of the weights
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from scoutgate.model import ScoutGate, ScoutShape

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
    def shape(self) -> ScoutShape:
        return self.gate.shape


def write(
    directory: Path, gate: ScoutGate, calibration: tuple[Tensor, Tensor], model: dict[str, str], metrics: dict[str, Any]
) -> None:
    """Writes an export; the JSON last, so that a half-written one is refused."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().float().contiguous() for name, value in gate.state_dict().items()}
    save_file(weights, directory / (WEIGHTS + ".tmp"))
    (directory / (WEIGHTS + ".tmp")).chmod(0o644)  # safetensors writes for the owner alone
    digest = hashlib.sha256((directory / (WEIGHTS + ".tmp")).read_bytes()).hexdigest()
    scale, shift = calibration
    record = {
        "format": FORMAT, "shape": gate.shape.as_dict(), "model": model, "sha256": digest,
        "calibration": {"scale": scale.tolist(), "shift": shift.tolist()}, "metrics": metrics,
    }  # fmt: skip
    (directory / (RECORD + ".tmp")).write_text(json.dumps(record, indent=1) + "\n")
    (directory / (WEIGHTS + ".tmp")).replace(directory / WEIGHTS)
    (directory / (RECORD + ".tmp")).replace(directory / RECORD)


def read(directory: Path) -> Export:
    """Raises ValueError, saying what is wrong, where the directory holds no whole export of this format."""
    try:
        record = json.loads((directory / RECORD).read_text())
        if (directory / WEIGHTS).stat().st_size > MAX_WEIGHTS_BYTES:
            raise ValueError(f"{directory / WEIGHTS} is too large for a ScoutGate")
        data = (directory / WEIGHTS).read_bytes()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{directory} is not a ScoutGate export: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{directory / RECORD} is not of format {FORMAT}; export the predictor again")
    if hashlib.sha256(data).hexdigest() != record.get("sha256"):
        raise ValueError(
            f"{directory / WEIGHTS} is damaged, or belongs to another {RECORD}; export the predictor again"
        )
    try:
        gate = ScoutGate(ScoutShape.from_dict(record["shape"]))
        gate.load_state_dict(load(data))
        scale, shift = (torch.tensor(record["calibration"][k], dtype=torch.float32) for k in ("scale", "shift"))
        if scale.shape != shift.shape or scale.shape != (gate.shape.horizons * gate.shape.layers,):
            raise ValueError("the calibration does not fit the shape")
        if not all(t.isfinite().all() for t in (*gate.state_dict().values(), scale, shift)):
            raise ValueError("it holds numbers that are not finite")
        if not all(isinstance(v, str) for v in record["model"].values()):
            raise ValueError("the model is not named")
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds a ScoutGate that cannot be used: {error}") from error
    return Export(gate.eval().requires_grad_(False), scale, shift, record)


def main() -> None:
    from scoutgate.evaluate import judge_run  # evaluation needs more than a server has

    parser = argparse.ArgumentParser(prog="scoutgate.export", description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="training folder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="checkpoint or store of the recorded model")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    try:
        judged = judge_run(options.run, options.data, options.model)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    write(options.to, judged.gate, judged.calibration, judged.model, judged.metrics)
    print(f"wrote {options.to / WEIGHTS} and {options.to / RECORD}")


if __name__ == "__main__":
    main()

"""The small Mixture-of-Experts model that ships with the package; `tools/make_demo_model.py` made it.

`model/` is a Hugging Face checkpoint, which the daemon packs when it is first served. `training.json` records its
training data, duration and quality.
"""

from __future__ import annotations

from pathlib import Path

from edgemoe.errors import CheckpointError

NAME = "edgemoe-demo"  # its name for clients
FOLDER = Path(__file__).parent / "model"


def model_path() -> Path:
    """Returns the demo model's checkpoint directory. Raises CheckpointError if it is not installed."""
    if not (FOLDER / "model.safetensors").is_file():
        raise CheckpointError(f"the demo model is missing from {FOLDER}; install edgemoe again, or give a model")
    return FOLDER

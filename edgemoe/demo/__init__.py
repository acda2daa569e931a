"""The small Mixture-of-Experts model that ships with the package; `tools/make_demo_model.py` made it.

`model/` is an ordinary Hugging Face checkpoint, which the daemon packs when it is first served; `training.json`
tells what it was trained on, for how long, and how well it does.
"""

from __future__ import annotations

from pathlib import Path

from edgemoe.errors import CheckpointError

NAME = "edgemoe-demo"  # what clients call it
FOLDER = Path(__file__).parent / "model"


def model_path() -> Path:
    """The demo model's checkpoint directory. Raises CheckpointError where the package was installed without it."""
    if not (FOLDER / "model.safetensors").is_file():
        raise CheckpointError(f"the demo model is missing from {FOLDER}; install edgemoe again, or give a model")
    return FOLDER

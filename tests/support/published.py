"""Configurations of published models, without fields that no size and no speed depends on."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data/configurations"
CONFIGURATIONS = {path.name.removesuffix(".json"): path for path in sorted(FOLDER.glob("*.json"))}

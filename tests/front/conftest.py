"""Model files for the daemon's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.front_kit import write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))

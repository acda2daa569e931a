"""Conversion of recordings into ScoutGate's data."""

from __future__ import annotations

from pathlib import Path

import pytest

from scoutgate.convert import convert


@pytest.mark.parametrize("folders", [1, 2])
def test_recordings_are_converted_a_folder_at_a_time_with_their_store(tmp_path: Path, folders: int) -> None:
    with pytest.raises(ValueError, match="a folder at a time, with --model"):
        convert([tmp_path] * folders, None if folders == 1 else tmp_path, tmp_path / "out")

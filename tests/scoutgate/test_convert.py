"""Conversion of recordings into ScoutGate's data, and the help of its commands."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import scoutgate
from scoutgate.convert import convert

FOLDER = Path(scoutgate.__file__).parent
COMMANDS = sorted(file.stem for file in FOLDER.glob("*.py") if "\ndef main() -> None:" in file.read_text())


@pytest.mark.parametrize("folders", [1, 2])
def test_recordings_are_converted_a_folder_at_a_time_with_their_store(tmp_path: Path, folders: int) -> None:
    with pytest.raises(ValueError, match="a folder at a time, with --model"):
        convert([tmp_path] * folders, None if folders == 1 else tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"scoutgate.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert " ".join(str(module.__doc__).split()[:4]) in " ".join(capsys.readouterr().out.split())

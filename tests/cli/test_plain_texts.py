"""Texts from outside reach the terminal without escape sequences, and in a bounded length."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from edgemoe.cli import main
from edgemoe.cli.output import console
from edgemoe.demo import model_path
from edgemoe.outputs import MOST_CHARS, plain

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egpj"
HIDDEN = set("\x1b\x07\x9b\u202e")


def test_a_message_keeps_its_lines_and_letters_and_nothing_else() -> None:
    assert plain("a\tb\né \U0001f600") == "a\tb\né \U0001f600"
    assert not set(plain(ESCAPES)) & HIDDEN
    assert MOST_CHARS < len(plain("x" * (1 << 20))) < MOST_CHARS + 100


def test_tables_show_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(f"store {ESCAPES}")
    shown = capsys.readouterr().out
    assert "store" in shown
    assert not set(shown) & HIDDEN


@pytest.mark.parametrize("name", [ESCAPES, "x" * (1 << 20)], ids=["escapes", "long"])
def test_the_error_about_a_checkpoint_s_tensor_is_plain(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_path(), model)
    header = json.dumps({name: 1}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert main(["pack", str(model), str(tmp_path / "store")]) == 1
    told = capsys.readouterr().err
    assert "model.safetensors" in told
    assert not set(told) & HIDDEN
    assert len(told) < MOST_CHARS + 200

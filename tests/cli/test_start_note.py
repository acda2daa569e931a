"""Commands that ask a daemon which still packs its model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.cli import main
from edgemoe.cli.client import Client
from edgemoe.config.paths import beside
from edgemoe.errors import ServiceError
from edgemoe.front.start_note import noted_start, start_note
from edgemoe.ipc.engine_socket import private_directory


class Shown(Exception):
    """A text was shown."""


def _raise(text: str) -> None:
    raise Shown(text)


def test_commands_say_how_far_a_start_is_and_wait_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    door = tmp_path / "door.sock"
    with start_note(private_directory(beside(door))) as write:
        write("packing Qwen3, 40 %")
        assert main(["status", "--socket", str(door)]) == 1
        assert f"the daemon at {door} still starts: packing Qwen3, 40 %" in capfd.readouterr().err
        with Client(door) as client, pytest.raises(Shown, match="packing Qwen3, 40 %"):
            client.wait_while_loading(_raise, lambda: False)
        write("packing Qwen3, 9 %")
        assert noted_start(beside(door)) == "packing Qwen3, 9 %"
    with Client(door) as client, pytest.raises(ServiceError, match="no daemon answers"):
        client.wait_while_loading(_raise, lambda: False)


def test_between_its_note_and_its_socket_a_daemon_is_waited_for(tmp_path: Path) -> None:
    door, shown = tmp_path / "door.sock", list[str]()
    with start_note(private_directory(beside(door))) as write:
        write("packing Qwen3, 40 %")

        def show(text: str) -> None:
            shown.append(text)
            write("")
            if len(shown) == 2:
                raise Shown

        with Client(door) as client, pytest.raises(Shown):
            client.wait_while_loading(show, lambda: False)
    assert shown == ["packing Qwen3, 40 %", "it does not answer yet"]


def test_the_note_of_a_process_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    runtime = private_directory(tmp_path / "door.run")
    code = f"""
import os
from pathlib import Path
from edgemoe.front.start_note import start_note
with start_note(Path({str(runtime)!r})) as write:
    write("packing Qwen3, 40 %")
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (runtime / "start").read_text().endswith("40 %")
    assert noted_start(runtime) == ""

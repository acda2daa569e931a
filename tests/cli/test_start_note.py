"""Commands that ask a daemon which still packs its model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgemoe.cli import client as client_module
from edgemoe.cli import main, run_command
from edgemoe.cli.client import Client
from edgemoe.cli.doctor.checks import daemon
from edgemoe.config.paths import beside
from edgemoe.errors import ServiceError
from edgemoe.front.start_note import noted_start, start_note
from edgemoe.ipc.engine_socket import private_directory


class Shown(Exception):
    """A text was shown."""


def _raise(text: str) -> None:
    raise Shown(text)


def _ended_once_shown(starting: subprocess.Popen[bytes]) -> tuple[list[str], Callable[[str], None]]:
    """Returns the texts that a command shows, and its way to show them, which ends the starting daemon."""
    said = list[str]()

    def show(text: str) -> None:
        said.append(text)
        if starting.poll() is None:
            starting.communicate()

    return said, show


def test_commands_say_how_far_a_start_is_and_wait_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    door = tmp_path / "door.sock"
    with start_note(private_directory(beside(door))) as write:
        write("packing Qwen3, 40 %")
        for command in (["status"], ["reload"], ["bench"]):
            assert main([*command, "--socket", str(door)]) == 1
            assert f"the daemon at {door} still starts: packing Qwen3, 40 %" in capfd.readouterr().err, command
        assert [(found.check, found.said) for found in daemon(door)[0]] == [
            ("daemon", f"the one at {door} still starts: packing Qwen3, 40 %")
        ]
        with Client(door) as client, pytest.raises(Shown, match="packing Qwen3, 40 %"):
            client.wait_while_loading(_raise)
        write("packing Qwen3, 9 %")
        assert noted_start(beside(door)) == "packing Qwen3, 9 %"
    with Client(door) as client, pytest.raises(ServiceError, match="no daemon answers"):
        client.wait_while_loading(_raise)


def test_a_second_daemon_is_refused_before_it_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    door = tmp_path / "door.sock"
    with start_note(private_directory(beside(door))) as write:
        write("packing Qwen3, 40 %")
        assert main(["serve", "--socket", str(door), "--set", f"model.store_dir={tmp_path / 'stores'}"]) == 1
    assert "another daemon starts here: packing Qwen3, 40 %; wait for it, or stop it" in capfd.readouterr().err
    assert not (tmp_path / "stores").exists()


def test_run_waits_for_a_daemon_that_still_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = tmp_path / "door.sock"
    monkeypatch.setattr(run_command, "wait_for_engine", lambda client: _raise(client.starting()))
    with start_note(private_directory(beside(door))) as write:
        write("packing Qwen3, 40 %")
        with pytest.raises(Shown, match="packing Qwen3, 40 %"):
            main(["run", "Qwen3", "--socket", str(door)])


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
            client.wait_while_loading(show)
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


STARTS = """
import pathlib, sys
from edgemoe.front.start_note import start_note
with start_note(pathlib.Path(sys.argv[1])) as write:
    write("packing")
    print("noted", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a note of its start, which ends with its input."""
    command = [sys.executable, "-c", STARTS, str(private_directory(beside(tmp_path / "door.sock")))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"noted\n"
        yield process
        process.kill()


def test_a_daemon_that_was_killed_while_it_started_is_not_waited_for(
    starting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    starting.kill()
    os.waitid(os.P_PID, starting.pid, os.WEXITED | os.WNOWAIT)  # its note is left, and its number, too
    with Client(tmp_path / "door.sock") as client, pytest.raises(ServiceError, match="still starts: packing"):
        client.wait_while_loading(_raise, lambda: starting.poll() is None)


def test_another_s_daemon_that_ends_while_it_starts_is_waited_for_a_moment(
    starting: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_GAP_S", 0.3)
    said, show = _ended_once_shown(starting)
    with Client(tmp_path / "door.sock") as client, pytest.raises(ServiceError, match="no daemon answers"):
        client.wait_while_loading(show)
    assert said[:2] == ["packing", "it does not answer yet"]


def test_a_daemon_that_ends_while_its_start_is_watched_is_not_waited_for(
    starting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    said, show = _ended_once_shown(starting)
    with Client(tmp_path / "door.sock") as client, pytest.raises(ServiceError, match="no daemon answers"):
        client.wait_while_loading(show, lambda: starting.poll() is None)
    assert said == ["packing"]

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.turns import by_turns

from edgemoe.cli import client, main
from edgemoe.cli.doctor.checks import CheckResult
from edgemoe.cli.doctor.doctor_command import picture
from edgemoe.cli.output import console
from edgemoe.cli.parser import CommandParser, add_default_action, build_parser
from edgemoe.cli.status_command import tier_table
from edgemoe.telemetry import metrics as names


def every(parser: CommandParser, *path: str) -> Iterator[tuple[tuple[str, ...], CommandParser]]:
    """Yields all commands and their actions, with the words that lead to them; `replay` has a parser of its own."""
    for name, inner in parser.inner():
        if name != "replay":
            yield (*path, name), inner
            yield from every(inner, *path, name)


COMMANDS = dict(every(build_parser()))


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


def exit_code(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_and_action_teaches_with_an_example(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*command, "--help") == 0
    shown = capsys.readouterr().out
    assert re.search(rf"edgemoe {' '.join(command)}\b", shown.partition("xample")[2])


def test_bare_edgemoe_shows_every_command_in_a_line_and_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"(?m)^  {name} +\S", shown) for name, _ in build_parser().inner())
    assert "edgemoe serve --model" in shown


def test_a_command_without_an_action_does_the_usual_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("models", "--json") == exit_code("models", "list", "--json") == 0
    assert capsys.readouterr().out == "[]\n[]\n"
    assert exit_code("service") == 0
    assert "verify" not in capsys.readouterr().out


def test_every_example_of_the_help_is_a_command_that_parses() -> None:
    parser = build_parser()
    for path, command in COMMANDS.items():
        for line in (command.epilog or "").splitlines():
            words = line.split("  edgemoe ")[-1] if line.startswith("  edgemoe ") else ""
            words = words.split("   ")[0].split("  ")[0].partition(" | ")[0].partition(" > ")[0]
            if words and '"' not in words:
                assert parser.parse_args(add_default_action(words.split())).command == path[0]


def test_help_is_instant_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, edgemoe.cli\n"
        "try: edgemoe.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'msgspec', 'httpx', 'rich', 'torch', 'numba'} & set(sys.modules)\n"
        "sys.exit(','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_usage_and_wrong_settings_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serv") == 2
    assert exit_code("status", "--nonsense") == 2
    assert exit_code("config", "--set", "cache.polcy=lru") == 2
    assert "did you mean 'cache.policy'?" in capsys.readouterr().err


def test_a_daemon_that_is_not_there_is_one_clear_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("status") == 1
    said = capsys.readouterr().err
    assert said.startswith("edgemoe: no daemon answers at ")
    assert "edgemoe serve" in said
    assert said.count("\n") == 1


def test_names_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # in a narrow table they would be broken
    store = tmp_path / "a[bold]b-v2-0123456789ab"
    store.mkdir()
    (store / "packing.json").write_text("{}")
    assert exit_code("models", "list", "--set", f"model.store_dir={tmp_path}") == 0
    assert store.name in capsys.readouterr().out
    found = [CheckResult("ports", "failure", "b at [fe80::1]:7540 [/] is not reached from here")]
    console().print(picture(found))
    assert found[0].said in capsys.readouterr().out


def test_system_errors_are_one_clear_line_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system", "/srv/x")

    monkeypatch.setattr("edgemoe.cli.models_command.load", refuse)
    assert exit_code("models") == 1
    assert capsys.readouterr().err == "edgemoe: /srv/x: Read-only file system\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_missing_permissions_are_one_clear_line_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setenv("XDG_CONFIG_HOME", made)
        private = Path(made) / "private"
        private.mkdir(mode=0o700)
        Path(made).chmod(0o755)
        try:
            os.seteuid(65534)
            assert exit_code("models", "list", "--set", f"model.store_dir={private}") == 1
            assert exit_code("status", "--set", f"api.socket={private}/s.sock") == 1
        finally:
            os.seteuid(0)
    said = capsys.readouterr().err.splitlines()
    assert [str(private) in line for line in said] == [True, True]
    assert "as root" in said[0]
    assert "start a daemon of your own" in said[1]


def test_config_prints_toml_that_means_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("config", "--set", "memory.ram_bytes=2GiB", "--set", "cache.prefetch=false") == 0
    printed = capsys.readouterr().out
    assert "ram_bytes = 2147483648" in printed
    assert "# 2.0 GiB, --set" in printed
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert exit_code("config", "--config", str(again), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["memory.ram_bytes"]["value"] == 2 << 30
    assert rows["cache.prefetch"]["value"] is False
    assert rows["cache.prefetch"]["origin"].startswith(f"{again}:")


def test_config_can_leave_the_defaults_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("config", "--changed", "--set", "engine.threads=2") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["[engine]", "threads"]


def test_config_tells_one_value_to_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("config", "api.socket") == 0
    assert capsys.readouterr().out == f"{tmp_path}/edgemoe.sock\n"
    assert exit_code("config", "engine.threads", "--set", "engine.threads=3") == 0
    assert capsys.readouterr().out == "3\n"
    assert exit_code("config", "api.sockt") == 2
    assert "did you mean 'api.socket'?" in capsys.readouterr().err


def test_service_shows_its_planned_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgemoe.cli.service_command._PRIVATE_TO_UNIT", ())  # wherever this tree lies
    assert exit_code("service", "install", "--dry-run", "--root", str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "would write" in said
    assert "usermod --append --groups edgemoe" in said


def test_removing_a_store_needs_a_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code("models", "remove") == 2
    assert exit_code("models", "remove", "nothing") == 1
    assert "no store of the name 'nothing'" in capsys.readouterr().err
    store = tmp_path / "one-v2-0123456789ab"
    store.mkdir()
    (store / "packing.json").write_text("{}")

    def ends(_: str) -> str:  # Ctrl-D
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ends)
    assert exit_code("models", "remove", store.name, "--set", f"model.store_dir={tmp_path}") == 0
    assert "Nothing was removed." in capsys.readouterr().out
    assert store.exists()


@pytest.mark.parametrize(
    ("mine", "service", "used"), [(1, 1, "mine"), (1, 0, "mine"), (0, 1, "service"), (0, 0, "mine")]
)
def test_the_services_socket_is_used_where_only_that_one_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: int, service: int, used: str
) -> None:
    for name, there in (("mine", mine), ("service", service)):
        if there:
            (tmp_path / name).touch()
    monkeypatch.setattr(client, "SERVICE_SOCKET", tmp_path / "service")
    args = build_parser().parse_args(["status", "--set", f"api.socket={tmp_path / 'mine'}"])
    assert client.socket_of(args) == tmp_path / used


def test_a_file_without_keys_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "api-keys"
    file.write_text("# nobody yet\n")
    file.chmod(0o600)
    asked = ["key", "show", "--set", f"api.api_key_file={file}"]
    assert main(asked) == 1
    assert f"there are no keys in {file}; `edgemoe key new NAME` makes one" in capsys.readouterr().err


def test_the_table_of_tiers_has_the_share_of_expert_calls_that_each_served() -> None:
    def shares(hits: dict[str, float]) -> list[str]:
        figures = {names.named(names.TIER_HITS, tier=tier): served for tier, served in hits.items()}
        table = tier_table(figures | {names.named(names.TIER_SLOTS, tier="ram"): 8.0})
        return list(table.columns[4].cells)

    assert sorted(shares({"ram": 3.0, "nvme": 1.0})) == ["25.0%", "75.0%"]
    assert shares({}) == ["", ""]


def gone_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def gone_terminal() -> int:
    ours, its = os.openpty()
    os.close(ours)
    return its


@pytest.mark.parametrize(
    ("way", "words"),
    by_turns(
        itertools.product([gone_pipe, gone_terminal], ["", "1"]),
        ["--version", "config --help", "config --example", "config", "nonsense", "config no.x"],
    ),
)
def test_output_that_nobody_reads_any_more_breaks_no_command(way: tuple[Callable[[], int], str], words: str) -> None:
    gone, unbuffered = way
    command, env = [sys.executable, "-m", "edgemoe", *words.split()], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    whole = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    for streams in ("stdout",), ("stdout", "stderr"):
        given = {stream: gone() for stream in streams}
        options: dict[str, Any] = {"stderr": subprocess.PIPE, **given}
        done = subprocess.run(command, env=env, timeout=60, check=False, **options)
        for descriptor in given.values():
            os.close(descriptor)
        assert done.returncode in {whole.returncode, 1}
        assert b"Traceback" not in (done.stderr or b"")
        assert b"Exception ignored" not in (done.stderr or b"")


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--version", ""),  # unbuffered, argparse drops the error
        ("config --help", ""),
        *itertools.product(["config --example", "config", "models list --json"], ["", "1"]),
    ],
)
def test_output_that_a_full_disk_loses_fails_the_command(words: str, unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        command, env = [sys.executable, "-m", "edgemoe", *words.split()], os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode
    assert done.stderr == "edgemoe: the output: No space left on device\n"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    with contextlib.suppress(OSError):
        (tmp_path / "file").write_bytes(bytes(8 << 10))
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("words", ["keygen {}/key", "key new a --set api.api_key_file={}/keys"])
def test_a_full_disk_is_told_by_what_writes_to_it(
    full_disk: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in full_disk.rglob("*") if path.is_file())
    assert main(words.format(full_disk).split()) != 0
    assert "No space left on device; free some room there, then try again\n" in capsys.readouterr().err
    assert sorted(path for path in full_disk.rglob("*") if path.is_file()) == before

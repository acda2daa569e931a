"""The advice of a refusal is safe, and helps."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.checkpoints import tiny_checkpoint
from support.front_kit import SCRIPTED, running, settings_for, write_model

from edgemoe.cli import client, main
from edgemoe.cli.client import Client
from edgemoe.config.this_box import read_this_box
from edgemoe.errors import ServiceError, StoreError
from edgemoe.front.main import Front
from edgemoe.store.manifest import MANIFEST
from edgemoe.store.packer import ensure_store, pack

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another group")


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A socket that may not be connected to."""

    def connect(self: socket.socket, address: str) -> None:
        raise PermissionError(13, os.strerror(13))

    path = tmp_path / "edgemoe.sock"
    path.touch()
    monkeypatch.setattr(socket.socket, "connect", connect)
    return path


def advice(path: Path) -> str:
    with Client(path) as asking, pytest.raises(ServiceError) as caught:
        asking.text("/health")
    return str(caught.value)


def test_nobody_is_advised_to_join_roots_group_or_somebodys_own(refused: Path) -> None:
    said = advice(refused)
    assert "usermod" not in said
    assert f"belongs to {refused.owner()}'s daemon" in said
    assert "edgemoe serve" in said


@as_root
def test_the_services_group_and_one_that_was_set_may_be_joined(refused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = next(one for one in grp.getgrall() if one.gr_gid)
    os.chown(refused, -1, group.gr_gid)
    assert f"usermod --append --groups {group.gr_name} $USER" in advice(refused)
    os.chown(refused, -1, 0)
    monkeypatch.setattr(client, "SERVICE_SOCKET", refused)
    assert "usermod" not in advice(refused)


async def test_a_second_daemon_on_a_socket_names_the_socket_and_its_setting(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, write_model(tmp_path / "model"))
    beside = msgspec.structs.replace(settings.service, runtime_dir=str(Path(settings.api.socket).with_suffix(".run")))
    same_socket = msgspec.structs.replace(settings, service=beside)
    for both, said in ((same_socket, "api.socket"), (settings, "service.runtime_dir")):
        async with running(both):
            with pytest.raises(ServiceError, match=said):
                await asyncio.wait_for(Front(both, SCRIPTED, env={}).serve(), 20)


def test_a_home_that_cannot_be_written_names_the_setting_of_the_stores(tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3_moe", tmp_path / "tiny")
    (tmp_path / "home").touch()  # so that nothing can be made in it, by root neither
    for folder in (tmp_path / "home/.cache/edgemoe/stores", Path("/proc/stores")):
        with pytest.raises(StoreError, match=r"name a directory that can be written with model\.store_dir"):
            ensure_store(source, folder)
    assert read_this_box(tmp_path / "home/.cache/edgemoe/cluster") is None


def test_names_are_whole_where_output_goes_into_a_pipe(tmp_path: Path) -> None:
    name = "a-model-with-a-name-that-is-as-long-as-those-of-mixtures-often-are-Instruct-2507-FP8"
    pack(tiny_checkpoint("qwen3_moe", tmp_path / "tiny"), tmp_path / "stores" / name)
    command = [sys.executable, "-m", "edgemoe", "models", "--set", f"model.store_dir={tmp_path}/stores"]
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert name in done.stdout
    assert "complete" in done.stdout
    narrow = subprocess.run(
        command, env=env | {"COLUMNS": "60"}, capture_output=True, text=True, timeout=60, check=True
    )
    assert name in narrow.stdout
    (tmp_path / "stores" / name / MANIFEST).write_text("{}")
    assert main(["models", "verify", str(tmp_path / "stores" / name)]) == 1


def test_a_watched_status_is_printed_again_and_again_where_it_is_no_terminal(tmp_path: Path) -> None:
    """Runs against a daemon that answers the requests of `edgemoe status`."""
    path = tmp_path / "edgemoe.sock"
    health = json.dumps({"status": "ready", "model": None, "engine": None})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(60)
        command = [sys.executable, "-m", "edgemoe", "status", "--watch", "--socket", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            try:
                assert watching.stdout is not None
                answer_until(listener, health, lookups=3)
                shown = [watching.stdout.readline() for _ in range(2)]
                assert "is ready at" in shown[0]
            finally:
                watching.kill()


def answer_until(listener: socket.socket, health: str, lookups: int) -> None:
    """Answers GETs until /metrics has been asked for so often."""
    while lookups:
        connection, _ = listener.accept()
        with connection:
            asked = connection.recv(4096)
            if not asked:
                continue  # whether somebody listens
            text = health if b"/health" in asked else "# nothing\n"
            lookups -= b"/metrics" in asked
            head = f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
            connection.sendall((head + text).encode())

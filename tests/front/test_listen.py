"""Sockets: their users, the replacement of stale ones, and systemd's."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from edgemoe.errors import ServiceError
from edgemoe.front.listen import PATH_BYTES, Notifier, listening, passed_sockets, sole_owner, tcp_socket, unix_socket
from edgemoe.ipc.engine_socket import IpcServer


def test_the_socket_is_for_owner_and_group(tmp_path: Path) -> None:
    with unix_socket(tmp_path / "sub" / "api.sock"):
        assert stat.S_IMODE((tmp_path / "sub" / "api.sock").stat().st_mode) == 0o660


def test_a_stale_socket_is_replaced_and_a_live_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    unix_socket(path).close()
    with unix_socket(path), pytest.raises(ServiceError, match="another daemon"):
        unix_socket(path)


def test_files_that_are_no_sockets_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ServiceError, match="no socket"):
        unix_socket(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_path_or_group_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="too long"):
        unix_socket(tmp_path / ("x" * 120))
    with pytest.raises(ServiceError, match=r"too long.*set service\.runtime_dir"):
        IpcServer(tmp_path / ("x" * (PATH_BYTES - len(str(tmp_path)) - 8)))
    with pytest.raises(ServiceError, match="no group"):
        unix_socket(tmp_path / "api.sock", "no-such-group-here")


def test_two_daemons_cannot_share_a_runtime_directory(tmp_path: Path) -> None:
    remedy = "stop it"
    with (
        sole_owner(tmp_path, remedy),
        pytest.raises(ServiceError, match="another daemon runs here; stop it"),
        sole_owner(tmp_path, remedy),
    ):
        pass


def test_a_socket_that_cannot_listen_is_closed() -> None:
    bound = socket.socket(type=socket.SOCK_DGRAM)
    with pytest.raises(ServiceError, match=r"api\.tcp: cannot listen on here"):
        listening(bound, "here")
    assert bound.fileno() == -1


def test_a_tcp_address_in_use_is_an_error() -> None:
    with tcp_socket("127.0.0.1:0") as taken, pytest.raises(ServiceError, match=r"api\.tcp.*choose another port"):
        tcp_socket(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    ("address", "why"),
    [("192.0.2.1:0", "this box has no such address"), ("127.0.0.1:70000", "0-65535"), ("nowhere:x", "invalid literal")],
)
def test_a_tcp_address_that_cannot_be_says_why(address: str, why: str) -> None:
    with pytest.raises(ServiceError, match=rf"api\.tcp: cannot listen on {address}: .*{why}"):
        tcp_socket(address)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(tmp_path: Path, abstract: bool) -> None:
    name = f"edgemoe-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}" if abstract else name, "WATCHDOG_USEC": "3000000"})
        notifier.notify_manager(READY="1", STATUS="ready, 0 requests")
        assert manager.recv(1024) == b"READY=1\nSTATUS=ready, 0 requests"
        assert notifier.watchdog_s == 3.0


def test_a_full_service_manager_socket_reports_the_message_as_unsent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        while notifier.notify_manager(WATCHDOG="1"):
            pass
        manager.recv(1024)
        assert notifier.notify_manager(READY="1")


def test_without_a_service_manager_nothing_happens(tmp_path: Path) -> None:
    Notifier({}).notify_manager(READY="1")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).notify_manager(READY="1")
    assert Notifier({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}).watchdog_s == 0
    assert passed_sockets({}) == passed_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == []


def test_sockets_of_the_service_manager_are_not_handed_on_to_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with tcp_socket("127.0.0.1:0") as listener:
        passed = os.dup(listener.fileno())
        os.set_inheritable(passed, True)
        monkeypatch.setattr("edgemoe.front.listen.FIRST_FD", passed)
        (found,) = passed_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
        with found:
            assert found.getsockname() == listener.getsockname()
            assert not os.get_inheritable(passed)


def test_the_address_of_all_is_ipv4s_too() -> None:
    with tcp_socket("[::]:0") as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5):
        accepted, address = listener.accept()
        with accepted:
            assert address[0] == "::ffff:127.0.0.1"

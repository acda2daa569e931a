"""Real etcd members on free loopback ports with temporary data."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@contextmanager
def etcd_cluster(directory: Path, members: int) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Client addresses and processes of a running etcd of `members` members."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("no etcd binary: install Debian's etcd-server")
    ports = free_ports(2 * members)
    peers = [f"http://127.0.0.1:{port}" for port in ports[:members]]
    clients = [f"http://127.0.0.1:{port}" for port in ports[members:]]
    together = ",".join(f"m{n}={peer}" for n, peer in enumerate(peers))
    processes = [
        subprocess.Popen(
            [
                binary,
                f"--name=m{n}",
                f"--data-dir={directory / f'm{n}'}",
                f"--listen-peer-urls={peers[n]}",
                f"--initial-advertise-peer-urls={peers[n]}",
                f"--listen-client-urls={clients[n]}",
                f"--advertise-client-urls={clients[n]}",
                f"--initial-cluster={together}",
                "--unsafe-no-fsync" if _knows_no_fsync(binary) else "--logger=zap",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for n in range(members)
    ]
    try:
        for client in clients:
            wait_healthy(client)
        yield clients, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _knows_no_fsync(binary: str) -> bool:
    return "unsafe-no-fsync" in subprocess.run([binary, "--help"], capture_output=True, text=True, check=False).stdout


def wait_healthy(client: str, seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if httpx.get(f"{client}/health", timeout=1).json().get("health") == "true":
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"etcd at {client} did not become healthy")

"""Real etcd members on free loopback ports with temporary data."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.ports import free_ports
from support.waiting import wait_until

NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Certificates:
    """An authority, and its certificates for etcd at 127.0.0.1 and for a client."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._openssl(f"req -x509 {NEW_KEY} -days 2 -keyout ca.key -out ca.pem -subj /CN=authority")
        for name in ("server", "client"):  # etcd refuses a CommonName beside a user
            (directory / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
            self._openssl(f"req {NEW_KEY} -keyout {name}.key -out {name}.csr -subj /O={name}")
            signed = f"-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile {name}.ext"
            self._openssl(f"x509 -req -in {name}.csr {signed} -out {name}.pem")

    def file(self, name: str) -> str:
        return str(self._directory / name)

    @property
    def etcd(self) -> list[str]:
        return [
            f"--cert-file={self.file('server.pem')}",
            f"--key-file={self.file('server.key')}",
            f"--trusted-ca-file={self.file('ca.pem')}",
            "--client-cert-auth",
        ]

    def context(self) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=self.file("ca.pem"))
        made.load_cert_chain(self.file("client.pem"), self.file("client.key"))
        return made

    def _openssl(self, words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=self._directory, check=True, capture_output=True)


@contextmanager
def etcd_cluster(
    directory: Path, members: int, tls: Certificates | None = None
) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Runs an etcd of `members` members; yields its client addresses and processes."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("no etcd binary: install Debian's etcd-server")
    ports = free_ports(2 * members)
    peers = [f"http://127.0.0.1:{port}" for port in ports[:members]]
    clients = [f"{'https' if tls else 'http'}://127.0.0.1:{port}" for port in ports[members:]]
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
                *(tls.etcd if tls else ()),
                "--unsafe-no-fsync" if _knows_no_fsync(binary) else "--logger=zap",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for n in range(members)
    ]
    try:
        wait_until(lambda: all(is_healthy(client, tls) for client in clients))
        yield clients, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _knows_no_fsync(binary: str) -> bool:
    return "unsafe-no-fsync" in subprocess.run([binary, "--help"], capture_output=True, text=True, check=False).stdout


def is_healthy(client: str, tls: Certificates | None = None) -> bool:
    try:
        return bool(
            httpx.get(f"{client}/health", timeout=1, verify=tls.context() if tls else False).json().get("health")
            == "true"
        )
    except httpx.HTTPError:
        return False

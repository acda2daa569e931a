"""An environment of its own for each client, kept between runs; nothing outside it changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.clients.client_catalog import USES, Client

KEPT = Path(".cache/clients")
INSTALL_S, USE_S = 1200.0, 600.0
NODE = "node"


class ClientError(Exception):
    """A client that cannot be installed."""


def prepare(client: Client, folder: Path = KEPT) -> Path:
    """Returns the client's environment; makes it if it is missing or for another version. Raises ClientError."""
    home = (folder / client.name).absolute()
    stamp, wanted = home / "requirements.txt", "\n".join(client.requires) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return home
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if client.is_node:
        _install(client, ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *client.requires])
    else:
        _install(client, [sys.executable, "-m", "venv", str(home)])
        _install(client, [str(home / "bin/python"), "-m", "pip", "--quiet", "install", *client.requires])
    stamp.write_text(wanted)
    return home


def command(client: Client, home: Path) -> list[str]:
    """Returns the command that runs the client's script in its environment."""
    return [NODE if client.is_node else str(home / "bin/python"), str(USES / client.script)]


def _install(client: Client, words: Sequence[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClientError(f"{client.package} cannot be installed: {error}") from error
    if done.returncode:
        raise ClientError(f"{client.package} cannot be installed: {done.stderr.strip()[-500:]}")

"""Runs real clients of the API, unchanged and pinned, against a daemon with the demo model.

python -m tools.clients                     # all of them; the first time installs each into .cache/clients
python -m tools.clients openai litellm --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgemoe import demo
from edgemoe.cli.client import Client as Daemon
from edgemoe.store.packer import ensure_store
from tools.clients.client_catalog import CLIENTS, FEATURES, Client
from tools.clients.environments import USE_S, ClientError, command, prepare
from tools.demo import daemon, wait_until_ready

SMALL = ("memory.kv_bytes=64MiB", "memory.headroom_bytes=0")
LINE = "{"  # begins a script's result for a feature; clients print other lines too


@dataclass
class Outcome:
    """The result of a client: for each feature "", or the reason why it does not work."""

    client: str
    package: str
    features: dict[str, str] = field(default_factory=dict)
    trouble: str = ""  # of the client as a whole

    @property
    def ok(self) -> bool:
        return not self.trouble and bool(self.features) and not any(self.features.values())


def main() -> int:
    """Exits 0 when every feature of every client works."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args()
    if unknown := set(args.clients) - {client.name for client in CLIENTS}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if not args.clients or client.name in args.clients]
    with tempfile.TemporaryDirectory(prefix="edgemoe-clients-") as folder, served(Path(folder)) as env:
        outcomes = [print_outcome(use(client, env)) for client in chosen]
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        show(outcomes)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


@contextlib.contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """Serves the demo model on a socket and two TCP ports; yields the environment of the clients' scripts."""
    key, port, ollama, path = secrets.token_hex(16), free_port(), free_port(), folder / "edgemoe.sock"
    key_file = folder / "key"
    key_file.touch(0o600)
    key_file.write_text(key)
    store = ensure_store(demo.model_path(), Path(".cache/stores"))
    settings = (
        *SMALL,
        f"model.name={demo.NAME}",
        f"model.store_dir={store.parent.absolute()}",
        f"api.tcp=127.0.0.1:{port}",
        f"api.api_key_file={key_file}",
        f"api.ollama_tcp={ollama}",
        "api.ollama_keyless=true",
    )
    words = [sys.executable, "-m", "edgemoe", "serve", "--model", str(store), "--socket", str(path)]
    words += [word for setting in settings for word in ("--set", setting)]
    with daemon(words, folder / "log") as process, Daemon(path) as client:
        wait_until_ready(process, client)
        yield {
            **{name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))},
            "EDGEMOE_URL": f"http://127.0.0.1:{port}/v1",
            "EDGEMOE_KEY": key,
            "EDGEMOE_OLLAMA": f"http://127.0.0.1:{ollama}",
            "EDGEMOE_SOCKET": str(path),
            "EDGEMOE_MODEL": demo.NAME,
            "EDGEMOE_TOKENIZER": str(demo.model_path()),
            "EDGEMOE_FOLDER": str(folder),
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
        }


def use(client: Client, env: dict[str, str]) -> Outcome:
    """Runs one client's script and reads its results."""
    outcome = Outcome(client.name, client.package)
    try:
        home = prepare(client)
        words = command(client, home)
        env = env | {"NODE_PATH": str(home / "node_modules"), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=USE_S, check=False)
    except (ClientError, subprocess.TimeoutExpired) as error:
        outcome.trouble = str(error)
        return outcome
    for line in done.stdout.splitlines():
        if line.startswith(LINE):
            said = json.loads(line)
            outcome.features[said["feature"]] = said["why"]
    if done.returncode or not outcome.features:
        outcome.trouble = done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
    return outcome


def print_outcome(outcome: Outcome) -> Outcome:
    """Prints one result on standard error, since all of them may take an hour. Returns the result."""
    failed = [name for name, why in outcome.features.items() if why]
    works = ", ".join(name for name in outcome.features if name not in failed)
    told = f"works: {works or 'nothing'}" + (f"; fails: {', '.join(failed)}" if failed else "")
    print(f"{outcome.package}: {outcome.trouble or told}", file=sys.stderr, flush=True)
    return outcome


def show(outcomes: list[Outcome]) -> None:
    """Prints the table, and below it the reasons of failures."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("Client", *(name.capitalize() for name in FEATURES), "Also"):
        table.add_column(column)
    for outcome in outcomes:
        cells = [_cell(outcome.features.get(name)) for name in FEATURES]
        more = [f"{name} {_cell(why)}" for name, why in outcome.features.items() if name not in FEATURES]
        table.add_row(escape(outcome.package), *cells, ", ".join(more))
    console = Console(highlight=False)
    console.print(table)
    for outcome in outcomes:
        for name, why in (("", outcome.trouble), *outcome.features.items()):
            if why:
                console.print(f"[red]{outcome.client} {name}[/]: {escape(why)}")


def free_port() -> int:
    """Returns a TCP port of the loopback interface that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _cell(why: str | None) -> str:
    return "" if why is None else "[red]fails[/]" if why else "works"


if __name__ == "__main__":
    sys.exit(main())

"""Commands on hostile answers and files: each must end in time, by an error of one line, within bounded memory.

    python -m tools.attacking.hostile_files [--only NAME]

Prints a line of JSON for each: exit code, seconds, the largest memory of a process, the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.attacking.hostile_checkpoints import FILES, SERVED_ONCE
from tools.attacking.hostile_hub import REPLIES, bomb, hostile_hub

WITHIN_S = 400.0  # on a busy machine; the hub's library waits ten seconds for an answer, four times
LARGEST_MB = 3500.0  # of children that make prompts, whose addresses are bounded
LOOK_S = 0.02


@dataclass(slots=True)
class Outcome:
    """How a command ended; `fault` names its fault, if it has one."""

    attack: str
    code: int
    seconds: float
    largest_mb: float
    said: str
    fault: str = ""


class Largest:
    """Watches the memory of a process and its children on a thread."""

    def __init__(self, pid: int) -> None:
        self.mb = 0.0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self.mb

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            for pid in _family(self._pid):
                with contextlib.suppress(OSError, IndexError):
                    text = Path(f"/proc/{pid}/status").read_text()
                    self.mb = max(self.mb, int(text.partition("VmHWM:")[2].split()[0]) / 1e3)


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _family(int(child))


def run(attack: str, command: list[str], env: dict[str, str]) -> Outcome:
    """Runs a command to its end; kills it after WITHIN_S."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=os.environ | env)
        watched = Largest(child.pid)
        try:
            code = child.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            code = -9
        largest_mb = watched.stop()
        out.seek(0)
        said = out.read().decode(errors="replace")
    outcome = Outcome(attack, code, round(time.monotonic() - began_s, 1), round(largest_mb), said.strip()[-300:])
    outcome.fault = fault_of(outcome, said, is_served=SERVED_ONCE in command)
    return outcome


def fault_of(outcome: Outcome, said: str, *, is_served: bool) -> str:
    """Returns the fault of how a command ended; "" if it has none. Children of daemons may end by tracebacks."""
    if outcome.code < 0:
        return "killed: too late" if outcome.seconds >= WITHIN_S else f"killed by signal {-outcome.code}"
    if "Traceback" in said and not is_served:
        return "a traceback"
    if "\x1b" in said or "\x07" in said:
        return "escape sequences reach the terminal"
    if outcome.largest_mb > LARGEST_MB:
        return f"more than {LARGEST_MB:.0f} MB"
    return ""


def pull(reply: str, folder: Path) -> Outcome:
    """Fetches a repository from a hub that answers so."""
    for times in (1, 3) if "packed" in reply else ():
        bomb(times)  # beforehand, since the hub's clients wait ten seconds
    with hostile_hub(REPLIES[reply]) as address:
        env = {"HF_ENDPOINT": address, "HF_HOME": str(folder), "HOME": str(folder), "HF_TOKEN": ""}
        words = ["pull", "makers/model", "--set", f"model.store_dir={folder / 'stores'}"]
        return run(f"hub: {reply}", [sys.executable, "-m", "edgemoe", *words], env)


def read(name: str, folder: Path) -> Outcome:
    """Has a command read a hostile file."""
    command = FILES[name](folder)
    outcome = run(name, [sys.executable, "-m", *command], {"HOME": str(folder)})
    if command[0] == SERVED_ONCE and outcome.code and not outcome.fault:
        outcome.fault = outcome.said.splitlines()[-1]
    return outcome


ATTACKS: dict[str, Callable[[str, Path], Outcome]] = {
    **{f"hub: {name}": lambda name, folder: pull(name.removeprefix("hub: "), folder) for name in REPLIES},
    **dict.fromkeys(FILES, read),
}


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="edgemoe-hostile-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def attack(name: str) -> Outcome:
    """Runs one attack in a folder of its own."""
    with scratch() as folder:
        return ATTACKS[name](name, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ATTACKS)
    found = list[Outcome]()
    for name in parser.parse_args().only or ATTACKS:
        found.append(attack(name))
        told: dict[str, Any] = asdict(found[-1])
        print(json.dumps(told), flush=True)
    return int(any(one.fault for one in found))


if __name__ == "__main__":
    sys.exit(main())

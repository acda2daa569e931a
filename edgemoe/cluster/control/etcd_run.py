"""The starts of voters' etcd: each has a number and a random word, which the other boxes remember.

If others remember a later start than a voter's data has seen, the data comes from a backup or a copy. With such data
the voter could take back an agreed entry. docs/design/coordination.md has the rules.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.control.messages import EtcdRun
from edgemoe.durable import read_plain, replace_file
from edgemoe.types.bounds import MAX_NODES, Text

log = logging.getLogger(__name__)
KEPT_RUNS = "runs"  # file in the state directory
MAX_RUNS_BYTES = 64 << 10
_Runs = Annotated[dict[Text, EtcdRun], Meta(max_length=MAX_NODES)]


class KeptRuns:
    """The last start of each voter's etcd that this box has heard of, in memory and, given a path, on disk."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads the file; one that cannot be read counts as empty."""
        self._path, self._runs = path, dict[str, EtcdRun]()
        if path is None:
            return
        try:
            self._runs = msgspec.json.decode(read_plain(path, MAX_RUNS_BYTES), type=_Runs)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the starts of other boxes' etcd are not known", extra={"file": str(path), "why": str(error)})

    def of(self, node: str) -> EtcdRun | None:
        """Returns the last start of that box's etcd."""
        return self._runs.get(node)

    def keep(self, node: str, run: EtcdRun) -> None:
        """Keeps a start, unless a later one is known, even if the disk fails."""
        held = self._runs.get(node)
        if held == run or (held is not None and held.number > run.number):
            return
        if node not in self._runs and len(self._runs) >= MAX_NODES:
            del self._runs[next(iter(self._runs))]
        self._runs[node] = run
        if self._path is None:
            return
        try:
            replace_file(self._path, msgspec.json.encode(self._runs))
        except OSError as error:
            why = {"file": str(self._path), "why": error.strerror}
            log.error("the starts of other boxes' etcd are forgotten at the next start", extra=why)


def is_older(own: EtcdRun, remembered: EtcdRun | None) -> bool:
    """Whether others remember a start that the data of `own` has not seen."""
    if remembered is None or remembered.number < own.number:
        return False
    return remembered.number > own.number or remembered.word != own.word


def next_run(*known: EtcdRun | None) -> EtcdRun:
    """Returns a new start, later than all those known."""
    return EtcdRun(1 + max((run.number for run in known if run is not None), default=0), secrets.token_hex(4))


def latest(remembered: Iterable[EtcdRun | None]) -> EtcdRun | None:
    """Returns the last start of those remembered."""
    return max((run for run in remembered if run is not None), key=lambda run: run.number, default=None)

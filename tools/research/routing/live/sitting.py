"""Options of a measurement, and its log: a line for each figure, which is not measured again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.fault_runs import read
from tools.bench.faults import commit
from tools.research.placement.prism.models import Model

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sitting:
    """The options and the log, a file that grows."""

    data: Path
    work: Path
    log: Path
    rounds: int
    scale: float  # factor of all numbers of requests

    def many(self, requests: int) -> int:
        """Scales a number of requests, to three at least."""
        return max(3, round(self.scale * requests))

    def record(self, **key: Any) -> Record | None:
        """Returns the log's record with that key, if there is one."""
        wanted = self._key(key)
        return next((record for record in read(self.log) if wanted.items() <= record.items()), None)

    def note(self, figures: Mapping[str, Any], **key: Any) -> None:
        """Appends a record to the log."""
        about = {"commit": commit(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        record = self._key(key) | dict(figures) | about | {"at_s": round(time.time())}
        with self.log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), file=sys.stderr, flush=True)

    def rounds_of(self, variants: Sequence[str], **key: Any) -> Iterator[tuple[int, str]]:
        """Yields the rounds that the log lacks: each round has all variants, in alternating order."""
        for number in range(self.rounds):
            for variant in variants[:: 1 if number % 2 == 0 else -1]:
                if self.record(variant=variant, round=number, **key) is None:
                    yield number, variant

    def _key(self, key: Mapping[str, Any]) -> Record:
        named = {name: value.name if isinstance(value, Model) else value for name, value in key.items()}
        return named | {"scale": self.scale}

"""A run of `placement.prism` for the simulator: its requests, their routes, and the experts' places.

A box has its homes in memory, and its requests' most frequent experts in the rest; others ask it for homes only. Plan
changes and fetches are not simulated, so only part `methods` is used, which ends before the first review.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgemoe.types.arrays import BoolArray
from tools.bench.fault_runs import read
from tools.research.placement.placement_study import activations_of
from tools.research.placement.prism.models import MODELS, Model
from tools.research.placement.prism.plans import DEVICES, METHODS, NODES, boxes_of, mixed_routes, place_by, room
from tools.research.placement.prism.prism_runs import Record, Request, Run, requests_of
from tools.research.placement.prism.profile import Profile, geometry_of, profile_of
from tools.research.simulate.event_heap import Numbers
from tools.research.simulate.events import Prompts

PART = "methods"
ROUNDED_S = 0.01  # precision of a log's times


class BedRun(NamedTuple):
    """A measured run, and the inputs of its simulation."""

    record: Record
    prompts: Prompts
    homes: BoolArray  # [N, L, E] experts that others ask each box for
    inside: BoolArray  # [N, L, E] experts in each box's memory
    cores: Numbers  # [N] available to each box
    row_bytes: int  # of a token's hidden state
    read_s: float  # time of a device for an expert

    @property
    def name(self) -> str:
        record = self.record
        return f"{record['model']} {record['settings'][0]} {record['method']} {record['seed']} {record['pace']:g}"

    @property
    def latency_s(self) -> Numbers:
        """Latencies of the requests, in the order of the prompts."""
        return np.asarray(self._logged[:, 1])

    @property
    def _logged(self) -> Numbers:
        """Due times and latencies of the requests."""
        by_box = {node: iter(self.record["latency"][node]) for node in NODES}
        return np.array([next(by_box[NODES[box]]) for box in self.prompts.server.tolist()])

    def check(self) -> BedRun:
        """Returns the run. Exits if its requests came at other times than today's."""
        if np.abs(self._logged[:, 0] - self.prompts.at_s).max() > ROUNDED_S:
            raise SystemExit(f"{self.name} had other requests than the bench makes today: models' rates have changed")
        return self


def usable(records: Iterable[Record]) -> list[Record]:
    """Returns the runs that can be simulated: with one plan, and all requests answered."""
    return [each for each in records if each["part"] == PART and not each["plans"] and each["complete"] == each["of"]]


def run_of(record: Record) -> Run:
    """Returns the run of a line of the log."""
    named = {each.name: record[each.name] for each in fields(Run)}
    return Run(**named | {"settings": tuple(record["settings"])})


@dataclass(slots=True)
class BedRuns:
    """Reads runs of a model; placements are made once each."""

    model: Model
    profile: Profile
    placed: dict[tuple[str, str], BoolArray] = field(default_factory=dict)

    def read(self, record: Record) -> BedRun:
        """Returns a run of the log."""
        run = run_of(record)
        asked = len(next(iter(self.profile.prompts.values())))
        requests = requests_of(self.model, run, asked)
        homes = self._homes(run.method, run.settings[0])
        cores = record["cpus"] * np.array(DEVICES, np.float64)
        row_bytes = geometry_of(self.model.store).row_bytes
        inside = self._inside(homes, run.settings[0])
        return BedRun(record, self._prompts(requests), homes, inside, cores, row_bytes, self.model.expert_s).check()

    def _homes(self, method: str, setting: str) -> BoolArray:
        if (method, setting) not in self.placed:
            policy = next(each for each in METHODS if each == method)
            self.placed[method, setting] = place_by(policy, self.model, setting, self.profile).homes
        return self.placed[method, setting]

    def _prompts(self, requests: list[Request]) -> Prompts:
        """Returns the requests with the recorded routes of their prompts."""
        tasks = list(dict.fromkeys(one.task for one in requests))
        starts = np.cumsum([0, *(len(self.profile.asked[task]) for task in tasks)])
        first, tokens, emitted = [], [], []
        for one in requests:
            each = len(self.profile.asked[one.task]) // len(self.profile.prompts[one.task])  # all have one length
            first.append(starts[tasks.index(one.task)] + one.number * each)
            tokens.append(each + 1)  # the last one is emitted and never computed
            emitted.append(self.model.tokens_of(one.task))
        at_s, server = (np.array([getattr(one, name) for one in requests]) for name in ("at_s", "box"))
        routes = np.ascontiguousarray(np.concatenate([self.profile.asked[task] for task in tasks]))
        return Prompts(at_s, server, np.array(first), np.array(tokens), np.array(emitted), routes)

    def _inside(self, homes: BoolArray, setting: str) -> BoolArray:
        """Returns homes and, in the remaining memory, the most frequent experts of the boxes' requests."""
        geometry = geometry_of(self.model.store)
        slots = [room(self.model) * devices for devices in DEVICES]
        memory = boxes_of(self.model, slots, 1.0)
        wanted = activations_of(mixed_routes(self.model, setting, self.profile.seen), geometry.experts)
        inside = homes.copy()
        for node, mine, counts in zip(NODES, inside, wanted, strict=True):
            left: Any = memory[node]["memory.ram_bytes"]
            left = left // geometry.stride_bytes(0) - mine.sum()
            mine.flat[np.argsort(-np.where(mine, -1, counts), axis=None)[:left]] = True
        return inside


def read_runs(logs: Iterable[Path], prompts: Path, work: Path) -> dict[str, list[BedRun]]:
    """Returns the logs' runs by model. The models' routes are kept in `work`, or measured first on a box alone."""
    records = usable(record for log in logs for record in read(log))
    answer = {}
    for name in dict.fromkeys(record["model"] for record in records):
        model = MODELS[name](work)
        reader = BedRuns(model, profile_of(model, prompts, work))
        answer[name] = [reader.read(record) for record in records if record["model"] == name]
    return answer

"""One run: three boxes, a method, requests at fixed times, and their results."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from edgemoe.policy.placement.route_score import score
from edgemoe.telemetry import metrics as names
from edgemoe.types.arrays import BoolArray
from tools.bench.fault_trial import clock
from tools.bench.faults import POLICY, common
from tools.bench.stats import core_s
from tools.research.placement.compared_placements import SERVED
from tools.research.placement.prism.models import Model
from tools.research.placement.prism.plans import (
    DEVICES,
    METHODS,
    NODES,
    STILL,
    boxes_of,
    mixed_routes,
    place_by,
    room,
    write_plan,
)
from tools.research.placement.prism.profile import ASKED, READY_S, Profile
from tools.research.routing.live.boxes import Asked, ask
from tools.testbed.bed import Bed, BedError
from tools.testbed.daemons import Answer, Cluster, Daemon
from tools.testbed.float32_model import part_of
from tools.testbed.limits import Limits

ALONE, REDIRECT = "alone", "redirect"  # boxes compute nothing for each other
SAMPLE_S = 2.0
WARM = 8  # requests at each box before the counted ones
START_S = 14.0  # from a run's start to its requests, on two quiet cores
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A measurement; its fields identify it in the log."""

    part: str
    model: str
    method: str
    settings: tuple[str, ...]  # one after the other; the first plan is made for the first one
    seed: int = 0
    requests: int = 200  # at each box, of each setting
    pace: float = 1.0  # relative to the model's rate
    migrate_s: float = 60.0

    def seconds(self, model: Model) -> float:
        """Returns the run's approximate duration."""
        load_s = sum(self.requests / (model.rate[setting] * self.pace) for setting in self.settings)
        return START_S + WARM / model.rate[self.settings[0]] / self.pace + 1.1 * load_s


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of boxes."""

    cpus: float  # cores for each device
    disk_mb_s: float
    link_gb_s: float  # between a box's memory and its devices


class Request(NamedTuple):
    """A request that arrives at a box."""

    at_s: float
    box: int
    task: str
    number: int  # index of the task's prompt


def requests_of(model: Model, run: Run, prompts: int) -> list[Request]:
    """Returns the run's requests, the same for every method. A setting begins as the one before ends."""
    found: list[Request] = []
    for phase, setting in enumerate(run.settings):
        rng = np.random.default_rng((run.seed, phase, sum(map(ord, model.name + setting))))
        begins_s = found[-1].at_s if found else 0.0
        drawn = []
        for box, weights in enumerate(model.weights(setting)):
            at_s = begins_s + np.cumsum(rng.exponential(1 / (model.rate[setting] * run.pace), run.requests))
            tasks = np.array(model.tasks_of(setting))[rng.choice(3, run.requests, p=weights)]
            numbers = rng.integers(prompts, size=run.requests)
            drawn += list(map(Request, at_s.tolist(), repeat(box), tasks.tolist(), numbers.tolist()))
        found += sorted(drawn)
    return found


# --- the boxes --------------------------------------------------------------------------------------------------


def settings_of(model: Model, run: Run) -> dict[str, object]:
    """Returns the settings of all boxes."""
    apart = run.method in (ALONE, REDIRECT)
    return common(model.store, 1) | {
        "model.store_dir": model.store.parent,  # beside which compiled kernels are kept
        "memory.kv_bytes": "16MiB",
        "engine.max_sequences": 16,
        "cache.policy": POLICY,
        "cluster.placement": run.method if run.method in SERVED else "uniform",
        "cluster.migrate_s": 0.0 if apart or run.method in STILL or run.method not in SERVED else run.migrate_s,
        "cluster.replicas": 1,
        "cluster.share_experts": not apart,
        "cluster.route": "least" if run.method == REDIRECT else "pull",
        "cluster.coordination": "single",
        "cluster.leader": NODES[-1],  # with the most devices: so the solver loads the same box in every run
    }


@contextmanager
def boxes(
    folder: Path,
    model: Model,
    run: Run,
    machine: Machine,
    homes: BoolArray | None,
    slots: Sequence[int] = (),
    goal: BoolArray | None = None,
) -> Iterator[Cluster]:
    """Runs three boxes with these homes, and no other experts on disk; without homes all have everything on disk.

    With a goal, experts move there once the boxes are connected. `slots` overrides the devices' room. CPU limits apply
    once the boxes are ready.
    """
    slots = slots or [room(model) * devices for devices in DEVICES]
    limits = Limits(disk_bytes_per_s=int(machine.disk_mb_s * 1e6), disk_of=model.store)
    own = boxes_of(model, slots, machine.link_gb_s * 1e9)
    for node, here in zip(NODES, homes if homes is not None and run.part != "redirection" else (), strict=False):
        own[node]["model.path"] = part_of(model.store, folder / f"store-{node}", partial(_is_home, here))
    with Bed(NODES, limits=limits) as bed:
        settings = settings_of(model, run)
        made = Cluster(bed, folder, settings, own)
        try:
            if homes is not None:
                write_plan(made, model, homes, run.method, goal)
            for daemon in made:
                daemon.start()
            for daemon in made:
                daemon.wait_ready(READY_S)
            if run.method not in (ALONE, REDIRECT):
                made.wait_settled(READY_S, moving=goal is not None)
            if settings["cluster.migrate_s"]:
                _await_solver(made[NODES[-1]], READY_S)
            for node, devices in zip(NODES, DEVICES, strict=True):
                bed[node].group.make(Limits(cpus=machine.cpus * devices))
            yield made
        finally:
            made.close()


def _await_solver(leader: Daemon, timeout_s: float) -> None:
    """Waits until the leader's solver is ready for the first plan at 60 s, which takes eight seconds of a core.

    In production only the leader's box pays for that, here the two cores of all three. Raises BedError.
    """
    ends_s, used_s = time.monotonic() + timeout_s, 0.0
    while time.monotonic() < ends_s:
        solvers = [pid for pid in leader.box.pids() if b"planning.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        before_s, used_s = used_s, sum(map(core_s, solvers))
        if 1.0 < used_s < before_s + 0.05:
            return
        time.sleep(0.5)
    raise BedError(f"the leader's solver was not ready within {timeout_s:.0f} s")


def _is_home(homes: BoolArray, layer: int, expert: int) -> bool:
    return bool(homes[layer, expert])


# --- measuring --------------------------------------------------------------------------------------------------


class Watch:
    """Counts experts computed, and remote ones among them, in every box, every SAMPLE_S seconds of a `with`."""

    def __init__(self, made: Cluster) -> None:
        self.samples: list[
            list[float]
        ] = []  # seconds, then for each box all experts and remote ones since the sample before
        self._made, self._began_s = made, time.monotonic()
        self._first = self._counts()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._sample()

    def _counts(self) -> list[float]:
        pages = [daemon.metrics() for daemon in self._made]
        return [names.select(page, family) for page in pages for family in (names.ACTIVE_EXPERTS, names.REMOTE_EXPERTS)]

    def _sample(self) -> None:
        grown = [now - first for now, first in zip(self._counts(), self._first, strict=True)]
        self.samples.append([round(time.monotonic() - self._began_s, 2), *grown])

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            try:
                self._sample()
            except httpx.TransportError:
                continue  # a gap in the plot


def measure(
    run: Run,
    model: Model,
    profile: Profile,
    machine: Machine,
    folder: Path,
    first: str | None = None,
    goal: BoolArray | None = None,
) -> Record:
    """Returns the results of a run's requests. The first plan is by the run's method, or another one; see `boxes`."""
    method = first or next((each for each in METHODS if each == run.method), None)
    placed = place_by(method, model, run.settings[0], profile) if method else None
    requests = requests_of(model, run, ASKED)
    warm_s = WARM / model.rate[run.settings[0]] / run.pace
    began_s = time.monotonic()
    with boxes(folder, model, run, machine, placed.homes if placed else None, goal=goal) as made:
        send(made, model, profile, [one for one in requests if one.at_s < warm_s])
        before, wall_s, ready_s = state(made), time.time(), time.monotonic() - began_s
        homes = [daemon.metrics()[names.HOME_EXPERTS] for daemon in made] if method else []
        with Watch(made) as watch:
            answers = send(made, model, profile, requests)
        grown, plans = since(before, state(made)), plans_of(made, wall_s)
    found = asdict(run) | asdict(machine) | outcome(requests, answers, profile)
    found |= {"begins_s": [requests[n * 3 * run.requests].at_s for n in range(len(run.settings))]}
    found |= {"homes": homes, "ready_s": round(ready_s, 1), "took_s": round(time.monotonic() - began_s, 1)}
    found |= {"samples": watch.samples, "plans": plans, "boxes": grown, "load": round(os.getloadavg()[0], 1)}
    if placed:
        foretold = [score(placed, mixed_routes(model, setting, profile.asked)) for setting in run.settings]
        found["foretold"] = [asdict(each) for each in foretold]
    return found


def send(made: Cluster, model: Model, profile: Profile, requests: Sequence[Request]) -> list[Answer]:
    """Sends each request when it is due, and returns the answers."""
    asked: list[Asked] = [
        (made[NODES[one.box]], profile.prompts[one.task][one.number], model.tokens_of(one.task), "") for one in requests
    ]
    return ask(asked, [one.at_s for one in requests])


def outcome(requests: Sequence[Request], answers: Sequence[Answer], profile: Profile) -> Record:
    """Returns latencies since requests were due, and the number of wrong answers."""
    begins_s = min(answer.began_s - one.at_s for one, answer in zip(requests, answers, strict=True))
    latency: dict[str, list[list[float]]] = {node: [] for node in NODES}
    wrong = 0
    for one, answer in zip(requests, answers, strict=True):
        if answer.finish:
            took_s = answer.began_s + answer.took_s - begins_s - one.at_s
            latency[NODES[one.box]].append([round(one.at_s, 2), round(took_s, 4)])
            wrong += answer.text != profile.answers[one.task][one.number]
    return {
        "latency": latency,
        "complete": sum(map(len, latency.values())),
        "of": len(requests),
        "wrong": wrong,
        "errors": sorted({answer.error for answer in answers if answer.error})[:5],
    }


def state(made: Cluster) -> dict[str, dict[str, float]]:
    """Returns each box's counters: throttling, bytes sent and read, calls."""
    found = {}
    for daemon in made:
        page = daemon.metrics()
        found[daemon.box.name] = {
            **daemon.box.group.throttled(),
            "core_s": sum(map(core_s, daemon.box.pids())),
            "sent_mb": daemon.box.sent_bytes() / 1e6,
            "read_mb": sum(v for k, v in page.items() if k.startswith(names.BYTES_MOVED) and 'from="nvme"' in k) / 1e6,
            "calls": names.select(page, names.REMOTE_CALLS),
            "stall_s": page.get(names.REMOTE_STALL_SECONDS, 0.0),
            "late": names.select(page, names.REMOTE_RETRIES),
            "decode_steps": names.select(page, names.STEPS, phase="decode"),
            "decode_s": names.select(page, names.STEP_SECONDS, phase="decode"),
            "experts": names.select(page, names.ACTIVE_EXPERTS),
            "remote": page.get(names.REMOTE_EXPERTS, 0.0),
            "forwarded": page.get(names.FORWARDED, 0.0),
        }
    return found


def since(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: round(now - before[name][key], 3) for key, now in after[name].items()} for name in after}


def plans_of(made: Cluster, since_s: float) -> list[list[Any]]:
    """Returns the plans since then: seconds, version, whether experts move, the reason."""
    found = [
        [round(clock(event) - since_s, 1), event["version"], event["moving"], event["because"]]
        for daemon in made
        for event in daemon.events()
        if event["event"] == "new plan"
    ]
    return sorted(found)

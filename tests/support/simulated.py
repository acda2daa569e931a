"""Members of the embedded agreement in simulated time: real replicas and files, no threads, no waiting."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pysyncobj.syncobj

from edgemoe.cluster.control.coordination import ops
from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.coordination.raft import StateReplica
from support.fake_link import FakeNet

LEASE_S = 1.0
STEP_S = 0.02


class World:
    """Members by name, some of them running. `now` is everybody's clock."""

    def __init__(self, directory: Path, voters: dict[str, Sequence[str]]) -> None:
        """Gives each member its list of `voters`."""
        self.now = 1000.0
        self.voters, self.directory = dict(voters), directory
        self.transport = FakeNet(list(voters))
        self.running: dict[str, StateReplica] = {}

    def start(self, *names: str) -> None:
        for name in names or self.voters:
            directory = self.directory / name
            directory.mkdir(exist_ok=True)
            others = [other for other in self.voters[name] if other != name]
            link = self.transport.links[name]
            self.running[name] = StateReplica(name, others, directory, link, LEASE_S, self.clock)

    def stop(self, name: str) -> None:
        """Ends the member as kill -9 would."""
        self.running.pop(name).destroy()
        self.transport.listening.discard(name)
        for other in self.transport.listening:
            self.transport.links[other].down(name)

    def lose_disk(self, name: str) -> None:
        shutil.rmtree(self.directory / name)

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += STEP_S
        for name in list(self.running):
            if not self.running[name].tick(0.0):
                self.stop(name)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP_S)):
            self.step()

    def until(self, condition: Callable[[], object], within_s: float = 30.0) -> None:
        ends = self.now + within_s
        while not condition():
            assert self.now < ends, {name: member.getStatus() for name, member in self.running.items()}
            self.step()

    def elected(self) -> list[str]:
        """Returns the members that lead by Raft now."""
        return [name for name, member in self.running.items() if member._isLeader()]

    def agree(self, name: str, op: ops.Op | bytes, within_s: float = 5.0) -> Any:
        """Proposes an operation until it goes through; returns its answer, or None."""
        ends, answers = self.now + within_s, list[tuple[Any, int]]()
        while self.now < ends and name in self.running:
            sent = op if isinstance(op, bytes) else ops.encode(op)
            self.running[name].propose(sent, lambda answer, failure: answers.append((answer, failure)))
            asked, count = self.now, len(answers)
            while len(answers) == count and self.now < asked + LEASE_S and name in self.running:
                self.step()
            if answers and answers[-1][1] == 0:
                return answers[-1][0]
        return None

    def claim(self, name: str) -> int:
        state = self.running[name].state
        return int(self.agree(name, ops.ClaimLease(name, state.epoch + 1, state.epoch, state.renewals)) or 0)

    def commit(self, name: str, digest: str) -> PlanRef:
        state = self.running[name].state
        plan = PlanRef((state.plan.version if state.plan else 0) + 1, digest)
        assert self.agree(name, ops.CommitPlan(state.epoch, plan.version, digest)) == "ok"
        return plan


@contextmanager
def world(directory: Path, voters: dict[str, Sequence[str]], seed: int = 1) -> Iterator[World]:
    made = World(directory, voters)
    state = random.getstate()
    random.seed(seed)
    try:
        with mock.patch.object(pysyncobj.syncobj, "monotonicTime", made.clock):
            yield made
    finally:
        random.setstate(state)
        for name in list(made.running):
            made.stop(name)

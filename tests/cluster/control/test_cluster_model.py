"""A cluster of three with random faults, against invariants; `support.virtual` lists them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.examples import examples
from support.planes import ABC, card
from support.virtual import Box, virtual_cluster

NODES = st.sampled_from(ABC)


class ClusterOfThree(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.made = virtual_cluster(Path(self.folder.name), seed)
        self.cluster = self.made.__enter__()
        self.copy: Box | None = None
        self.copies = 0
        for node in ABC:
            self.do(self.cluster.boxes[node].start())
        self.do(self.cluster.until(self.cluster.settled))

    def do(self, work: Any) -> None:
        self.cluster.loop.run_until_complete(work)

    def runs(self, node: str) -> bool:
        return self.cluster.boxes[node].plane is not None

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 2.5, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.do(self.cluster.pass_time(seconds))

    @rule(node=NODES)
    def dies_or_starts(self, node: str) -> None:
        box = self.cluster.boxes[node]
        self.do(box.die() if self.runs(node) else box.start())

    @rule(source=NODES, sink=NODES)
    def is_cut(self, source: str, sink: str) -> None:
        """Cuts one direction: messages of the other one still arrive, until both boxes notice."""
        if source != sink:
            self.cluster.cuts.add((source, sink))
            self.cluster.join_up()

    @rule(node=NODES)
    def is_cut_off(self, node: str) -> None:
        self.cluster.cuts |= {pair for other in ABC for pair in ((node, other), (other, node)) if other != node}
        self.cluster.join_up()

    @rule()
    def links_heal(self) -> None:
        self.cluster.cuts.clear()
        self.cluster.join_up()

    @rule(node=NODES)
    def sleeps_for_a_minute(self, node: str) -> None:
        """Moves its clock by a minute between two beats."""
        self.cluster.boxes[node].ahead_s += 60.0

    @rule(node=NODES)
    def is_copied_or_its_copy_ends(self, node: str) -> None:
        """Starts a box from a copy of its disk, beside it or in its place."""
        if self.copy is not None:
            self.end_copy()
        elif self.cluster.boxes[node].directory.exists():
            self.copy = Box(self.cluster, node, "copy")
            shutil.rmtree(self.copy.directory, ignore_errors=True)
            shutil.copytree(self.cluster.boxes[node].directory, self.copy.directory)
            self.copies += 1
            self.copy.starts = 1000 * self.copies
            self.do(self.copy.start())

    def end_copy(self) -> None:
        if self.copy is not None:
            self.do(self.copy.die())
            self.copy = None

    @rule(node=NODES)
    def is_backed_up(self, node: str) -> None:
        backup = self.cluster.folder / f"backup-{node}"
        shutil.rmtree(backup, ignore_errors=True)
        shutil.copytree(self.cluster.boxes[node].directory, backup)

    @precondition(lambda self: self.cluster.one_plan())
    @rule(node=NODES)
    def is_restored(self, node: str) -> None:
        """Starts with an old state directory."""
        backup, box = self.cluster.folder / f"backup-{node}", self.cluster.boxes[node]
        if backup.exists():
            self.do(box.die())
            self.cluster.lose_disk(node)
            shutil.copytree(backup, box.directory)
            self.do(box.start())

    @precondition(lambda self: self.cluster.one_plan())
    @rule(node=NODES)
    def loses_its_disk(self, node: str) -> None:
        box = self.cluster.boxes[node]
        self.do(box.die())
        self.cluster.lose_disk(node)
        box.sound, box.settings = True, {}
        self.do(box.start())

    @rule(node=NODES)
    def is_given_other_settings_or_its_own_again(self, node: str) -> None:
        box = self.cluster.boxes[node]
        if self.runs(node):
            self.do(box.die())
        box.sound = not box.sound
        box.settings = {} if box.sound else {"coordination": "single", "leader": node}
        self.do(box.start())

    @rule(node=NODES, other=NODES)
    def strikes_another_from_its_list_or_lists_all(self, node: str, other: str) -> None:
        """Gives a box a list that differs from the others', also while links are cut."""
        box = self.cluster.boxes[node]
        box.struck = box.struck ^ {other} if node != other else set()
        box.read_list()

    @rule(node=NODES)
    def runs_a_release_without_a_common_version_or_this_one(self, node: str) -> None:
        box = self.cluster.boxes[node]
        if self.runs(node):
            self.do(box.die())
        self.cluster.foreign ^= {node}
        self.do(box.start())

    @rule(node=NODES, room=st.sampled_from([0, 6, 12]))
    def has_another_engine(self, node: str, room: int) -> None:
        box = self.cluster.boxes[node]
        box.engine = card(f"engine-{node}-{room}", room) if room else None
        if box.plane is not None and box.sound:
            box.plane.set_announcement(msgspec.structs.replace(box.plane.announcement, engine=box.engine))

    def teardown(self) -> None:
        """Ends the faults: then all boxes agree, and keep everything agreed before."""
        if not hasattr(self, "made"):
            return
        try:
            cluster = self.cluster
            cluster.cuts.clear()
            cluster.join_up()
            self.end_copy()
            for node, box in cluster.boxes.items():
                box.struck = set()
                box.read_list()
                is_as_others = box.sound and node not in cluster.foreign and not box.began_with
                if box.plane is not None and not is_as_others:
                    self.do(box.die())
                cluster.foreign.discard(node)
                box.sound, box.settings, box.engine = True, {}, card(f"engine-{node}", 12)
                if box.plane is None:
                    self.do(box.start())
                else:
                    box.plane.set_announcement(msgspec.structs.replace(box.plane.announcement, engine=box.engine))
            self.do(cluster.until(cluster.settled))
            assert max(cluster.plans) == cluster.boxes["a"].plane.state.plans.ref.version  # type: ignore[union-attr]
        finally:
            self.made.__exit__(None, None, None)
            self.folder.cleanup()


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_in_any_order_of_events_one_leader_is_obeyed_and_no_agreed_entry_is_lost() -> None:
    short = hypothesis.settings(
        max_examples=examples(60), stateful_step_count=20, suppress_health_check=QUIET, deadline=None
    )
    hypothesis.stateful.run_state_machine_as_test(ClusterOfThree, settings=short)


@pytest.mark.slow
def test_many_more_events_keep_one_leader() -> None:
    long = hypothesis.settings(
        max_examples=200, stateful_step_count=40, derandomize=False, suppress_health_check=QUIET, deadline=None
    )
    hypothesis.stateful.run_state_machine_as_test(ClusterOfThree, settings=long)


def test_the_agreement_goes_by_the_clock_of_its_box(tmp_path: Path) -> None:
    with virtual_cluster(tmp_path, 1) as cluster:
        boxes, run = cluster.boxes, cluster.loop.run_until_complete
        for node in ABC:
            run(boxes[node].start())
        run(cluster.until(cluster.settled))
        first = boxes["a"].plane.leader if boxes["a"].plane else ""
        left = [node for node in ABC if node != first]
        run(boxes[first].die())
        run(cluster.until(lambda: all(box.plane.leader in left for box in boxes.values() if box.plane), 10.0))

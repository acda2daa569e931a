"""Computes a layer-step with the help of peers: each missing expert goes the way that finishes the layer soonest.

This box reads experts from its devices, RAM, disk, and peers' memory; each peer is one more channel. Peers are asked
first, one message each; then this box computes its own part. A call that fails or is late is computed another way; the
first answer counts. An answer is added whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.errors import MissingExpert
from edgemoe.experts.compute.cost_model import BULK, COMPUTE, DISK, FIRST_ELSEWHERE, TOP, CostModel
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import BoolArray
from edgemoe.policy.help_choice import ALONE, HELPED, HelpChoice
from edgemoe.policy.resolve import CostMatrix as CostArray
from edgemoe.policy.resolve import WayAssignment, WayCosts, candidates, resolve
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, Tier
from edgemoe.types.peers import ExpertPeers, ExpertWork, PeerCosts, RemoteCall, row_floats
from edgemoe.types.step import TokenGroups

HERE = -1
# Calls on many rows are cut into parts, so that both directions of the link and the peer work at the same time. After
# the last part is sent, the link is idle while the peer computes it.
EXPERT_CALL_S = 0.01  # that a part takes on the link, there and back,
EXPERT_CALL_BYTES = (128 << 10, 1 << 20)  # within these bounds
SLOW_FACTOR = (
    4.0  # a peer with an expert in memory that takes this multiple of another's time, reading included, is too slow
)
LATE_FACTOR, LATE_S = 4.0, 0.05  # a call is late after this multiple of its expected time, and at least this time
FEW_TOKENS = 16  # of a layer-step; larger layer-steps are compared among themselves
MOST_COMPUTED = 1 << 10  # experts of a step that are remembered as computed by peers
AGAIN_S = 0.2  # between searches for another way where there was none
LAYER_STEP_TIMEOUT_CALLS = 2  # time-outs of calls for which a layer-step asks peers; local work does not count
NOWHERE = "it is not on the disk, and no box that can be reached has it"

Tried = dict[str, float]  # peers that were asked -> when they may be asked again
Local = Callable[[TokenGroups, BoolArray | None], None]  # computes a group here


@dataclass(slots=True)
class PendingExpertCall:
    """Experts that one or more peers were asked to compute; the first answer counts."""

    group: TokenGroups
    rows: IntArray  # [r] tokens whose sums come back
    late_s: float  # when to look for another way
    tried: Tried
    live: int = 0
    done: bool = False


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The first plan of a layer-step. `alone_s` is None if this box could not do it alone."""

    kind: int  # ALONE, HELPED
    predicted_s: float
    alone_s: float | None


class PeerExperts:
    """Runs layer-steps with peers, and holds their shared costs, counts and peers."""

    def __init__(
        self, geometry: ExpertGeometry, residency: Residency, costs: CostModel, peers: ExpertPeers, on_disk: BoolArray
    ) -> None:
        """Takes this box's `costs`; `on_disk` [L, E] marks the experts that its store can read."""
        self.geometry, self.residency, self.costs, self.peers, self.on_disk = geometry, residency, costs, peers, on_disk
        self.asked = self.hedged = self.redone = 0  # calls; late ones tried again; failed ones
        self.experts = 0  # computed by peers
        self.stall_s = 0.0  # waiting for answers
        self.taken_s = self.units = 0.0  # of all layer-steps here: their time, and their work wherever it is done
        self._computed: list[ExpertId] = []  # by peers, since `pop_computed`
        self.choices = {"few": HelpChoice(), "many": HelpChoice()}  # by the tokens of layer-steps

    def choice(self, tokens: int) -> HelpChoice:
        """Returns the choice between help and none in layer-steps of `tokens` tokens."""
        return self.choices["few" if tokens <= FEW_TOKENS else "many"]

    def run(
        self, layer: int, hidden: torch.Tensor, group: TokenGroups, prefill_only: BoolArray | None, local: Local
    ) -> torch.Tensor | None:
        """Returns the peers' part of the layer's sum, [T, H] float32, or None. Raises MissingExpert.

        The rest is computed by `local`.
        """
        end_s = time.monotonic() + LAYER_STEP_TIMEOUT_CALLS * self.peers.timeout_s
        return PeerLayerStep(self, layer, hidden, prefill_only, local, end_s).run(group)

    def note_computed(self, layer: int, experts: IntArray) -> None:
        """Counts experts that a peer computed."""
        self.experts += len(experts)
        if len(self._computed) < MOST_COMPUTED:
            self._computed += [ExpertId(layer, expert) for expert in experts[self.on_disk[layer, experts]].tolist()]

    def pop_computed(self) -> list[ExpertId]:
        """Returns experts of this box's disk that peers have computed since the last call."""
        computed, self._computed = self._computed, []
        return computed

    def elsewhere(self, layer: int, experts: IntArray) -> BoolArray:
        """Returns a mask of experts [n] not to prefetch: not on our disk, or in a peer's memory."""
        away: BoolArray = ~self.on_disk[layer, experts]
        for offer in self.peers.offers(layer, experts):
            away |= offer.wait_s <= 0
        return away


@dataclass(slots=True)
class PeerLayerStep:
    """Computes one layer-step with peers."""

    remote: PeerExperts
    layer: int
    hidden: torch.Tensor
    prefill_only: BoolArray | None  # [n] of the whole group
    local: Local
    end_s: float  # until when peers are asked; then missing experts are computed here, or raise MissingExpert
    out: FloatArray | None = None  # [T, H]
    answers: SimpleQueue[RemoteCall] = field(default_factory=SimpleQueue)
    jobs: dict[RemoteCall, PendingExpertCall] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # by peer, why it was of no help
    prefill_only_of: BoolArray | None = None  # [E]
    host: npt.NDArray[np.uint8] | None = None  # the hidden states' bytes
    plan: ChosenPlan | None = None

    def run(self, group: TokenGroups) -> torch.Tensor | None:
        began_s = time.monotonic()
        if self.prefill_only is not None:
            self.prefill_only_of = np.zeros(self.remote.geometry.experts, np.bool_)
            self.prefill_only_of[group.experts] = self.prefill_only
        self._assign(group, {})
        while any(not job.done for job in self.jobs.values()):
            self._wait()
        taken_s = time.monotonic() - began_s
        self.remote.taken_s += taken_s
        self.remote.units += float(work_units(group.offsets).sum())
        if (plan := self.plan) is not None:
            self.remote.choice(len(self.hidden)).observe(plan.kind, plan.alone_s, plan.predicted_s, taken_s)
        return None if self.out is None else torch.from_numpy(self.out).to(self.hidden.device)

    # --- which way ----------------------------------------------------------------------------------------------

    def _assign(self, group: TokenGroups, tried: Tried) -> None:
        """Asks peers to compute their experts, then computes the rest here."""
        offers = self._offers(group, tried)
        way = self._resolve(group, offers, ())
        for i, offer in enumerate(offers):
            if (chosen := way == i).any():
                self._ask(offer, group.only(chosen), chosen, tried)
        here = way == HERE
        if here.any():
            self._compute(group if here.all() else group.only(here))

    def _offers(self, group: TokenGroups, tried: Tried) -> list[PeerCosts]:
        """Returns peers' offers for the group's experts. Assumes that their disks are no faster than ours.

        A peer's disk is for experts that no other peer has in memory, since the peer computes nothing while it reads.
        A peer that is slower by SLOW_FACTOR does not count as having them.
        """
        now_s = time.monotonic()
        if now_s >= self.end_s:
            return []
        found = self.remote.peers.offers(self.layer, group.experts)
        offers = [offer for offer in found if tried.get(offer.node, 0.0) <= now_s]
        if not offers:
            return []
        waits_s = np.array([offer.wait_s for offer in offers])  # [offers, n]: 0 in memory, inf if it has no copy
        if not (reads := (waits_s > 0) & (waits_s < np.inf)).any():
            return offers
        waits_s[reads] = np.maximum(waits_s[reads], self.remote.costs.read_s(self.layer))
        ends_s = waits_s + np.array([[offer.open_s + offer.unit_s] for offer in offers])
        in_memory_s = np.where(reads, np.inf, ends_s).min(axis=0)  # inf if no peer has it there
        waits_s[reads & (in_memory_s < np.inf) & (in_memory_s <= SLOW_FACTOR * ends_s)] = np.inf
        return [offer._replace(wait_s=wait_s) for offer, wait_s in zip(offers, waits_s, strict=True)]

    def _resolve(self, group: TokenGroups, offers: Sequence[PeerCosts], without: Collection[str]) -> IntArray:
        """Returns for each expert [n] the index of the offer to use, or HERE. Raises MissingExpert."""
        remote, layer = self.remote, self.layer
        way = np.full(len(group.experts), HERE)
        tier = remote.residency.tiers_of(layer, group.experts)
        missing = np.flatnonzero(tier > remote.residency.fastest)
        wanted, tier = group.experts[missing], tier[missing]
        away = (tier == Tier.NVME) & ~remote.on_disk[layer, wanted]
        if not len(missing) or not (offers or away.any()):
            return way
        units, counts = work_units(group.offsets), np.diff(group.offsets)[missing]
        rows = counts * _share(len(self.hidden), counts.sum() / (1 + len(offers)))
        its_s, open_s = _seconds(offers, missing, rows, units[missing].astype(np.float64))
        near = candidates(its_s, open_s)  # [k, n]
        asked, channel = np.arange(len(offers)), near
        if len(near) < len(offers):
            asked, channel = np.unique(near, return_inverse=True)
        load = remote.costs.load(layer, wanted, tier, units[missing], (len(near), len(asked)))
        if away.any():
            load[away, TOP, DISK] = 0.0
            load[away, TOP, BULK] = remote.peers.fetch_s(layer, wanted[away], without)
        first, each = load.shape[2] - len(asked), np.arange(len(missing))
        for k, channel_of in enumerate(channel.reshape(near.shape) + first):
            load[each, FIRST_ELSEWHERE + k, channel_of] = its_s[near[k], each]
        opening, busy = np.append(np.zeros(first), open_s[asked]), np.zeros(load.shape[2])
        busy[COMPUTE] = remote.costs.unit_s * (units.sum() - units[missing].sum())
        alone = load.sum(axis=2) + (load > 0) @ opening
        nowhere = np.flatnonzero(~np.isfinite(alone).any(axis=1))
        if len(nowhere):
            expert, why = int(wanted[nowhere[0]]), "; ".join(self.reasons.values()) or NOWHERE
            raise MissingExpert(layer, expert, why, away=remote.peers.holders_away(layer, expert))
        chosen = self._choose(WayCosts(load, alone, opening, busy)).way - FIRST_ELSEWHERE
        way[missing] = np.where(chosen < 0, HERE, near[np.maximum(chosen, 0), each]) if len(near) else HERE
        return way

    def _choose(self, ways: WayCosts) -> WayAssignment:
        """Returns the best assignment, or the best of this box alone if that has been faster."""
        best = resolve(ways)
        if self.plan is not None:  # an earlier way has failed
            return best
        if (best.way < FIRST_ELSEWHERE).all():
            self.plan = ChosenPlan(ALONE, best.finish_s, best.finish_s)
            return best
        own = ways.alone[:, :FIRST_ELSEWHERE]
        if not np.isfinite(own).any(axis=1).all():
            self.plan = ChosenPlan(HELPED, best.finish_s, None)
            return best
        alone = resolve(WayCosts(ways.load[:, :FIRST_ELSEWHERE], own, ways.opening, ways.busy))
        kind = self.remote.choice(len(self.hidden)).choose(alone.finish_s, best.finish_s)
        used = best if kind == HELPED else alone
        self.plan = ChosenPlan(kind, used.finish_s, alone.finish_s)
        return used

    # --- peers --------------------------------------------------------------------------------------------------

    def _ask(self, offer: PeerCosts, group: TokenGroups, chosen: BoolArray, tried: Tried) -> None:
        """Sends one call for all experts of the peer, or several where there are many rows."""
        tokens = np.unique(group.tokens) if len(self.hidden) > 1 else group.tokens[:1]
        least, most = (max(1, size // self.remote.geometry.row_bytes) for size in EXPERT_CALL_BYTES)
        most = int(min(most, max(least, EXPERT_CALL_S / max(offer.row_s, 1e-9))))
        parts = -(-len(tokens) // most)
        units = parts * float(work_units(-(-group.offsets // parts)).sum())
        expected_s = offer.open_s + len(tokens) * offer.row_s + float(offer.wait_s[chosen].sum()) + offer.unit_s * units
        late_s = time.monotonic() + max(LATE_S, LATE_FACTOR * expected_s)
        for rows in np.array_split(tokens, parts) if parts > 1 else (tokens,):  # each is sent before the next is made
            part = group if parts == 1 else group.within(rows)
            self._call(PendingExpertCall(part, rows, late_s, dict(tried)), offer.node)

    def _call(self, job: PendingExpertCall, node: str) -> None:
        if self.host is None:
            self.host = self.hidden.detach().to("cpu").contiguous().view(torch.uint8).numpy()
        hidden = self.host[job.rows]  # a copy
        index = np.searchsorted(job.rows, job.group.tokens)
        work = ExpertWork(self.layer, job.group.experts, job.group.offsets, index, job.group.weights, hidden)
        job.tried[node] = np.inf
        job.live += 1
        self.remote.asked += 1
        self.jobs[self.remote.peers.call(node, work, self.answers)] = job

    def _wait(self) -> None:
        """Waits until a call ends. Looks for another way for late calls, and at the deadline for all."""
        began_s = time.monotonic()
        pending = [job for job in self.jobs.values() if not job.done]
        try:
            call = self.answers.get(timeout=max(0.0, min(self.end_s, *(job.late_s for job in pending)) - began_s))
        except Empty:
            self.remote.stall_s += time.monotonic() - began_s
            for job in pending:
                if self.answers.empty() and not job.done and min(job.late_s, self.end_s) <= time.monotonic():
                    self._hedge(job)  # perhaps for long: an answer that comes meanwhile goes first
        else:
            self.remote.stall_s += time.monotonic() - began_s
            self._on_answer(call)

    def _on_answer(self, call: RemoteCall) -> None:
        job = self.jobs[call]
        job.live -= 1
        if job.done:
            return
        if call.result is not None and self._add(job.rows, call.result):
            job.done = True
            self.remote.note_computed(self.layer, job.group.experts)
            return
        self.reasons[call.node] = str(call.error or f"{call.node} answered with sums that are not finite")
        job.tried[call.node] = again_s = time.monotonic() + AGAIN_S
        if job.live:  # the other one may hang
            job.late_s = min(job.late_s, again_s)
        else:
            job.done = True
            self.remote.redone += 1
            self._assign(job.group, job.tried)

    def _hedge(self, job: PendingExpertCall) -> None:
        """Asks another peer that has all experts in memory, or abandons the late call for other ways.

        Where there is neither, looks again later, or raises MissingExpert at the deadline.
        """
        for node in (node for node, again_s in job.tried.items() if again_s == np.inf):
            self.reasons.setdefault(node, f"{node} has not answered")
        job.late_s = time.monotonic() + AGAIN_S
        offers = self._offers(job.group, job.tried)
        whole = [offer for offer in offers if not offer.wait_s.any()]
        if whole:
            self.remote.hedged += 1
            job.late_s = time.monotonic() + self.remote.peers.timeout_s
            self._call(job, min(whole, key=lambda offer: offer.open_s).node)
            return
        try:
            self._resolve(job.group, offers, job.tried)
        except MissingExpert:
            if time.monotonic() >= self.end_s:
                raise
            return
        self.remote.hedged += 1
        job.done = True
        self._assign(job.group, job.tried)

    def _add(self, rows: IntArray, result: memoryview) -> bool:
        """Adds a call's sums. Returns False and adds nothing where they are not finite but the hidden states are."""
        sums = row_floats(result, self.remote.geometry.bf16).reshape(len(rows), -1)
        strange = ~np.isfinite(sums).all(axis=1)
        if strange.any() and self.hidden[torch.from_numpy(rows[strange])].isfinite().all(dim=1).any():
            return False  # of finite hidden states
        if self.out is None:
            self.out = np.zeros(tuple(self.hidden.shape), np.float32)
        first, last = int(rows[0]), int(rows[-1]) + 1
        together = last - first == len(rows)  # a slice is added to in place
        self.out[slice(first, last) if together else rows] += sums
        return True

    # --- here ---------------------------------------------------------------------------------------------------

    def _compute(self, group: TokenGroups) -> None:
        began_s = time.perf_counter()
        self.local(group, None if self.prefill_only_of is None else self.prefill_only_of[group.experts])
        self.end_s += time.perf_counter() - began_s


def _seconds(
    offers: Sequence[PeerCosts], experts: IntArray, rows: CostArray, units: CostArray
) -> tuple[CostArray, CostArray]:
    """Returns seconds of each peer for each expert [p, n], and for a call itself [p]."""
    wait_s = np.array([offer.wait_s[experts] for offer in offers]).reshape(len(offers), len(experts))
    once = np.array([offer[1:4] for offer in offers], np.float64).reshape(-1, 3)  # open_s, row_s, unit_s
    return once[:, 1:2] * rows + once[:, 2:] * units + wait_s, once[:, 0]


def _share(tokens: int, calls: float) -> float:
    """Returns the expected rows per call where calls fall on tokens at random: calls of one token share a row."""
    if tokens == 1 or calls <= 1:
        return 1.0 / max(1.0, calls)
    return float(tokens * (1 - (1 - 1 / tokens) ** calls) / calls)

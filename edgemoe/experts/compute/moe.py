"""Computes the experts of a model that is larger than its memory, for the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.experts.compute.cpu_experts import CpuExperts
from edgemoe.experts.compute.device_spread import DeviceSpread, Rebalancing
from edgemoe.experts.compute.dispatch import ExpertCompute
from edgemoe.experts.compute.layer_step import DeviceShare, LayerStep
from edgemoe.experts.compute.peer_layer_step import PeerExperts
from edgemoe.experts.predict.gate_lookahead import HINTED_CALLS, GateLookAhead
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import ALWAYS
from edgemoe.experts.tiers.slots import BoolArray, PrefetchPriority, SlotTransfer
from edgemoe.experts.transfer.link_prefetch import IdleWindow
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.kernels.cpu.expert_math import ExpertTable
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.step import ExpertSlots, StepMeta, StepRouting, TokenGroups


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How experts that are missing are had."""

    prefetch: bool = True
    keep_hints: bool = False  # put hints into the observations
    keep_hidden: bool = False  # keep hidden states and their layers' gates, of steps that only decode
    deadline_s: float = 60.0  # until an expert is given up
    cpu_helps: bool = True  # the CPU computes experts that devices lack from RAM, if that is sooner

    @property
    def keeps(self) -> bool:
        """Whether more than the routing is observed, layer by layer."""
        return self.keep_hints or self.keep_hidden


AS_USUAL = FetchOptions()


class TieredExperts:
    """Implements `ExpertExecutor` by residency, loader and the devices' computation. Used on the compute thread only.

    Between `begin_step` and `end_step` it collects the routing, and distinguishes prefill from decode: experts
    for prefill only do not replace experts for decode. Outside of a step all demands count as decode.
    """

    def __init__(
        self,
        geometry: ExpertGeometry,
        residency: Residency,
        loader: ExpertLoader,
        computes: Sequence[ExpertCompute],
        cpu_experts: CpuExperts,
        fetching: FetchOptions = AS_USUAL,
    ) -> None:
        """Takes `computes` in the order of the residency's devices."""
        self.geometry, self.residency, self.loader = geometry, residency, loader
        self.lookahead = range(0 if fetching.keep_hidden else 1, 2 if fetching.prefetch or fetching.keep_hints else 1)
        self.stall_s = [0.0, 0.0, 0.0]  # in all, by the tier that was waited for
        self._gap = loader.gap if fetching.prefetch else IdleWindow(geometry.layers)
        self._requester = PrefetchRequester(residency, loader, geometry.top_k)
        self._computes, self.cpu_experts = tuple(computes), cpu_experts
        self._rebalancing = Rebalancing(residency, computes)
        self.spread: DeviceSpread | None = None  # moves experts between devices
        self._fetching = fetching
        self._step: RoutingCollector | None = None
        self.places: ExpertTable | None = None
        self._has_all = False  # nothing can be missing any more
        self._next_layer = 0  # whose experts are computed next
        self.remote: PeerExperts | None = None  # the boxes that help, if any

    def begin_step(self, meta: StepMeta) -> npt.NDArray[np.int16]:
        """Starts collecting. Drops the collection of a step that failed before its end.

        Returns the array of the routing [L, T, k], filled layer by layer, over -1. Ends looking
        ahead once nothing can be missing any more.
        """
        if not self._has_all and not self._fetching.keeps and self.residency.has_all:
            self._has_all, self.lookahead = True, range(0)
            if len(self._computes) == 1:
                self.places = self._computes[0].places(self.residency.tops[0].where)
        self._step = RoutingCollector(meta, self.geometry, self.loader.clock)
        self._next_layer = 0
        return self._step.ids

    def end_step(self) -> StepRouting:
        """Ends the step, and returns its routing."""
        self._note_spent()
        self._rebalancing.on_step_ended()
        if self.spread is not None:
            self.spread.on_step_ended()
        step, self._step = self._step, None
        if self.remote is not None and (computed := self.remote.pop_computed()):
            self._fetch_used(computed, step)
        assert step is not None, "end_step without begin_step"
        return step.routing()

    @cached_property
    def slots(self) -> ExpertSlots | None:
        """Returns the experts of the only device and of RAM, if it can compute them without the host."""
        if len(self._computes) > 1 or self._fetching.keeps:
            return None
        return self._computes[0].slots(self.residency.tops[0].where, self.residency.ram.where)

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        """Records a step computed by `places` or `slots`: `ids` and `weights` [L, T, k], of all layers."""
        if self._step is not None:
            self._step.ids[:], self._step.weights[:] = ids.numpy(), weights.numpy()
        if self._has_all:
            self.residency.count_served(served)
        else:
            self._count_step(ids.numpy())

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the experts' outputs, [T, H] float32. Raises MissingExpert, CorruptExpert."""
        late = weights.to("cpu", non_blocking=True)  # is there once the ids are, so that the host waits once
        chosen, shares = ids.numpy(force=True), late.numpy(force=True)  # [T, k]
        group, prefill_only = TokenGroups.of(chosen, shares), None
        if self._step is not None:
            self._step.observe(layer, chosen, shares)
            if self._fetching.keep_hidden:
                self._step.keep(layer, hidden)
            prefill_only = self._step.prefill_only(chosen, group)
        self._next_layer = layer + 1
        self._gap.demand(layer)
        self._requester.demand(layer, chosen)
        return self.compute(layer, hidden, group, prefill_only)

    def compute(
        self, layer: int, hidden: torch.Tensor, group: TokenGroups, prefill_only: BoolArray | None = None
    ) -> torch.Tensor:
        """Returns the weighted sum of the group's calls, [T, H] float32. Raises MissingExpert, CorruptExpert."""
        if len(self._computes) == 1:
            return self._compute(layer, hidden, group, prefill_only)
        self.residency.device_assignment.hold_layer(layer)
        try:
            return self._compute(layer, hidden, group, prefill_only)
        finally:
            self.residency.device_assignment.release_layer()

    def _compute(
        self, layer: int, hidden: torch.Tensor, group: TokenGroups, prefill_only: BoolArray | None
    ) -> torch.Tensor:
        for compute in self._computes:
            compute.begin(layer, hidden)
        self.cpu_experts.begin(hidden)
        helped: torch.Tensor | None = None
        if not self._all_there(layer, group, prefill_only):
            if self.remote is None:
                self._wait_for(layer, group, prefill_only)
            else:
                helped = self._share(self.remote, layer, hidden, group, prefill_only)
        first, *others = (compute.end() for compute in self._computes)
        for other in others:
            first += other.to(first.device)
        if (spared := self.cpu_experts.end()) is not None:
            first += spared.to(first.device)
        if helped is not None:
            first += helped
        return first

    def compute_if_there(self, layer: int, hidden: torch.Tensor, group: TokenGroups) -> torch.Tensor | None:
        """Returns the same as `compute` if all experts are in the top tier, else None."""
        if len(self._computes) > 1 or not self.residency.all_on_top(layer, group.experts):
            return None
        self._computes[0].begin(layer, hidden)
        return self._computes[0].end() if self._all_there(layer, group, None) else None

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        """Prefetches experts for `layer` by a forecast [T, E] of its needs, while the layers before it run."""
        scores: FloatArray = probs.numpy(force=True)
        distance = layer - self._next_layer
        if self._step is not None and (self._fetching.keep_hints if distance else self._fetching.keep_hidden):
            self._step.hint(layer, distance, scores)
        few = len(scores) * self.geometry.top_k < HINTED_CALLS * self.geometry.experts_of(layer)
        if self._fetching.prefetch and distance and few:
            self._requester.on_hint(layer, scores)

    # --- inside -------------------------------------------------------------------------------------------------

    def _count_step(self, ids: IntArray) -> None:
        """Counts a step computed by `slots`, which read missing experts from RAM, and prefetches some of these."""
        assert self.slots is not None
        layers, outside = len(ids), self.slots.outside
        needed: BoolArray = np.zeros(outside.shape, np.bool_)
        needed[np.arange(layers)[:, None], ids.reshape(layers, -1)] = True
        self.residency.count_step(needed, outside)
        missed = needed & outside
        if not missed.any():
            return
        link, step_s = self.loader.links[0], self._step.elapsed_s if self._step is not None else 0.0
        read_s = float(missed.sum(1) @ self.geometry.strides_bytes) / (link.stats.bytes_per_s or np.inf)
        stall_s = min(read_s, step_s)
        self.stall_s[Tier.RAM] += stall_s
        if self._step is not None:
            self._step.stall_s += stall_s
        if self._fetching.prefetch and link.has_room():
            self.loader.start(self._promoted(missed, (step_s - stall_s) * link.stats.bytes_per_s))

    def _promoted(self, missed: BoolArray, most_bytes: float) -> Iterator[SlotTransfer]:
        """Yields loads of the missed experts [L, E] of highest rank that outrank others on the device by a margin.

        Together they have at most `most_bytes`, which the link could have carried beside the kernels' own reads.
        """
        policy, keys = self.residency.policy, np.flatnonzero(missed)
        ranks = policy.rank(len(missed) - 1).ravel()
        for key in keys[np.argsort(-ranks[keys], kind="stable")].tolist():
            expert = ExpertId(*divmod(key, self.geometry.experts))
            most_bytes -= self.geometry.stride_bytes(expert.layer)
            if most_bytes < 0:
                return
            move = Move(expert, Tier.RAM, Tier.VRAM, float(ranks[key]) - policy.margin)
            if (load := self.residency.reserve(move, PrefetchPriority.USED)) is not None:
                yield load

    def _fetch_used(self, experts: Sequence[ExpertId], step: RoutingCollector | None) -> None:
        """Requests experts that peers have computed, where they outrank others here: the next steps may need them too.

        A step that did not only decode changes nothing, and neither does room for less than a token's experts.
        """
        residency = self.residency
        few = residency.homes.passing < self.geometry.layers * self.geometry.top_k
        if few or not self._fetching.prefetch or step is None or step.decode is not None:
            return
        ranks, margin = residency.policy.rank(self.geometry.layers - 1), residency.policy.margin
        moves = [Move(expert, Tier.NVME, residency.fastest, float(ranks[expert]) - margin) for expert in experts]
        self.loader.prefetch(sorted(moves, key=lambda move: -move.score), PrefetchPriority.USED)

    def _all_there(self, layer: int, group: TokenGroups, prefill_only: BoolArray | None) -> bool:
        """Starts the layer-step. Computes it and returns True where one device holds all its experts."""
        if len(self._computes) > 1:
            self.residency.begin_layer(layer, group.experts if prefill_only is None else group.experts[~prefill_only])
            return False
        slots = self.residency.pin_if_all_resident(0, layer, group.experts, prefill_only)
        if slots is None:
            return False
        try:
            self._stream_next(layer, prefill_only, len(group.tokens))
            self._begin_gap(layer)
            self._computes[0].add(slots, group)
        finally:
            self.residency.release(0, slots)
        return True

    def _begin_gap(self, layer: int) -> None:
        """Starts the idle window and prefetching: the layer has all its experts."""
        self._gap.begin(layer)
        self.loader.start_prefetches()

    def _share(
        self, remote: PeerExperts, layer: int, hidden: torch.Tensor, group: TokenGroups, prefill_only: BoolArray | None
    ) -> torch.Tensor | None:
        """Computes a layer-step with peers. Returns their part of the sum, or None."""
        waited_s = remote.stall_s
        try:
            return remote.run(
                layer, hidden, group, prefill_only, lambda part, prefill_only: self._wait_for(layer, part, prefill_only)
            )
        finally:
            if self._step is not None:
                self._step.stall_s += remote.stall_s - waited_s

    def _wait_for(self, layer: int, group: TokenGroups, prefill_only: BoolArray | None) -> None:
        """Computes a layer-step with missing experts, or one that several devices share."""
        calls, cpu_experts, used = len(group.tokens), self.cpu_experts, NOBODY
        try:
            if (spared := cpu_experts.claim(layer, group, prefill_only)) is not None:
                used = group.experts[spared if prefill_only is None else spared & ~prefill_only]
                group, prefill_only = group.only(~spared), None if prefill_only is None else prefill_only[~spared]
            parts = [
                part
                for device in range(len(self._computes))
                if (part := self._part(device, layer, group, prefill_only))
            ]
            layer_step = LayerStep(
                self.residency, self.loader, layer, parts, self._fetching.deadline_s, lambda: self._begin_gap(layer)
            )
            units = float(work_units(group.offsets).sum())
            self._run(
                layer_step,
                lambda: self._stream_next(layer, prefill_only, calls),
                lambda: self._spare(layer, used),
                units,
            )
        finally:
            cpu_experts.drop()

    def _spare(self, layer: int, used: IntArray) -> None:
        """Computes the CPU's part, then prefetches the part's experts that decode uses."""
        self.cpu_experts.compute()
        if len(used):  # after computing, because copies would slow the CPU down
            prefetch_requests = (Move(ExpertId(layer, expert), Tier.RAM, Tier.VRAM, ALWAYS) for expert in used.tolist())
            self.loader.prefetch(prefetch_requests, PrefetchPriority.USED)

    def _run(
        self, layer_step: LayerStep, all_claimed: Callable[[], None], meanwhile: Callable[[], None], units: float
    ) -> None:
        """Runs a layer-step of `units` of work, and measures stall and computing time."""
        began_s, other_s = self.loader.clock(), self.cpu_experts.took_s
        try:
            layer_step.run(all_claimed, meanwhile)
        finally:
            waited_s = sum(layer_step.stall_s)
            self.stall_s = [old + new for old, new in zip(self.stall_s, layer_step.stall_s, strict=True)]
            if self._step is not None:
                self._step.stall_s += waited_s
        self._note_spent()
        if units:
            other_s = self.cpu_experts.took_s - other_s + waited_s
            self.cpu_experts.costs.observe(units, max(0.0, self.loader.clock() - began_s - other_s))

    def _note_spent(self) -> None:
        """Adds the finished work of devices that work beside this thread to costs and stall."""
        for compute in self._computes:
            spent = compute.pop_timings()
            if spent.units:
                self.cpu_experts.costs.observe_device(spent.units, spent.computed_s)
                self.stall_s[Tier.RAM] += spent.waited_s
                if self._step is not None:
                    self._step.stall_s += spent.waited_s

    def _part(self, device: int, layer: int, group: TokenGroups, prefill_only: BoolArray | None) -> DeviceShare | None:
        slots = self.residency.slots_of(device, layer)
        if len(self._computes) == 1:
            return DeviceShare(device, slots, self._computes[0], group, prefill_only)
        here = self.residency.device_of[layer, group.experts] == device
        if not here.any():
            return None
        return DeviceShare(
            device,
            slots,
            self._computes[device],
            group.only(here),
            None if prefill_only is None else prefill_only[here],
        )

    def _stream_next(self, layer: int, prefill_only: BoolArray | None, calls: int) -> None:
        """Prefetches all of the next layer's experts where a large prefill needs nearly all of them."""
        whole = prefill_only is not None and calls >= HINTED_CALLS * self.geometry.experts_of(layer)
        if whole and self._fetching.prefetch and layer + 1 < self.geometry.layers:
            everybody = np.arange(self.geometry.experts_of(layer + 1))
            self._requester.replace(layer + 1, everybody, PrefetchPriority.PREFILL_ONLY)


# --- observations ---


class RoutingCollector:
    """Collects the routing of one step, layer by layer."""

    def __init__(self, meta: StepMeta, geometry: ExpertGeometry, clock: Callable[[], float]) -> None:
        self.meta = meta
        self.decode: BoolArray | None = None  # [T] rows of decoding sequences, where there are others
        if not meta.decode.all():
            self.decode = np.repeat(meta.decode, meta.query_lens)
        self._geometry = geometry
        self.ids = np.full((geometry.layers, len(meta.tokens), geometry.top_k), -1, np.int16)  # until a layer has run
        self.weights = np.empty(self.ids.shape, np.float32)
        self.hints: dict[int, FloatArray] = {}
        self.hidden: FloatArray | None = None
        self.stall_s = 0.0
        self._clock, self._began_s = clock, clock()

    def observe(self, layer: int, ids: IntArray, weights: FloatArray) -> None:
        """Adds one layer's routing, [T, k]."""
        self.ids[layer] = ids
        self.weights[layer] = weights

    def hint(self, layer: int, distance: int, probs: FloatArray) -> None:
        """Adds a forecast of `layer`'s routing from `distance` layers before it, [T, E]."""
        if distance not in self.hints:
            self.hints[distance] = np.zeros((len(self.ids), len(probs), self._geometry.experts), np.float32)
        self.hints[distance][layer, :, : probs.shape[1]] = probs

    def keep(self, layer: int, hidden: torch.Tensor) -> None:
        """Adds the experts' input of a layer, [T, H], if the step only decodes."""
        if self.decode is not None:
            return
        if self.hidden is None:
            self.hidden = np.empty((len(self.ids), len(hidden), self._geometry.hidden), np.float32)
        self.hidden[layer] = hidden.float().numpy(force=True)

    def prefill_only(self, ids: IntArray, group: TokenGroups) -> BoolArray | None:
        """Returns a mask of the group's experts that only prefill needs, [n]; None if the step only decodes."""
        if self.decode is None:
            return None
        return ~np.isin(group.experts, ids[self.decode])

    @property
    def elapsed_s(self) -> float:
        """Returns the time since the step's begin."""
        return self._clock() - self._began_s

    def routing(self) -> StepRouting:
        """Returns the whole step, which ends now."""
        return StepRouting(
            meta=self.meta,
            ids=self.ids,
            weights=self.weights,
            hints=self.hints,
            step_s=self.elapsed_s,
            stall_s=self.stall_s,
            hidden=self.hidden,
        )


# --- prefetch requests ---

NOBODY: IntArray = np.empty(0, np.int64)
TIERS, NEAR = tuple(Tier), PrefetchPriority.NEAR  # to ask an enumeration for a member takes a while


class PrefetchRequester:
    """Requests prefetches of the experts that are likely to be needed, and withdraws them. Compute thread only."""

    def __init__(self, residency: Residency, loader: ExpertLoader, top_k: int) -> None:
        self._residency, self._loader = residency, loader
        self._ahead = GateLookAhead(residency, top_k)
        self._fuse_chances, self._fastest = residency.policy.fuse_chances, residency.fastest
        self._requested: dict[PrefetchPriority, int] = {}  # priorities with prefetch requests, and the layer of these

    def demand(self, layer: int, chosen: IntArray) -> None:
        """Learns from the routing of a layer [T, k], and cancels the requests for layers up to it."""
        self._ahead.learn(layer, chosen)
        if self._requested:
            self._drop(layer)

    def on_hint(self, layer: int, probs: FloatArray) -> None:
        """Learns from a hint [T, E], and requests the missing experts that it makes likely, the likeliest first."""
        moves: list[Move] = []
        if (likely := self._ahead.likely_experts(layer, probs)) is not None:
            missing = self._ahead.missing(*self._fuse_chances(layer, *likely))
            fastest = self._fastest
            moves = [
                Move(ExpertId(layer, expert), TIERS[tier], fastest, utility, chance)
                for expert, tier, chance, utility in missing
            ]
        self._request(layer, moves, NEAR)

    def replace(self, layer: int, experts: IntArray, priority: PrefetchPriority) -> None:
        """Replaces the requests of one priority by the missing ones of `experts` [n], all of them certain."""
        tiers = zip(experts.tolist(), self._residency.tiers_of(layer, experts).tolist(), strict=True)
        moves = [
            Move(ExpertId(layer, expert), TIERS[tier], self._fastest, ALWAYS)
            for expert, tier in tiers
            if tier != self._fastest
        ]
        self._request(layer, moves, priority)

    def _request(self, layer: int, moves: list[Move], priority: PrefetchPriority) -> None:
        """Replaces the requests of one priority, if there is any, before or now."""
        if moves or priority in self._requested:
            self._loader.prefetch(moves, priority)
            self._requested.pop(priority, None)
            if moves:
                self._requested[priority] = layer

    def _drop(self, layer: int) -> None:
        """Cancels prefetch requests for layers that have started."""
        for priority in [priority for priority, requested in self._requested.items() if requested <= layer]:
            self._request(layer, [], priority)

"""Connects an engine to other boxes' engines: channels, reports to the front, placement plans."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from edgemoe.cluster.data.answer_checker import AnswerChecker, CheckingMeans
from edgemoe.cluster.data.answer_ledger import AnswerLedger
from edgemoe.cluster.data.data_plane import DataPlane, OwnExperts
from edgemoe.cluster.rpc.keys import load_secret
from edgemoe.config.settings import ClusterSettings
from edgemoe.engine.engine import Engine
from edgemoe.errors import CapacityError
from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.compute.peer_compute import PeerCompute
from edgemoe.experts.tiers.residency_records import ALWAYS
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.ipc.messages import (
    Cancel,
    ChannelsOpened,
    ExpertActivity,
    FetchPrefixKV,
    FromEngine,
    HeldExperts,
    PeerCutOff,
    PeerLinkMeasured,
    PeerList,
    Plan,
    PrefixSignatureRequest,
)
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.ticking import until_tick
from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import ExpertId, Move, Tier
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.peers import RemoteCall
from edgemoe.types.placement import PlacementPlan, pack_bits
from edgemoe.worker.cluster_parts import ClusterParts
from edgemoe.worker.expert_demand import ExpertDemandReporter, PrefixSignatures
from edgemoe.worker.prefill_decode_transfer import PrefixFetches, SharedPrefixes
from edgemoe.worker.stage_parts import StageParts

log = logging.getLogger(__name__)
REPORT_S = 1.0
ACTIVITY_S = 10.0
MOST_PAIRS = 20_000  # or successions
TEXT_CHARS = 256  # of a message's text
FORMER_S = 60.0  # after which other boxes have fetched the former homes of this box
Post = Callable[[FromEngine], None]


class ClusterMember:
    """Owns an engine's channels to other engines. Used on the event loop."""

    def __init__(
        self,
        settings: ClusterSettings,
        boot: str,
        info: ModelInfo,
        engine: Engine,
        tiers: ExpertTiers,
        sharing: ClusterParts,
        post: Post,
    ) -> None:
        """Raises ConfigError for a key that cannot be used."""
        self.plan: PlacementPlan | None = None
        self._digest = ""  # of the plan
        self._settings, self._tiers, self._info, self._post = settings, tiers, info, post
        self._engine = engine
        self.forget_saved: Callable[[], object] = lambda: None  # KV blocks on disk
        self._sharing, self._homes = sharing, 0
        self._adopted_s = float("-inf")
        self._pacer = HomeFetchPacer(settings.migrate_bytes_per_s, info.expert_bytes, time.monotonic())
        sharing.store.yields = self._pacer.is_under_way
        self._kernels = tiers.kernels_for_peers()
        self._host = PeerCompute(tiers.second(self._kernels, deadline_s=settings.call_timeout_s), tiers.on_disk)
        self.plane = DataPlane(
            settings.node,
            boot,
            load_secret(Path(settings.key_file)),
            OwnExperts(
                sharing.model,
                self._holdings,
                self._host,
                sharing.shelf,
                sharing.store,
                SharedPrefixes(engine, info.digest),
                sharing.pieces,
            ),
            timeout_s=settings.call_timeout_s,
        )
        self.checker = AnswerChecker(
            AnswerLedger(tiers.geometry, settings.check_share, random.SystemRandom()),
            settings.check_share,
            CheckingMeans(
                self.plane.server.compute_own,
                self.plane.calls.ask_another,
                lambda layer: tiers.residency.resident_mask()[layer],
                engine.is_idle,
            ),
            self._cut_off,
        )
        if settings.check_share:
            self.plane.calls.on_answer = self._note_answer
        self.demand = ExpertDemandReporter(engine, tiers.experts, post, ended=settings.route == "eldr")
        self._prefix_sums = PrefixSignatures(engine, tiers.geometry.top_k, post)
        self._fetches = PrefixFetches(engine, self.plane.kv_fetcher, post)
        sharing.last_chunks.attach(post, self.demand.signature_of)
        tiers.join(self.plane.calls)
        sharing.lending.join(tiers, self._host)
        self._stages: StageParts | None = None

    def join_stages(self, stages: StageParts) -> None:
        """Serves this box's layers to others, or asks others for theirs. To be called before `listen`."""
        self._stages = stages
        stages.join(self._info.digest, self._settings, self._engine, self.plane)

    def listen(self) -> None:
        """Opens the channels and posts their ports. Raises PeerRefused where an address cannot be used."""
        host = self._settings.listen.rpartition(":")[0] or "0.0.0.0"
        calls, bulk = self.plane.bind(host.strip("[]"), self._settings.calls_port, self._settings.bulk_port)
        self._post(ChannelsOpened(calls_port=calls, bulk_port=bulk, model=self._info))

    async def run(self) -> None:
        """Serves peers, reports to the front and fetches homes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.plane.run())
            group.create_task(self._fetches.run())
            group.create_task(self.checker.run())
            group.create_task(self._prefix_sums.run())
            if self._settings.route in ("pull", "eldr"):
                group.create_task(self.demand.run())
            group.create_task(self._report())
            group.create_task(self._keep_homes())
            group.create_task(self._report_activity())

    def close(self) -> None:
        """Frees sockets, threads and kernels. Call it after `run` has ended and before the tiers are closed."""
        self.plane.close()
        if self._kernels is not None:
            self._kernels.close()

    def on_message(self, message: PeerList | Plan | FetchPrefixKV | PrefixSignatureRequest | Cancel) -> None:
        """Handles a message of the front."""
        match message:
            case PeerList():
                self.plane.set_peers(message.keys, message.engines)
                self._fetches.trusted = frozenset(message.trusted)
                for node in message.suspected:
                    self.checker.ledger.suspect(node)
            case Plan():
                self._adopt(message)
            case FetchPrefixKV():
                self._fetches.start(message)
            case PrefixSignatureRequest():
                self._prefix_sums.ask(message)
            case Cancel():
                self._fetches.cancel(message.request, message.attempt)

    def metrics(self) -> dict[str, float]:
        """Returns numbers for /metrics by their final names."""
        server, sharing, remote = self.plane.server, self._sharing, self._tiers.experts.remote
        assert remote is not None
        here = sum(self._tiers.residency.served) - self._host.experts
        values: dict[str, float] = {
            names.REMOTE_EXPERTS: remote.experts,
            named(names.REMOTE_RETRIES, why="late"): remote.hedged,
            named(names.REMOTE_RETRIES, why="failed"): remote.redone,
            names.REMOTE_STALL_SECONDS: remote.stall_s,
            names.LOCAL_RATIO: here / max(1, here + remote.experts),
            names.SERVED_CALLS: server.served,
            names.SERVED_BATCHES: server.batches,
            names.SERVED_SHED: server.shed,
            names.SERVED_SECONDS: server.busy_s,
            names.EXPERTS_FETCHED: sharing.store.fetched,
            names.EXPERTS_REFUSED: sharing.store.refused,
            names.BULK_SENT_BYTES: self.plane.bulk.sent_bytes + self.plane.pieces.sent_bytes,
            names.ANSWER_CHECKS_DROPPED: self.checker.ledger.dropped,
            names.ANSWER_CHECK_SECONDS: self.checker.seconds,
            names.OWN_ANSWERS_WRONG: self.checker.own_errors,
            names.HOME_EXPERTS: self._homes,
            names.MEMORY_LENT: float(self._sharing.lending.choice.lends),
            names.MEMORY_RATIO: self._sharing.lending.choice.ratio,
            names.HOME_MISSING: len(self._tiers.residency.homes.missing()),
        }
        values |= self._fetches.metrics() | {names.KV_SERVED_BYTES: self.plane.kv.sent_bytes}
        if self._stages is not None:
            values |= self._stages.metrics()
        for tokens, choice in remote.choices.items():
            values[named(names.REMOTE_GAIN, tokens=tokens)] = choice.gain
            for plan, used in zip(("alone", "helped"), choice.used, strict=True):
                values[named(names.REMOTE_PLANS, tokens=tokens, plan=plan)] = used
        for node, record in self.checker.ledger.records.items():
            values[named(names.ANSWERS_CHECKED, peer=node, found="right")] = record.right
            values[named(names.ANSWERS_CHECKED, peer=node, found="wrong")] = record.wrong
        for peer in self.plane.calls.peers.values():
            values[named(names.REMOTE_CALLS, peer=peer.node)] = peer.calls
            values[named(names.REMOTE_FAILURES, peer=peer.node)] = peer.failures
            values[named(names.REMOTE_SECONDS, peer=peer.node)] = peer.busy_s
            if peer.reachable:
                values[named(names.PEER_LATENCY, peer=peer.node)] = peer.latency_s
                values[named(names.PEER_RATE, peer=peer.node)] = 1 / peer.s_per_byte
        return values

    def _note_answer(self, call: RemoteCall) -> None:
        assert call.result is not None
        self.checker.ledger.note(call.node, call.work, call.result)

    def _cut_off(self, node: str, why: str) -> None:
        """Ends all exchange with a box whose answers were wrong, tells the front, and has KV blocks computed again."""
        log.error("a box is cut off: its answers are wrong", extra={"peer": node, "why": why})
        self.plane.calls.cut(node)
        self._engine.compute_again()
        if self._stages is not None and self._stages.host is not None:
            self._stages.host.close()
        self.forget_saved()
        self._post(PeerCutOff(node=node, why=why[:TEXT_CHARS]))

    def _adopt(self, message: Plan) -> None:
        """Follows a plan. Refuses one that cannot be followed, and then the last one stays.

        A plan that does not name this box leaves its pinned experts as they are.
        """
        plan, node = message.plan, self._settings.node
        model = (plan.model, plan.layers, plan.experts)
        fields = {"epoch": plan.epoch, "version": plan.version}
        try:
            if model != (self._info.digest, self._info.layers, self._info.experts):
                raise CapacityError("it is a plan for another model")
            if node in plan.nodes:
                self._pin_homes(plan, plan.homes_of(node))
        except (CapacityError, ValueError) as error:
            log.error("plan refused", extra={**fields, "why": str(error)})
            return
        self.plan, self._digest, self._adopted_s = plan, message.digest, time.monotonic()
        log.info("plan adopted", extra={**fields, "homes": self._homes})
        self._fetch_homes()

    def _pin_homes(self, plan: PlacementPlan, homes: BoolArray) -> None:
        """Pins these experts [L, E], and no others. Raises CapacityError."""
        owner = self._tiers.residency.homes
        before = owner.in_ram()
        owner.set_homes(homes)
        self._homes = int(homes.sum())
        self._pacer.on_plan_adopted(plan, self._settings.node, first=self.plan is None)
        if (dropped := before & ~homes).any():
            log.debug("pins dropped", extra={"version": plan.version, "experts": pack_bits(dropped).hex()})

    def _fetch_homes(self) -> bool:
        """Requests the homes that are not in RAM, as many as may come now, in place of earlier such requests.

        Returns whether some may not.
        """
        missing = self._tiers.residency.homes.missing()
        rates = [1 / peer.s_per_byte for peer in self.plane.calls.peers.values() if peer.reachable]
        granted = self._pacer.next_fetches(missing, time.monotonic(), sum(rates) / max(1, len(rates)))
        self._tiers.loader.prefetch(
            (Move(expert, Tier.NVME, Tier.RAM, ALWAYS) for expert in granted), PrefetchPriority.HOME
        )
        return len(granted) < len(missing)

    async def _keep_homes(self) -> None:
        """Fetches the homes that are not in RAM, in turns."""
        while True:
            held_back = self._fetch_homes()
            await asyncio.sleep(TURN_S if held_back else REPORT_S)

    def _holdings(self) -> tuple[BoolArray, BoolArray]:
        return self._tiers.residency.resident_mask(), self._tiers.on_disk

    async def _report(self) -> None:
        """Posts the experts held here on change, and the measured links, to the front."""
        announced: HeldExperts | None = None
        while True:
            await self._sharing.growth.poll(self._tiers.on_disk)
            # other experts in RAM may be evicted at any time, so plans cannot rely on them
            ram, disk = self._tiers.residency.homes.in_ram(), self._tiers.on_disk
            self._sharing.lending.settled = not self._tiers.residency.homes.missing()
            rooms = self._sharing.lending.rooms(self._tiers.residency.homes.capacities)
            holds = HeldExperts(
                disk=pack_bits(disk), ram=pack_bits(ram), budget_experts=sum(rooms), plan=self._digest, rooms=rooms
            )
            if holds != announced:
                announced = holds
                log.debug("pins", extra={"by": self._digest, "experts": holds.ram.hex()})
                self._post(holds)
            for peer in self.plane.calls.peers.values():
                if peer.reachable:
                    seen = PeerLinkMeasured(
                        node=peer.node,
                        boot=peer.boot,
                        latency_s=peer.latency_s,
                        bytes_per_s=1 / peer.s_per_byte,
                        unit_s=peer.computing.at(time.monotonic()) if peer.calls else 0.0,
                    )
                    self._post(seen)
            over = time.monotonic() - self._adopted_s > FORMER_S or self._sharing.lending.keeps_memory
            if over and self._sharing.lending.settled:
                self._tiers.residency.homes.forget_former()
                self._adopted_s = float("inf")
            await asyncio.sleep(until_tick(REPORT_S))

    async def _report_activity(self) -> None:
        """Posts the experts chosen by this engine's own requests to the front, every ten seconds."""
        while True:
            shares = await asyncio.to_thread(self._sharing.activity.shares, MOST_PAIRS)
            resident = pack_bits(self._tiers.residency.resident_mask())
            self._post(
                ExpertActivity(
                    tokens=shares.tokens,
                    chosen=shares.chosen.tobytes(),
                    pairs=shares.pairs.tobytes(),
                    resident=resident,
                    passed=shares.passed.tobytes(),
                    steps=self._sharing.activity.steps,
                    tokens_per_s=shares.tokens_per_s,
                    computed=shares.computed.tobytes(),
                    steps_per_token=shares.steps_per_token,
                )
            )
            await asyncio.sleep(ACTIVITY_S)


TURN_S = 0.1  # between turns while something is held back
LINK_SHARE = 0.125  # of the links' rate, that migrations may use
LONGEST_S = 10.0  # that an expert's bytes are saved up for, however slow the links


class HomeFetchPacer:
    """Limits the rate at which a migration fetches homes that other boxes have too.

    Such experts can wait, and calls between boxes go first: they come evenly, in a small part of the links' rate.
    """

    def __init__(self, bytes_per_s: float, expert_bytes: int, now_s: float) -> None:
        """Holds nothing back where `bytes_per_s` is 0."""
        self._rate, self._bytes = bytes_per_s, expert_bytes
        self._credit, self._since_s = 0.0, now_s
        self._granted: set[ExpertId] = set()
        self._elsewhere: BoolArray | None = None  # [L, E] at home at other boxes too; None: all is fetched at once

    def on_plan_adopted(self, plan: PlacementPlan, node: str, *, first: bool) -> None:
        """Adopts a plan. Homes of the `first` plan since the start are all fetched at once."""
        others = [plan.homes_of(other) for other in plan.nodes if other != node]
        self._elsewhere = np.logical_or.reduce(others) if others and not first else None

    def is_under_way(self, expert: ExpertId) -> bool:
        """Returns whether this migrated home is being fetched."""
        return expert in self._granted

    def next_fetches(self, missing: Sequence[ExpertId], now_s: float, link_bytes_per_s: float) -> list[ExpertId]:
        """Returns the missing homes to fetch now: all that no other box has, the others as the rate allows."""
        if self._elsewhere is None or not self._rate:
            self._granted = set()
            return list(missing)
        arrived = len(self._granted.difference(missing))
        rate = min(self._rate, max(LINK_SHARE * link_bytes_per_s, self._bytes / LONGEST_S))
        most = max(rate * TURN_S, float(self._bytes))
        gained = rate * (now_s - self._since_s)
        self._credit = min(self._credit - arrived * self._bytes + gained, most)
        self._since_s = now_s
        urgent = [one for one in missing if not self._elsewhere[one]]
        moved = [one for one in missing if self._elsewhere[one]]
        granted = moved[: max(0, int(self._credit // self._bytes))]
        self._granted = set(granted)
        return urgent + granted

"""This front's own engine: the way to it, and what it has said of itself, put for the other boxes."""

from __future__ import annotations

import functools
import logging
import operator
import re
from collections.abc import Container, Iterable

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.messages import BoxReport, EngineDescription, LinkReport, StoreLocationReply
from edgemoe.errors import PeerBusy, PeerOutdated, PeerRefused, WireError
from edgemoe.front.engine_process import EngineProcess
from edgemoe.ipc.engine_socket import FrontEnd
from edgemoe.ipc.messages import ChannelsOpened, ExpertActivity, HeldExperts, PeerLinkMeasured, ToEngine
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)


class EngineConnection:
    """Hands messages to `engine`, which the supervisor replaces; None while there is none."""

    def __init__(self, wire: FrontEnd) -> None:
        self.wire = wire
        self.engine: EngineProcess | None = None

    @property
    def place(self) -> str:
        """Returns the engine's name as a place for requests; "" while it takes none."""
        return self.engine.boot_id if self.engine is not None and self.engine.serving else ""

    def send(self, message: ToEngine) -> bool:
        """Hands a message to the engine; false where none takes requests."""
        return self.engine is not None and self.engine.serving and self.tell(message)

    def tell(self, message: ToEngine) -> bool:
        """Hands a message to the engine, ready or not; false where there is none."""
        if self.engine is None or self.engine.process.returncode is not None:
            return False
        try:
            self.wire.send(self.engine.boot_id, message)
        except (WireError, PeerOutdated) as error:
            log.warning("a message did not reach the engine", extra={"error": str(error)})
            return False
        return True


class EngineTracker:
    """The incarnation that spoke last; nothing is known of it until it listens."""

    def __init__(self) -> None:
        self.boot = ""
        self.listening: ChannelsOpened | None = None
        self.holds: HeldExperts | None = None
        self.seen: dict[str, PeerLinkMeasured] = {}  # its links to other engines, by node
        self.activity: ExpertActivity | None = None

    def listens(self, boot: str, listening: ChannelsOpened) -> None:
        """Takes note of an incarnation that has opened its channels."""
        self.boot, self.listening, self.holds, self.activity = boot, listening, None, None

    def store_at(self, store: str, *, shared: bool) -> StoreLocationReply:
        """Returns where the pieces of the store in that folder are to be had. Raises PeerBusy, PeerRefused."""
        if not shared:
            raise PeerRefused("this box shares nothing (cluster.share_experts)")
        if self.listening is None:
            raise PeerBusy("the engine here is still starting; try again in a moment")
        model, name = self.listening.model, re.sub(r"[^A-Za-z0-9_.-]+", "-", store).lstrip(".-") or "store"
        return StoreLocationReply(
            bulk_port=self.listening.bulk_port, model=model.digest, name=model.id[:256], store=name[:255]
        )

    def ended(self) -> None:
        """Forgets what one that has ended held."""
        self.boot, self.listening, self.holds, self.activity = "", None, None, None
        self.seen.clear()

    def keep_links(self, nodes: Container[str]) -> None:
        """Forgets its links to all other boxes."""
        self.seen = {node: seen for node, seen in self.seen.items() if node in nodes}

    def card(self, shares: bool) -> EngineDescription | None:
        """Returns what the others are told of it; None until it has said where it listens and what it holds."""
        if (ports := self.listening) is None or (holds := self.holds) is None:
            return None
        model = ports.model
        return EngineDescription(
            boot=self.boot,
            calls_port=ports.calls_port,
            bulk_port=ports.bulk_port,
            model=model.digest,
            layers=model.layers,
            experts=model.experts,
            expert_bytes=model.expert_bytes,
            budget_experts=holds.budget_experts,
            disk=holds.disk,
            ram=holds.ram,
            shares=shares,
            layer_experts=model.layer_experts,
            encodings=model.encodings,
            plan=holds.plan,
            layer_bytes=model.layer_bytes,
            rooms=holds.rooms,
        )

    def report(self) -> BoxReport | None:
        """Returns what the leader is told of it; None until it has said what its requests choose."""
        if (listening := self.listening) is None or (activity := self.activity) is None:
            return None
        links = [LinkReport(seen.node, seen.latency_s, seen.bytes_per_s, seen.unit_s) for seen in self.seen.values()]
        return BoxReport(
            model=listening.model.digest,
            tokens=activity.tokens,
            chosen=activity.chosen,
            pairs=activity.pairs,
            resident=activity.resident,
            links=tuple(links[:MAX_NODES]),
            passed=activity.passed,
            steps=activity.steps,
            tokens_per_s=activity.tokens_per_s,
            computed=activity.computed,
            steps_per_token=activity.steps_per_token,
        )


def is_handed_over(plane: ControlPlane) -> bool:
    """Returns whether the boxes that stay hold every expert that ours holds, or there is none."""
    members = plane.state.members
    announced = [m.announcement for m in members if m.announcement is not None and members.is_alive(m.peer.node)]
    return all_held(plane.announcement.engine, [each.engine for each in announced if not each.leaving])


def all_held(ours: EngineDescription | None, others: Iterable[EngineDescription | None]) -> bool:
    """Returns whether others' engines hold every expert that ours holds, or there is no other to hold any."""
    cards = list(others)
    there = functools.reduce(operator.or_, map(_experts, cards), 0)
    return not any(cards) or not _experts(ours) & ~there


def _experts(engine: EngineDescription | None) -> int:
    """Those that an engine can hand out, as bits."""
    return 0 if engine is None else int.from_bytes(engine.disk, "little") | int.from_bytes(engine.ram, "little")

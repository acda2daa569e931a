"""Sends messages to this box's engine, and describes the engine to the other boxes."""

from __future__ import annotations

import functools
import logging
import operator
import re
from collections.abc import Container, Iterable

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.messages import BoxReport, ChannelDescription, LinkReport, StoreLocationReply
from edgemoe.errors import PeerBusy, PeerRefused
from edgemoe.ipc.messages import ChannelsOpened, ExpertActivity, HeldExperts, PeerLinkMeasured
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)


class LocalEngine:
    """Tracks the present incarnation of the engine from its messages."""

    def __init__(self) -> None:
        self.boot = ""
        self.listening: ChannelsOpened | None = None
        self.holds: HeldExperts | None = None
        self.seen: dict[str, PeerLinkMeasured] = {}  # links to other engines, by node
        self.activity: ExpertActivity | None = None

    def on_channels_opened(self, boot: str, listening: ChannelsOpened) -> None:
        """Starts to track an incarnation that has opened its channels."""
        self.boot, self.listening, self.holds, self.activity = boot, listening, None, None

    def store_at(self, store: str, *, shared: bool) -> StoreLocationReply:
        """Returns the address and name of this box's store for copying. Raises PeerBusy, PeerRefused."""
        if not shared:
            raise PeerRefused("this box shares nothing (cluster.share_experts)")
        if self.listening is None:
            raise PeerBusy("the engine here is still starting; try again in a moment")
        model, name = self.listening.model, re.sub(r"[^A-Za-z0-9_.-]+", "-", store).lstrip(".-") or "store"
        return StoreLocationReply(
            bulk_port=self.listening.bulk_port, model=model.digest, name=model.id[:256], store=name[:255]
        )

    def on_engine_ended(self) -> None:
        """Forgets an incarnation that has ended."""
        self.boot, self.listening, self.holds, self.activity = "", None, None, None
        self.seen.clear()

    def keep_links(self, nodes: Container[str]) -> None:
        """Forgets the links to all boxes but these."""
        self.seen = {node: seen for node, seen in self.seen.items() if node in nodes}

    def description(self, shares: bool) -> ChannelDescription | None:
        """Returns the engine's description; None until its channels and its held experts are known."""
        if (ports := self.listening) is None or (holds := self.holds) is None:
            return None
        model = ports.model
        return ChannelDescription(
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
        """Returns the report to the leader; None before the engine's first ExpertActivity."""
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
    """Returns whether the staying boxes hold all experts of this box, or there are no such boxes."""
    members = plane.state.members
    announced = [m.announcement for m in members if m.announcement is not None and members.is_alive(m.peer.node)]
    return all_held(plane.announcement.engine, [each.engine for each in announced if not each.leaving])


def all_held(ours: ChannelDescription | None, others: Iterable[ChannelDescription | None]) -> bool:
    """Returns whether the other engines hold all experts of ours, or there is no other engine."""
    cards = list(others)
    there = functools.reduce(operator.or_, map(_experts, cards), 0)
    return not any(cards) or not _experts(ours) & ~there


def _experts(engine: ChannelDescription | None) -> int:
    """Returns the experts that an engine holds, as bits."""
    return 0 if engine is None else int.from_bytes(engine.disk, "little") | int.from_bytes(engine.ram, "little")

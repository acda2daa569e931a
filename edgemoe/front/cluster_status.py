"""Describes the cluster for /health, /metrics and `edgemoe status --cluster`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.etcd_member import EtcdMember
from edgemoe.cluster.control.membership import ClusterMembers, Member
from edgemoe.cluster.control.messages import Announce, ChannelDescription
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.front.hosted_requests import HostedRequests
from edgemoe.front.request_state import RequestStateMachine
from edgemoe.ipc.messages import PeerLinkMeasured
from edgemoe.policy.routing.least_loaded import TargetLoad
from edgemoe.telemetry import metrics as names
from edgemoe.types.json_object import Json
from edgemoe.types.placement import PlacementPlan
from edgemoe.types.stages import parse_stages

State = Literal["here", "gone", "leaving", "refused"]
STATES: tuple[State, ...] = ("here", "gone", "leaving", "refused")


def state_of(members: ClusterMembers, member: Member) -> State:
    """Returns the state of another box."""
    if member.refusal and (member.up or not member.was_heard):  # else it has gone meanwhile
        return "refused"
    if not members.is_alive(member.peer.node):
        return "gone"
    return "leaving" if member.announcement is not None and member.announcement.leaving else "here"


def describe(plane: ControlPlane, seen: Mapping[str, PeerLinkMeasured], load: TargetLoad | None) -> dict[str, Any]:
    """Returns the body for /health. `seen` has the engine's links by node; `load` is this engine's."""
    plan, ref = plane.state.plans.plan, plane.state.plans.ref
    digest = ref.digest if ref is not None else ""
    return {
        "node": plane.state.node,
        "leader": plane.leader,
        "epoch": plane.state.fence.highest,
        "stale_leaders": plane.state.leader_tracker.stale,
        "unentitled_beats": plane.state.leader_tracker.unentitled_beats,
        "plan": None if plan is None else _plan(plan, digest),
        "trouble": plane.blocker,
        "double": plane.state.incarnations.why_self(),
        "etcd": None if plane.etcd is None else _etcd(plane.etcd),
        "members": [
            _box(plane.state.node, "here", plane.announcement, plane.state.plans)
            | {"requests": load.requests if load is not None else 0},
            *(_member(plane, member, seen.get(member.peer.node)) for member in plane.state.members),
        ],
    }


def list_stages(stages: str, members: Sequence[Json], stats: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns the boxes that hold a part of the layers, as `stages` says; `stats` are the engine's.

    `answers` is None where this box does not know: only the one with the first stage asks the others.
    """
    states = {member["node"]: member["state"] for member in members}
    return [
        {
            "node": stage.node,
            "first": stage.first,
            "last": stage.after - 1,
            "state": states.get(stage.node, "unknown"),
            "dense_bytes": int(stats.get(names.named(names.STAGE_DENSE_BYTES, peer=stage.node), 0.0)),
            "answers": None if answered is None else bool(answered),
        }
        for stage in (parse_stages(stages) if stages else ())
        for answered in [stats.get(names.named(names.STAGE_OPEN, peer=stage.node))]
    ]


def list_members(plane: ControlPlane, voting: Sequence[str] | None) -> dict[str, Any]:
    """Returns the boxes of the cluster; `voting` are the nodes that vote in etcd, None while no voter answers."""
    state = plane.state
    roster = state.roster
    own = (state.node, plane.announcement.address, (plane.key,))
    others = [(member.peer.node, member.address, member.peer.keys) for member in state.members]
    boxes = [(box.node, box.address, box.keys) for box in roster.boxes] if roster is not None else [own, *others]
    rows = [
        {
            "node": node,
            "address": address,
            "keys": list(keys),
            "state": _standing(plane, node),
            "vote": _vote(node in state.voters, voting is None or node in voting, is_known=voting is not None),
        }
        for node, address, keys in sorted(boxes)
    ]
    return {
        "node": state.node,
        "cluster": roster.cluster if roster is not None else "",
        "version": roster.version if roster is not None else 0,
        "leader": plane.leader,
        "has_majority": voting is not None,
        "trouble": plane.state.incarnations.why_self() or plane.blocker,
        "boxes": rows,
        "invited": [{"node": each.node, "until_s": each.until_s} for each in roster.invited] if roster else [],
    }


def _vote(is_voter: bool, votes: bool, *, is_known: bool) -> str:
    if not is_voter:
        return "no"
    if not is_known:
        return "unknown"
    return "yes" if votes else "catching up"


def _standing(plane: ControlPlane, node: str) -> str:
    members = plane.state.members
    if node == plane.state.node:
        return "this box"
    return state_of(members, members[node]) if node in members else "gone"


def metrics(
    plane: ControlPlane, requests: RequestStateMachine, hosted_requests: HostedRequests, forecast: Mapping[str, int]
) -> dict[str, float]:
    """Returns the cluster's metrics by their final names."""
    state, queue, fitting = plane.state, plane.desk.queue, plane.desk.fitting
    clusters = fitting.fitted if fitting is not None else None
    plan = state.plans.plan
    states = [state_of(state.members, member) for member in state.members]
    return {
        names.CLUSTER_EPOCH: state.fence.highest,
        names.CLUSTER_LEADING: float(plane.leading > 0),
        names.CLUSTER_PLAN: plan.version if plan is not None else 0,
        names.CLUSTER_STALE: state.leader_tracker.stale,
        names.FORWARDED: sum(count for (to, _), count in requests.routed.items() if to == "elsewhere"),
        names.FORGOTTEN: requests.forgotten,
        **{names.named(names.EVADED, why=why): requests.evaded[why] for why in ("still", "slow")},
        names.HANDED_OVER: requests.moved,
        names.HOSTED_REQUESTS: len(hosted_requests),
        names.HOSTED_REQUESTS_TOTAL: hosted_requests.served,
        names.OFFERED: requests.offered,
        names.GRANTED: requests.granted,
        **{names.named(names.OFFERS_FORECAST, by=by): count for by, count in forecast.items()},
        names.OFFERS_OPEN: requests.count_offered(),
        names.OFFER_QUEUE: len(queue),
        names.OFFER_QUEUE_GRANTED: queue.granted,
        names.EXPERT_CLUSTERS: len(clusters.slots) if clusters is not None else 0,
        names.EXPERT_CLUSTER_REQUESTS: clusters.requests if clusters is not None else 0,
        names.EXPERT_CLUSTER_FITS: fitting.fits if fitting is not None else 0,
        **{names.named(names.ROUTED, to=to, why=why): count for (to, why), count in requests.routed.items()},
        **{names.named(names.CLUSTER_BOXES, state=each): states.count(each) for each in STATES},
        **({} if plane.etcd is None else _etcd_metrics(plane.etcd)),
    }


def _etcd(member: EtcdMember) -> dict[str, Any]:
    return {
        "healthy": member.is_healthy,
        "starts": member.process.starts,
        "resident_bytes": member.resident_bytes,
        "fsyncs": member.fsyncs,
    }


def _etcd_metrics(member: EtcdMember) -> dict[str, float]:
    return {
        names.ETCD_HEALTHY: float(member.is_healthy),
        names.ETCD_STARTS: member.process.starts,
        names.ETCD_RESIDENT: member.resident_bytes,
        names.ETCD_FSYNCS: member.fsyncs,
    }


def _plan(plan: PlacementPlan, digest: str) -> dict[str, Any]:
    on_disk = int(plan.disk_homes.any(axis=0).sum())
    return {
        "version": plan.version,
        "epoch": plan.epoch,
        "digest": digest,
        "policy": plan.policy,
        "on_disk_only": on_disk,
    }


def _member(plane: ControlPlane, member: Member, link: PeerLinkMeasured | None) -> dict[str, Any]:
    node = member.peer.node
    return _box(node, state_of(plane.state.members, member), member.announcement, plane.state.plans) | {
        "address": member.peer.address or (member.announcement.address if member.announcement else ""),
        "why": member.refusal or plane.state.incarnations.finding(node),
        "gone_s": plane.state.members.absent_s(node),
        "requests": member.beat.requests,
        "latency_s": link.latency_s if link is not None else None,
        "bytes_per_s": link.bytes_per_s if link is not None else None,
    }


def _box(node: str, state: State, card: Announce | None, plans: PlanStore) -> dict[str, Any]:
    engine, plan = card.engine if card is not None else None, plans.plan
    return _moves(node, engine, plans) | {
        "node": node,
        "state": state,
        "role": card.role if card is not None else "",
        "models": list(card.models) if card is not None else [],
        "serves": card.serves if card is not None else "both",
        "release": card.release if card is not None else "",
        "address": card.address if card is not None else "",
        "devices": list(card.devices) if card is not None else [],
        "ram_bytes": card.ram_bytes if card is not None else 0,
        "engine": engine.boot if engine is not None else "",
        "model": engine.model if engine is not None else "",
        "encodings": list(engine.encodings) if engine is not None else [],
        "homes": int(plan.homes_of(node).sum()) if plan is not None else 0,
        "room": engine.budget_experts if engine is not None else 0,
        "in_ram": int.from_bytes(engine.ram, "little").bit_count() if engine is not None else 0,
        "on_disk": int.from_bytes(engine.disk, "little").bit_count() if engine is not None else 0,
    }


def _moves(node: str, engine: ChannelDescription | None, plans: PlanStore) -> dict[str, int]:
    """Counts the experts that the box must still pin, and the experts that it will give up for them."""
    plan, ref = plans.plan, plans.ref
    if plan is None or ref is None or node not in plan.nodes:
        return {"to_come": 0, "to_go": 0}
    at = plan.nodes.index(node)
    homes = int.from_bytes(plan.homes[at], "little")
    goal = int.from_bytes(plan.goal[at], "little") if plan.goal else homes
    pinned = int.from_bytes(engine.ram, "little") if engine is not None and engine.plan == ref.digest else 0
    return {"to_come": (goal & ~pinned).bit_count(), "to_go": (homes & ~goal).bit_count()}

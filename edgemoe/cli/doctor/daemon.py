"""Looks at the running daemon, its unit, and the other boxes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import edgemoe
from edgemoe.cli import systemd_units
from edgemoe.cli.client import Client
from edgemoe.cli.doctor.remedies import Finding, State
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import EdgemoeError
from edgemoe.front.peers_list import listed
from edgemoe.types.arrays import Json
from edgemoe.types.model_info import loading_text

REACH_S = 2.0
NEAR_S, FAR_S = 1.0, 60.0  # by how much two boxes' clocks may be apart


def daemon(path: Path) -> tuple[list[Finding], Json]:
    """Returns whether a daemon answers, and its /health; {} where none does."""
    try:
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(REACH_S)
            knocking.connect(str(path))
    except PermissionError:
        return [Finding("permission", "failure", f"you may not use {path}")], {}
    except OSError:
        return [Finding("daemon", "warning", f"none answers at {path}")], {}
    try:
        with Client(path) as client:
            health: Json = json.loads(client.text("/health", accept_unavailable=True))
            release = str(json.loads(client.text("/version"))["version"])
            reached = json.loads(client.text("/reach"))["boxes"] if health.get("cluster") else []
    except (EdgemoeError, ValueError, KeyError) as error:
        return [Finding("daemon", "failure", str(error))], {}
    return [*_described(health, release, path), *neighbours(reached)], health


def _described(health: Json, release: str, path: Path) -> Iterator[Finding]:
    status, engine = str(health.get("status")), health.get("engine") or {}
    state: State = "pass" if status == "ready" else "failure" if status == "failed" else "warning"
    model = (health.get("model") or {}).get("id", "a model")
    loading = health.get("loading")
    so_far = f" ({loading_text(loading)})" if loading else ""
    yield Finding("daemon", state, f"{model} is {status}{so_far} at {path}")
    if failure := health.get("cannot_start"):
        yield Finding("engine", "failure", failure["reason"])
    elif engine.get("starts", 1) > 1:
        why = f"the engine has been started {engine['starts']} times; it last ended: {engine.get('last_end')}"
        yield Finding("daemon", "warning", why)
    if release != edgemoe.__version__:
        said = f"the daemon is {release}, this command {edgemoe.__version__}: restart the daemon"
        yield Finding("versions", "warning", said)


def neighbours(boxes: list[Json]) -> Iterator[Finding]:
    """What the daemon and those of the other boxes found of each other's ports and clocks."""
    for each in boxes:
        node = each["node"]
        if why := each.get("why"):
            yield Finding("ports", "warning", f"{node} does not say what it reaches: {why}")
        dead = [f"{node}'s {lane} port is not reached from here" for lane in each["from_here"]]
        dead += [f"our {lane} port is not reached from {node}" for lane in each.get("from_there", ())]
        if dead:
            yield Finding("ports", "failure", "; ".join(dead))
        elif not why:
            yield Finding("ports", "pass", f"{node}: control, calls and bulk, in both directions")
        if "ahead_s" in each:
            yield _clock(node, float(each["ahead_s"]), float(each["within_s"]))


def _clock(node: str, ahead_s: float, within_s: float) -> Finding:
    apart_s = max(0.0, abs(ahead_s) - within_s)
    state: State = "failure" if apart_s > FAR_S else "warning" if apart_s > NEAR_S else "pass"
    which = "ahead of" if ahead_s > 0 else "behind"
    return Finding("clock", state, f"{node}'s is {abs(ahead_s):,.3f} s {which} ours, give or take {within_s:,.3f} s")


def unit() -> Iterator[Finding]:
    """The service, where it is installed."""
    rows = dict(systemd_units.status())
    if not systemd_units.is_installed():
        yield Finding("unit", "pass", "not installed as a service")
        return
    said = ", ".join(f"{thing} {state}" for thing, state in rows.items())
    yield Finding("unit", "failure" if "failed" in said else "pass", said)


def boxes(settings: ClusterSettings, health: Json) -> Iterator[Finding]:
    """The list of peers, their ports from here, and whether they are heard; `health` is the daemon's."""
    if not settings.node:
        return
    try:
        peers = listed(settings)
    except EdgemoeError as error:
        yield Finding("peer-list", "failure", str(error))
        return
    yield Finding("peer-list", "pass", f"{settings.node} with {', '.join(sorted(peers)) or 'nobody'}")
    for node, peer in sorted(peers.items()):
        if node != settings.node and peer.address:
            reached = _reaches(peer.address)
            said = f"{node} at {peer.address}" + ("" if reached else " is not reached from here")
            yield Finding("ports", "pass" if reached else "failure", said)
    if cluster := health.get("cluster"):
        yield from members(cluster)


def members(cluster: Json) -> Iterator[Finding]:
    """What the daemon says of the other boxes and of who leads."""
    for member in cluster.get("members", [])[1:]:
        state, why = member.get("state"), member.get("why")
        release = member.get("release")
        said = f"{member.get('node')} is {state}" + (f": {why}" if why else "") + (f", of {release}" if release else "")
        yield Finding("peers", "pass" if state == "here" else "failure", said)
        if release and release != cluster["members"][0].get("release"):
            yield Finding("versions", "warning", f"{member.get('node')} runs {release}: update the older of the boxes")
    leader = cluster.get("leader")
    trouble = cluster.get("trouble")
    said = f"{leader} leads" if leader else "nobody leads; the boxes go on with the last plan"
    yield Finding("leader", "pass" if leader else "failure", said + (f" ({trouble})" if trouble else ""))


def _reaches(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_S):
            return True
    except (OSError, ValueError):
        return False

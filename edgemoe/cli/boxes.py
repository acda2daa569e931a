"""Renders a cluster for `edgemoe status --cluster`: boxes, leader, plan, links, calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgemoe.config.sizes import format_rate
from edgemoe.errors import ServiceError
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import select
from edgemoe.types.arrays import Json

COLOURS = {"here": "green", "leaving": "yellow", "gone": "red", "refused": "red"}


def boxes(health: Json, before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> RenderableType:
    """Returns the tables of a cluster; rates are between the metrics `before` and `after`, `seconds` apart.

    Raises ServiceError where the daemon is in no cluster.
    """
    if (cluster := health.get("cluster")) is None:
        raise ServiceError("this daemon is a box on its own: cluster.node is not set")
    links = _links_table(cluster, before, after, seconds)
    return Group(_heading(cluster), _boxes_table(cluster), "", links, "", _calls(before, after, seconds))


def _heading(cluster: Json) -> Text:
    plan, leader = cluster["plan"], cluster["leader"]
    heading = Text.assemble((leader, "bold"), " leads") if leader else Text.assemble(("nobody leads", "yellow"))
    heading.append(f" in epoch {cluster['epoch']}; {planned(cluster)}\n")
    if plan and plan.get("on_disk_only"):
        heading.append(f"{plan['on_disk_only']} experts have no room in any memory, and are read from disks\n")
    if cluster["trouble"]:
        heading.append(f"No new plan: {cluster['trouble']}\n", "yellow")
    for member in cluster["members"]:
        if why := member.get("why"):
            heading.append(f"{why}\n", "red")
    return heading


def planned(cluster: Json) -> str:
    """Returns which plan is followed, and how much of it is still under way."""
    if not (plan := cluster.get("plan")):
        return "no plan yet"
    policy = f" ({plan['policy']})" if plan.get("policy") else ""
    to_come = sum(member["to_come"] for member in cluster["members"])
    moving = f", {to_come} experts on the way" if to_come else ""
    return f"plan {plan['version']}{policy} of epoch {plan['epoch']}, {plan['digest'][:12]}{moving}"


def _boxes_table(cluster: Json) -> Table:
    table = _columns("Box", "State", "Homes", "Moving", "In RAM", "On disk", "Requests")
    for member in cluster["members"]:
        node = member["node"]
        table.add_row(
            f"{node} (this box)" if node == cluster["node"] else node,
            _state(member),
            f"{member['homes']}",
            _moving(member),
            f"{member['in_ram']}" if member["engine"] else "",
            f"{member['on_disk']}" if member["engine"] else "",
            f"{member['requests']}",
        )
    return table


def _links_table(cluster: Json, before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Table:
    """Returns a table of this box's links and calls to each other box."""
    table = _columns("Link to", "Round trip", "Speed", "Calls/s", "Each")
    for member in cluster["members"]:
        node = member["node"]
        if node == cluster["node"]:
            continue
        calls = select(after, names.REMOTE_CALLS, peer=node) - select(before, names.REMOTE_CALLS, peer=node)
        spent_s = select(after, names.REMOTE_SECONDS, peer=node) - select(before, names.REMOTE_SECONDS, peer=node)
        table.add_row(
            node,
            _milliseconds(member.get("latency_s")),
            format_rate(member["bytes_per_s"]) if member.get("bytes_per_s") else "",
            f"{calls / seconds:,.1f}",
            _milliseconds(spent_s / calls) if calls else "",
        )
    return table


def _columns(first: str, *others: str) -> Table:
    """Returns a table whose headings fit into 80 columns; long names are folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for column in others:
        table.add_column(column, justify="left" if column == "State" else "right", no_wrap=True)
    return table


def _state(member: Json) -> Text:
    state = Text.assemble((member["state"], COLOURS[member["state"]]))
    if member["state"] == "gone":
        return state
    if member["role"] == "witness":
        return state.append(", witness")
    if not member["engine"]:
        return state.append(", no engine")
    return state if member["serves"] == "both" else state.append(f", {member['serves']}")


def _moving(member: Json) -> str:
    """Returns how many homes are still to come, and how many are given up for them."""
    return " ".join(f"{sign}{member[name]}" for sign, name in (("+", "to_come"), ("-", "to_go")) if member[name])


def _calls(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Table:
    def rate(family: str) -> float:
        return (select(after, family) - select(before, family)) / seconds

    rows: dict[str, Any] = {
        "Calls to others": f"{rate(names.REMOTE_CALLS):,.1f} a second, "
        f"{select(after, names.REMOTE_RETRIES):,.0f} tried another way since the start",
        "Calls from others": f"{rate(names.SERVED_CALLS):,.1f} a second, "
        f"{select(after, names.SERVED_SHED):,.0f} sent away since the start",
        "Computed here": f"{select(after, names.LOCAL_RATIO):.1%} of this box's own experts, since the start",
        "Requests": f"{select(after, names.FORWARDED):,.0f} handed on, "
        f"{select(after, names.HOSTED_REQUESTS_TOTAL):,.0f} taken in, "
        f"{select(after, names.HANDED_OVER):,.0f} handed over after prefill",
        "Went": routes(after),
        "Offers": offers(after),
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in rows.items():
        table.add_row(Text(name, "bold"), text)
    return table


def offers(after: Mapping[str, float]) -> str:
    """Returns what became of requests that were offered to the leader, and what waits with it."""
    return (
        f"{select(after, names.OFFERS_OPEN):,.0f} wait for the leader's word, "
        f"{select(after, names.GRANTED):,.0f} of {select(after, names.OFFERED):,.0f} got it; "
        f"{select(after, names.OFFER_QUEUE):,.0f} of all boxes wait here, "
        f"{select(after, names.OFFER_QUEUE_GRANTED):,.0f} were given out{clusters(after)}"
    )


def clusters(after: Mapping[str, float]) -> str:
    """Returns how far the leader's expert clusters are; "" where it has none."""
    if not (engines := select(after, names.EXPERT_CLUSTERS)):
        return ""
    return (
        f", by expert clusters of {engines:,.0f} engines, fitted to "
        f"{select(after, names.EXPERT_CLUSTER_REQUESTS):,.0f} requests"
    )


def routes(after: Mapping[str, float]) -> str:
    """Returns where this box's requests went and why, the commonest first."""
    routes = sorted(((count, name) for name, count in after.items() if name.startswith(names.ROUTED)), reverse=True)
    labels = [(count, dict(re.findall(r'(\w+)="([^"]*)"', name))) for count, name in routes]
    return ", ".join(f"{count:,.0f} {label['to']} ({label['why']})" for count, label in labels) or "none yet"


def _milliseconds(seconds: float | None) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds is not None else ""

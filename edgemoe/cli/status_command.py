"""Runs `edgemoe status`: shows the running daemon, and with --cluster its boxes, by its /health and /metrics."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgemoe.cli.client import Client, socket_of
from edgemoe.cli.model_tables import served_table
from edgemoe.cli.output import console
from edgemoe.config.sizes import format_rate, format_size
from edgemoe.errors import ServiceError
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import select
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import encodings_text, loading_text

COLOURS = {"here": "green", "leaving": "yellow", "gone": "red", "refused": "red"}


def boxes(health: Json, before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> RenderableType:
    """Returns the tables of a cluster; rates are between the metrics `before` and `after`, `seconds` apart.

    Raises ServiceError where the daemon is in no cluster.
    """
    if (cluster := health.get("cluster")) is None:
        raise ServiceError("this daemon is a box on its own: cluster.node is not set")
    links = _links_table(cluster, before, after, seconds)
    stages: list[RenderableType] = [_stages_table(cluster["stages"]), ""] if cluster.get("stages") else []
    calls = _calls(before, after, seconds)
    return Group(_cluster_heading(cluster), _boxes_table(cluster), "", *stages, links, "", calls)


def _cluster_heading(cluster: Json) -> Text:
    plan, leader = cluster["plan"], cluster["leader"]
    heading = Text.assemble((leader, "bold"), " leads") if leader else Text.assemble(("nobody leads", "yellow"))
    heading.append(f" in epoch {cluster['epoch']}; {planned(cluster)}\n")
    if plan and plan.get("on_disk_only"):
        heading.append(f"{plan['on_disk_only']} experts have no room in any memory, and are read from disks\n")
    if etcd := cluster.get("etcd"):
        state = "takes part" if etcd["healthy"] else "takes no part"
        heading.append(f"etcd {state}: {format_size(etcd['resident_bytes'])}, {etcd['fsyncs']} fsyncs\n")
    if cluster["trouble"]:
        heading.append(f"No new plan: {cluster['trouble']}\n", "yellow")
    for why in [cluster.get("double"), *(member.get("why") for member in cluster["members"])]:
        if why:
            heading.append(f"{why}\n", "red")
    for member in cluster["members"]:
        if models := member.get("models"):
            heading.append(f"{member['node']} also serves {', '.join(models)}\n")
    return heading


def planned(cluster: Json) -> str:
    """Returns the plan in force, and the number of experts that still move."""
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


def _stages_table(stages: Sequence[Json]) -> Table:
    """Returns a table of the layers that each box holds."""
    table = _columns("Layers of", "From", "To", "Dense weights", "State")
    for stage in stages:
        size = format_size(stage["dense_bytes"]) if stage["dense_bytes"] else ""
        table.add_row(stage["node"], f"{stage['first']}", f"{stage['last']}", size, stage_state(stage))
    return table


def stage_state(stage: Json) -> str:
    """Returns whether the box of a stage is here, and answered the last step."""
    if stage["state"] != "here":
        return str(stage["state"])
    return "here" if stage["answers"] is None else "answers" if stage["answers"] else "does not answer"


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
        "Help of others": help_of_others(after),
        "Memory": lending(after),
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


def help_of_others(after: Mapping[str, float]) -> str:
    """Returns how often others helped where a layer of few tokens lacked experts, and its effect."""
    alone, helped = (select(after, names.REMOTE_PLANS, tokens="few", plan=plan) for plan in ("alone", "helped"))
    if not helped:
        return "none needed yet" if not alone else "none asked: this box alone was faster"
    gain = select(after, names.REMOTE_GAIN, tokens="few")
    return f"in {helped / (alone + helped):.0%} of the layers that lacked experts, {gain:.1f} times as fast as alone"


def lending(after: Mapping[str, float]) -> str:
    """Returns whose requests the memory follows, and the time of recent steps beside that of this box alone."""
    whose = "the plan" if select(after, names.MEMORY_LENT) else "this box's own requests, which were faster so"
    ratio = select(after, names.MEMORY_RATIO)
    return f"follows {whose}; steps take {ratio:.2f} times as long as expected alone"


def offers(after: Mapping[str, float]) -> str:
    """Returns the outcome of requests that were offered to the leader, and the requests that wait there."""
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
    """Returns the destinations of this box's requests with the reasons, the most frequent first."""
    routes = sorted(((count, name) for name, count in after.items() if name.startswith(names.ROUTED)), reverse=True)
    labels = [(count, dict(re.findall(r'(\w+)="([^"]*)"', name))) for count, name in routes]
    return ", ".join(f"{count:,.0f} {label['to']} ({label['why']})" for count, label in labels) or "none yet"


def _milliseconds(seconds: float | None) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds is not None else ""


WATCH_S = 2.0
RATES_S = 1.0  # between two readings of counters
TIERS = ("vram", "ram", "nvme")


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """The daemon's /health and /metrics at one moment."""

    socket: str
    health: Json
    metrics: dict[str, float]


def run(args: argparse.Namespace) -> int:
    """Prints the status once, or until Ctrl-C. Returns 0 only if the daemon is ready."""
    socket = socket_of(args)
    with Client(socket) as client:
        picture = _cluster if args.cluster else _daemon
        if args.watch:
            _watch(client, socket, picture)
        snapshot = take_snapshot(client, socket)
        if not args.json:
            console().print(picture(client, socket))
    if args.json:
        shown = {
            "socket": snapshot.socket,
            "health": snapshot.health,
            "figures": snapshot.metrics,
        }  # scripts know it so
        print(json.dumps(shown, indent=2))
    return 0 if snapshot.health.get("status") == "ready" else 1


def take_snapshot(client: Client, socket: Path) -> StatusSnapshot:
    """Reads the daemon's /health and /metrics."""
    health = json.loads(client.text("/health", accept_unavailable=True))
    return StatusSnapshot(str(socket), health, names.parse(client.text("/metrics")))


def render(snapshot: StatusSnapshot) -> RenderableType:
    """Returns the tables that show a snapshot."""
    models = snapshot.health.get("models") or []
    several: list[RenderableType] = [served_table(models), ""] if models else []
    return Group(_heading(snapshot), *several, tier_table(snapshot.metrics), _request_table(snapshot.metrics))


def _daemon(client: Client, socket: Path) -> RenderableType:
    return render(take_snapshot(client, socket))


def _cluster(client: Client, socket: Path) -> RenderableType:
    before, began_s = take_snapshot(client, socket).metrics, time.monotonic()
    time.sleep(RATES_S)
    now = take_snapshot(client, socket)
    return boxes(now.health, before, now.metrics, time.monotonic() - began_s)


def _watch(client: Client, socket: Path, picture: Callable[[Client, Path], RenderableType]) -> None:
    """Redraws the status on a terminal; elsewhere prints one after the other."""
    out = console()
    if not out.is_terminal:
        while True:
            out.print(picture(client, socket))
            out.file.flush()
            time.sleep(WATCH_S)
    with Live(picture(client, socket), console=out, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(picture(client, socket), refresh=True)


def _heading(snapshot: StatusSnapshot) -> RenderableType:
    health = snapshot.health
    state, model, engine = str(health["status"]), health.get("model") or {}, health.get("engine") or {}
    colour = {"ready": "green", "failed": "red"}.get(state, "yellow")
    if loading := health.get("loading"):
        state += f" ({loading_text(loading)})"
    has_several = bool(health.get("models"))
    name = "edgemoe" if has_several else model.get("id", "edgemoe")
    verb = " has " if state == "failed" else " is "
    heading = Text.assemble((name, "bold"), verb, (state, colour), f" at {snapshot.socket}\n")
    if model and not has_several:
        heading.append(
            f"{model['family']}, {model['layers']} layers of {model['experts']} experts, {model['top_k']} a token, "
            f"{format_size(model['expert_bytes'])} an expert; {_precision(model)}\n"
        )
    if refused := (health.get("quarantine") or {}).get("requests"):
        heading.append(f"{refused} requests are refused for a time, because engines ended with them\n", "yellow")
    if failure := health.get("cannot_start"):
        heading.append(f"{failure['reason']}\n", "red")
    elif engine.get("starts", 1) > 1:
        why = f"The engine has been started {engine['starts']} times; it last ended: {engine['last_end']}\n"
        heading.append(why, "yellow")
    if pages := select(snapshot.metrics, names.FAILING_PAGES):
        heading.append(f"The memory is failing: {pages:.0f} pages of experts were damaged more than once\n", "red")
    elif damaged := select(snapshot.metrics, names.EXPERTS_DAMAGED):
        heading.append(f"{damaged:.0f} experts were damaged in memory, and read again\n", "yellow")
    return heading


def _precision(model: Json) -> str:
    """Returns the encodings of weights, and the type of keys and values if it differs."""
    dtype, kv = model["dtype"], model.get("kv_dtype")
    weights = encodings_text(model.get("encodings", ()), model.get("dense_encoding", ""), dtype)
    return f"{weights}; KV {kv}" if kv and kv != dtype else weights


def tier_table(metrics: Mapping[str, float]) -> Table:
    """Returns a table with a row per tier: its experts, share of expert calls, bytes copied into it, stalls."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("Tier", "Experts", "Slab", "Calls served", "Share", "Bytes in", "Stalls"):
        table.add_column(column, justify="left" if column == "Tier" else "right")
    calls = select(metrics, names.TIER_HITS)
    for tier in TIERS:
        served = select(metrics, names.TIER_HITS, tier=tier)
        slots = select(metrics, names.TIER_SLOTS, tier=tier)
        if tier == "nvme" or slots:
            held = select(metrics, names.TIER_EXPERTS, tier=tier)
            table.add_row(
                tier.upper(),
                f"{held:.0f} of {slots:.0f}" if slots else "all",
                format_size(select(metrics, names.TIER_BYTES, tier=tier)) if slots else "",
                f"{served:,.0f}",
                f"{served / calls:.1%}" if calls else "",
                format_size(select(metrics, names.BYTES_MOVED, to=tier)) if slots else "",
                f"{select(metrics, names.STALL_SECONDS, tier=tier):.1f} s",
            )
    return table


def rows_line(metrics: Mapping[str, float]) -> str:
    """Returns the state of the tier of rows, "" without one."""
    if not (slots := select(metrics, names.ROW_SLOTS)):
        return ""
    taken = select(metrics, names.ROWS_FOUND)
    steps_s = select(metrics, names.STEP_SECONDS)
    in_ram, on_disk = (format_size(select(metrics, each)) for each in (names.ROW_CACHE_BYTES, names.ROW_TABLE_BYTES))
    line = f"{select(metrics, names.ROWS_HELD):,.0f} of {slots:,.0f} in {in_ram} of RAM, {on_disk} on disk"
    if not taken or not steps_s:
        return line
    held = 1 - select(metrics, names.ROWS_FOUND, where="waited") / taken
    return f"{line}, {held:.1%} there in time; {select(metrics, names.ROW_WAIT_SECONDS) / steps_s:.1%} of steps waiting"


def _request_table(metrics: Mapping[str, float]) -> Table:
    blocks = select(metrics, names.KV_BLOCKS)
    used = select(metrics, names.KV_BLOCKS_REFERENCED)
    windows = select(metrics, names.WINDOW_BLOCKS)
    in_windows = select(metrics, names.WINDOW_BLOCKS_REFERENCED)
    rows = {
        "Requests": f"{select(metrics, names.REQUESTS_RUNNING):.0f} running, "
        f"{select(metrics, names.QUEUE_DEPTH):.0f} waiting",
        "KV cache": f"{used / blocks:.0%} of {blocks:.0f} blocks" if blocks else "",
        "Rows": rows_line(metrics),
        "Windows": f"{in_windows / windows:.0%} of {windows:.0f} blocks" if windows else "",
        "Tokens": f"{select(metrics, 'edgemoe_generation_tokens_total'):,.0f} generated, "
        f"{select(metrics, 'edgemoe_prompt_tokens_total'):,.0f} of prompts, "
        f"{select(metrics, names.PREFIX_HIT_TOKENS):,.0f} from the prefix cache",
        "First token": _mean(metrics, "edgemoe_time_to_first_token_seconds"),
        "Next tokens": _mean(metrics, "edgemoe_request_time_per_output_token_seconds"),
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in rows.items():
        if text:
            table.add_row(Text(name, "bold"), text)
    return table


def _mean(metrics: Mapping[str, float], family: str) -> str:
    count = select(metrics, f"{family}_count")
    return f"{1000 * select(metrics, f'{family}_sum') / count:,.1f} ms on average" if count else "none yet"

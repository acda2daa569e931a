"""The panels of `edgemoe top`, of at most 80 columns each."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edgemoe.cli.boxes import offers, planned, routes
from edgemoe.cli.look.live import Live, model_of
from edgemoe.config.sizes import format_rate
from edgemoe.telemetry import metrics as names
from edgemoe.types.arrays import Json
from edgemoe.types.model_info import encodings_text

TTFT, TPOT = "edgemoe_time_to_first_token_seconds", "edgemoe_request_time_per_output_token_seconds"
TIERS = {
    "vram": ("VRAM", "yellow", "ram"),
    "ram": ("RAM", "dodger_blue2", "nvme"),
    "nvme": ("disk", "grey58", ""),
}
PHASES = {"prefill": "reads", "decode": "answers", "waiting": "waits", "paused": "paused"}
STATES = {"here": "green", "ready": "green", "leaving": "yellow", "gone": "red", "refused": "red", "failed": "red"}
BAR = 12  # columns
MOST_REQUESTS = 12


def heading(live: Live, trouble: str = "") -> RenderableType:
    """Returns a line that says what is served and how it is."""
    if trouble:
        return Text(trouble, "bold red")
    health = live.health
    model, status = model_of(health), str(health.get("status", "connecting"))
    if loading := health.get("loading"):
        status += f" ({loading['phase']}, {loading['fraction']:.0%})"
    line = Text.assemble(
        (model.get("id", "edgemoe"), "bold"), "  ", (status, STATES.get(status, "yellow")), overflow="ellipsis"
    )
    if model:
        weights = encodings_text(model.get("encodings", ()), model.get("dense_encoding", ""), model["dtype"])
        line.append(f"  {model['layers']} layers of {model['experts']} experts, {weights}", "grey58")
    line.no_wrap = True
    return line


def tokens_per_s(live: Live) -> float:
    """Returns how many tokens are answered in a second."""
    return live.rate(names.STEP_TOKENS, 3.0, phase="decode")


def summary(live: Live) -> RenderableType:
    """Returns speeds, latencies, the queue and the KV cache."""
    blocks = live.get(names.KV_BLOCKS)
    used = live.get(names.KV_BLOCKS_REFERENCED) / blocks if blocks else 0.0
    prompts = live.rate(names.STEP_TOKENS, 3.0, phase="prefill")
    table = Table.grid(padding=(0, 2), expand=True)
    for width in (9, None, 12, None):
        table.add_column(no_wrap=True, width=width, ratio=None if width else 1)
    for left, right in (
        (("Tokens/s", f"{tokens_per_s(live):,.1f}"), ("First token", _quantiles(live, TTFT))),
        (("Prompts", f"{prompts:,.1f} tokens/s"), ("Each next", _quantiles(live, TPOT))),
        (("Requests", _queue(live)), ("KV cache", f"{used:.0%} of {blocks * 16:,.0f} tokens" if blocks else "")),
    ):
        table.add_row(Text(left[0], "bold"), left[1], Text(right[0], "bold"), right[1])
    return table


def tiers(live: Live) -> RenderableType:
    """Returns where experts are, what of the calls each tier serves, and what moves."""
    calls = sum(live.rate(names.TIER_HITS, 10.0, tier=tier) for tier in TIERS)
    table = _table("Tier", "Experts", "Calls, 10 s", "Bytes in", "Link busy", "Stalls")
    for tier, (name, colour, source) in TIERS.items():
        slots = live.get(names.TIER_SLOTS, tier=tier)
        if tier != "nvme" and not slots:
            continue
        share = live.rate(names.TIER_HITS, 10.0, tier=tier) / calls if calls else 0.0
        link = {"vram": "0", "ram": "nvme"}.get(tier, "")
        table.add_row(
            Text(name, colour),
            f"{live.get(names.TIER_EXPERTS, tier=tier):,.0f} of {slots:,.0f}" if slots else "the rest",
            bar(share, colour) + Text(f" {share:6.1%}"),
            format_rate(_moved(live, source, tier)) if source else "",
            f"{1 - live.get(names.LINK_IDLE, link=link):.0%}" if link else "",
            f"{live.rate(names.STALL_SECONDS, 10.0, tier=tier):.1%}",
        )
    return table


def requests(live: Live) -> RenderableType:
    """Returns a line for each request, with its phase."""
    found = live.requests
    if not found:
        return Text("Nobody asks anything just now.", "grey58")
    several = len(live.boxes) > 1
    table = _table("Request", *(["On"] if several else []), "", "Prompt", "Answer", "Since")
    for box, one in found[:MOST_REQUESTS]:
        done = 1.0 if one["phase"] == "decode" else one["computed"] / max(1, one["prompt_tokens"] + one["emitted"])
        table.add_row(
            PHASES.get(one["phase"], one["phase"]),
            *([escape(box)] if several else []),
            bar(min(1.0, done), "green"),
            f"{one['prompt_tokens']:,}",
            f"{one['emitted']:,}",
            f"{one['age_s']:.1f} s",
        )
    if len(found) > MOST_REQUESTS:
        table.add_row(f"and {len(found) - MOST_REQUESTS} more")
    return table


def boxes(live: Live, cluster: Json) -> RenderableType:
    """Returns the boxes, their links, who leads, what is on the way, and where requests went and why."""
    table = _table("Box", "State", "At home", "Moving", "Requests", "Trip", "Link")
    for member in cluster["members"]:
        node, state = member["node"], member["state"]
        marks = ["this box" if node == cluster["node"] else state, "leads" if node == cluster["leader"] else ""]
        latency_s, rate = member.get("latency_s"), member.get("bytes_per_s")
        table.add_row(
            escape(node),
            Text(", ".join(filter(None, marks)), STATES.get(state, "")),
            f"{member['homes']}" if member["engine"] else "",
            " ".join(f"{sign}{member[key]}" for sign, key in (("+", "to_come"), ("-", "to_go")) if member[key]),
            f"{member['requests']}",
            f"{1e3 * latency_s:.1f} ms" if latency_s is not None else "",
            format_rate(rate) if rate else "",
        )
    lines = {"Plan": planned(cluster), "Went": routes(live.figures), "Offers": offers(live.figures)}
    if trouble := cluster.get("trouble"):
        lines["No plan"] = trouble
    said = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        said.add_row(Text(name, "bold"), Text(text))
    return Group(table, "", said)


def bar(share: float, colour: str) -> Text:
    """Returns a bar of BAR columns."""
    full = round(BAR * share)
    return Text.assemble(("━" * full, colour), ("━" * (BAR - full), "grey23"))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, expand=True, header_style="grey58")
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="left" if column == "State" else "right", no_wrap=True)
    return table


def _quantiles(live: Live, family: str) -> str:
    half, most = live.quantile(family, 0.5), live.quantile(family, 0.95)
    return f"{_time(half)}, 95 % in {_time(most)}" if half is not None and most is not None else "none in a minute"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _queue(live: Live) -> str:
    return f"{live.get(names.REQUESTS_RUNNING):.0f} running, {live.get(names.QUEUE_DEPTH):.0f} waiting"


def _moved(live: Live, source: str, tier: str) -> float:
    return live.rate(names.BYTES_MOVED, 5.0, **{"from": source, "to": tier})

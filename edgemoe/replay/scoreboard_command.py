"""The command line of `edgemoe replay scoreboard`: a file of trace sets in; a table, a page or one JSON object out."""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.durable import replace_file
from edgemoe.errors import ConfigError
from edgemoe.replay import parsing

if TYPE_CHECKING:
    from edgemoe.replay.scoreboard import Figures, TraceSet

_EPILOG = """\
Examples:
  edgemoe replay scoreboard tools/research/traces/sets.toml
  edgemoe replay scoreboard sets.toml --enter my_policy.py:MyPolicy --page board.html
`closed` is the share of the way from the best of the nine named policies to Belady's optimum. Cold: tokens 0 to 1,500
of a set, from nothing known; warm: 5,000 to 7,000. Stall is that of a box whose RAM holds every expert, on demand.
"""
STYLE = """body{font:15px system-ui;max-width:60em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}
.bar{fill:#4a7ab5}.loss{fill:#c0605a}"""


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises ConfigError and StoreError where sets or policies cannot be replayed."""
    parser = argparse.ArgumentParser(
        prog="edgemoe replay scoreboard",
        description="Compare cache policies over sets of routing traces.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sets", metavar="SETS.toml", type=Path, help="traces with their licences and digests")
    parser.add_argument("--enter", metavar="FILE.py:CLASS", action="append", default=[], help="a policy; it is run")
    parser.add_argument(
        "--capacity", type=parsing.shares, default=[0.25, 0.5], help="shares of all experts (default 0.25,0.5)"
    )
    parser.add_argument(
        "--link",
        type=lambda text: [parsing.rate(part) for part in text.split(",")],
        default=[2e9, 8e9, 25e9],
        metavar="RATE,...",
        help="RAM to VRAM (default 2GB/s,8GB/s,25GB/s)",
    )
    parser.add_argument("--tokens", type=parsing.count, default=0, metavar="N", help="the first N tokens of a set only")
    parser.add_argument("--page", metavar="FILE.html", type=Path, help="write a page with tables and pictures")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    from edgemoe.replay.scoreboard import run, summarize

    sets, figures = run(
        options.sets,
        options.capacity,
        options.link,
        entered=options.enter,
        limit=options.tokens,
        progress=lambda name: print(f"{name} ...", file=sys.stderr, flush=True),
    )
    rows = summarize(figures)
    if options.page:
        try:
            replace_file(options.page, page(sets, rows, figures, options.link).encode(), 0o644)
        except OSError as error:
            raise ConfigError(f"--page {options.page} cannot be written: {error.strerror}") from error
    if options.json:
        entered = {text: _digest(text) for text in options.enter}
        print(json.dumps({"entered": entered, "rows": rows, "figures": [each._asdict() for each in figures]}))
    else:
        print(table(rows, options.link))
    return 0


def table(rows: Sequence[dict[str, Any]], links: Sequence[float]) -> str:
    """Formats the means over sets as a table to read."""
    stalls = "".join(f"{f'{link / 1e9:g} GB/s':>11}" for link in links)
    head = f"{'policy':<17}{'misses':>8}{'closed':>9}{'least':>9}{stalls}"
    lines, group = [], None
    for row in rows:
        if group != (row["window"], row["capacity"]):
            group = (row["window"], row["capacity"])
            lines += ["", f"{row['window']}, {row['capacity']:.0%} of the experts, {row['sets']} sets", head]
        stall = "".join(f"{each:>8.2f} ms" for each in row["stall_ms"])
        lines.append(
            f"{row['policy']:<17}{row['miss_ratio']:>8.2%}{row['closed']:>9.3f}{row['least_closed']:>9.3f}{stall}"
        )
    return "\n".join(lines[1:])


def page(
    sets: Sequence[TraceSet], rows: Sequence[dict[str, Any]], figures: Sequence[Figures], links: Sequence[float]
) -> str:
    """Returns the scoreboard as a page of HTML that loads nothing."""
    parts = [f"<!doctype html><meta charset=utf-8><title>edgemoe scoreboard</title><style>{STYLE}</style>"]
    parts.append("<h1>Cache policies for experts</h1>")
    for window, capacity in dict.fromkeys((row["window"], row["capacity"]) for row in rows):
        those = [row for row in rows if (row["window"], row["capacity"]) == (window, capacity)]
        parts.append(f"<h2>{html.escape(window)}, {capacity:.0%} of the experts</h2>{_bars(those)}")
        heads = [
            "policy",
            "misses",
            "closed",
            "least of a set",
            *(f"stall at {link / 1e9:g} GB/s, ms" for link in links),
        ]
        cells = [
            [row["policy"], f"{row['miss_ratio']:.2%}", f"{row['closed']:.3f}", f"{row['least_closed']:.3f}"]
            + [f"{each:.2f}" for each in row["stall_ms"]]
            for row in those
        ]
        parts.append(_table(heads, cells))
    parts.append("<h2>By set</h2>")
    each_set = [
        [one.name, one.window, f"{one.capacity:.0%}", one.policy, str(one.misses), f"{one.closed:.3f}"]
        for one in figures
    ]
    parts.append(_table(["set", "window", "capacity", "policy", "misses", "closed"], each_set))
    parts.append("<h2>Traces</h2>")
    files = [
        [traces.name, traces.model, traces.licence, traces.source, file, digest]
        for traces in sets
        for file, digest in traces.files.items()
    ]
    parts.append(_table(["set", "model", "licence", "source", "file", "SHA-256"], files))
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(each)}" for each in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _bars(rows: Sequence[dict[str, Any]]) -> str:
    """Draws the closed shares, from -1 on; the line is the best named policy."""
    drawn = []
    for i, row in enumerate(rows):
        width = 250 * max(-1.0, min(1.0, row["closed"]))
        left, kind, y = 410 + min(0.0, width), "bar" if width >= 0 else "loss", 20 * i
        drawn.append(
            f'<text x="150" y="{y + 14}" text-anchor="end">{html.escape(row["policy"])}</text>'
            f'<rect class="{kind}" x="{left:.1f}" y="{y + 3}" width="{abs(width):.1f}" height="14"/>'
        )
    height = 20 * len(rows)
    return f'<svg width="680" height="{height}"><path d="M410 0V{height}" stroke="#888"/>{"".join(drawn)}</svg>'


def _digest(text: str) -> str:
    return hashlib.sha256(Path(text.rpartition(":")[0]).read_bytes()).hexdigest()

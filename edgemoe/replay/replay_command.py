"""The command line of `edgemoe replay`: traces and options in, a table, a picture or one JSON object out."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.durable import replace_file
from edgemoe.errors import ConfigError
from edgemoe.replay import parsing, scoreboard_command

if TYPE_CHECKING:
    from edgemoe.replay.box import BoxSpec
    from edgemoe.replay.replay_policies import PolicyMaker
    from edgemoe.replay.run import ReplayMetrics
    from edgemoe.replay.trace import Trace

BASELINES = ("lru",)  # gap_closed is the share of the way from the best of them to the bound
BOUND = "belady"
Row = dict[str, Any]

_EPILOG = """\
Examples:
  edgemoe replay law.ids.csv.gz --capacity 0.25,0.5 --policies lru,belady,two-tier,learned --score-from 0.5
  edgemoe replay /var/lib/edgemoe/recordings --capacity 0.1,0.25,0.5,0.75 --plot stall.png
  edgemoe replay scoreboard --help
Several files are taken in turn, a request of each. miss_ratio and gap_closed are those of one tier that loads on
demand; stall and bytes those of a box with RAM, links and, unless --no-prefetch, prefetch.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises ConfigError and StoreError where the files cannot be replayed."""
    if argv[:1] == ["scoreboard"]:
        return scoreboard_command.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="edgemoe replay",
        description="Replay routing traces through cache policies, against Belady's optimum.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    show(*replay_all(options), options)
    return 0


def show(rows: Sequence[Row], trace: Trace, options: argparse.Namespace) -> None:
    """Prints the rows, as JSON where that is asked for, and draws them where a picture is."""
    if options.plot:
        plot(rows, Path(options.plot))
    if options.json:
        print(json.dumps({"trace": describe(trace, options), "results": rows}))
    else:
        print(table(rows, describe(trace, options)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="+", help="traces, or a folder of *.ids.csv.gz and *.routes"
    )
    parser.add_argument(
        "--capacity", type=parsing.shares, default=[0.25, 0.5], help="shares of all experts (default 0.25,0.5)"
    )
    parser.add_argument(
        "--policies", type=parsing.names, default=["lru", "two-tier", "learned", BOUND], help="names, commas between"
    )
    parser.add_argument(
        "--score-from", type=parsing.start, default=0.0, metavar="SHARE", help="leave the tokens before it out"
    )
    parser.add_argument(
        "--batch", type=parsing.count, default=1, metavar="N", help="requests that run at once (default 1)"
    )
    parser.add_argument("--tokens", type=parsing.count, default=0, metavar="N", help="replay the first N tokens only")
    parser.add_argument(
        "--experts", type=parsing.count, default=0, metavar="N", help="per layer (default: from the trace)"
    )
    parser.add_argument("--without-template", action="store_true", help="leave out tokens that requests share in place")
    box = parser.add_argument_group("the box")
    box.add_argument(
        "--expert-bytes",
        type=parsing.sizes,
        default=parsing.sizes("16MiB"),
        metavar="SIZE",
        help="of one expert, or of one of each layer: 4x9MiB,44x2.4MiB (default 16MiB)",
    )
    box.add_argument(
        "--link", type=parsing.rate, default=parsing.rate("8GB/s"), metavar="RATE", help="RAM to VRAM (default 8GB/s)"
    )
    box.add_argument(
        "--nvme", type=parsing.rate, default=parsing.rate("3GB/s"), metavar="RATE", help="NVMe to RAM (default 3GB/s)"
    )
    box.add_argument(
        "--ram", type=parsing.share, default=1.0, metavar="SHARE", help="of all experts that RAM holds (default 1)"
    )
    box.add_argument(
        "--layer-ms", type=parsing.positive, default=1.0, metavar="MS", help="compute of one layer (default 1)"
    )
    box.add_argument("--no-prefetch", action="store_true", help="load on demand only")
    box.add_argument(
        "--hysteresis", type=parsing.share, default=0.1, metavar="H", help="admit above (1+H), drop below (1-H)"
    )
    box.add_argument(
        "--alpha", type=parsing.positive, default=0.0, metavar="A", help="seconds that a byte into VRAM weighs"
    )
    box.add_argument(
        "--beta", type=parsing.positive, default=0.0, metavar="B", help="seconds that a byte into RAM weighs"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--plot", metavar="FILE.png", help="stall against capacity; needs matplotlib")


def replay_all(
    options: argparse.Namespace, more: Mapping[str, PolicyMaker] | None = None, baselines: Sequence[str] = BASELINES
) -> tuple[list[Row], Trace]:
    """Returns a row for each capacity and policy, in the order asked for, and the trace.

    `more` are policies besides the served ones; gap_closed starts from the best of `baselines`.
    """
    from edgemoe.replay.replay_policies import learned
    from edgemoe.replay.run import replay
    from edgemoe.replay.trace import load

    trace = load(
        options.files, without_template=options.without_template, limit=options.tokens, experts=options.experts
    )
    total = trace.layers * trace.experts
    slots = [max(1, round(share * total)) for share in options.capacity]
    machine = machine_of(options, trace)
    names = list(dict.fromkeys([*options.policies, *baselines, BOUND]))
    makers: dict[str, PolicyMaker] = {"learned": learned(options.hysteresis), **(more or {})}
    metrics = {name: replay(trace, name, slots, options.batch, options.score_from, machine, makers) for name in names}
    rows = []
    for i, share in enumerate(options.capacity):
        missed = {name: each[i].missed_bytes for name, each in metrics.items()}
        best = min(missed[name] for name in baselines)
        for name in options.policies:
            rows.append(row_of(share, name, metrics[name][i], (best, missed[BOUND]), options))
    return rows, trace


def machine_of(options: argparse.Namespace, trace: Trace) -> BoxSpec:
    """Returns the box that the options describe. Raises ConfigError where its layers are not the trace's."""
    from edgemoe.replay.box import BoxSpec

    sizes = layer_sizes(options.expert_bytes, trace.layers)
    return BoxSpec(
        compute_s=options.layer_ms / 1000,
        expert_bytes=round(sum(sizes) / len(sizes)),
        layer_bytes=sizes if len(set(sizes)) > 1 else (),
        link_bytes_per_s=options.link,
        nvme_bytes_per_s=options.nvme,
        ram_share=options.ram,
        prefetch=not options.no_prefetch,
    )


def layer_sizes(stated: Sequence[tuple[int, int]], layers: int) -> tuple[int, ...]:
    """Returns the bytes of one expert of each layer. Raises ConfigError where another number of layers is stated."""
    sizes = tuple(size for count, size in stated for _ in range(count))
    if len(sizes) == 1:
        return sizes * layers
    if len(sizes) != layers:
        raise ConfigError(f"--expert-bytes states {len(sizes)} layers, the trace has {layers}")
    return sizes


def row_of(
    share: float, name: str, metrics: ReplayMetrics, missed: tuple[int, int], options: argparse.Namespace
) -> Row:
    """Returns the row of one policy at one capacity. `missed` has the bytes of the best baseline and of the bound."""
    best, least = missed
    gap = best - least
    steps = max(1, metrics.steps)
    box = metrics.box
    of_box = {
        "stall_s": round(box.stall_s, 6),
        "stall_ms_per_token": round(1000 * box.stall_s / steps, 6),
        "bytes_moved": box.to_vram_bytes + box.to_ram_bytes,
        "bytes_to_vram": box.to_vram_bytes,
        "bytes_to_ram": box.to_ram_bytes,
        "bytes_wasted": box.wasted_bytes,
        "moves_per_token": round(box.moves / steps, 4),
        "objective_s": round(box.stall_s + options.alpha * box.to_vram_bytes + options.beta * box.to_ram_bytes, 6),
    }
    has_box = box.to_vram_bytes or not metrics.misses
    return {
        "capacity": share,
        "policy": name,
        "miss_ratio": round(metrics.missed_bytes / max(1, metrics.demanded_bytes), 6),
        "bytes_missed": metrics.missed_bytes,
        **(of_box if has_box else dict.fromkeys(of_box)),
        "gap_closed": round((best - metrics.missed_bytes) / gap, 4) if gap else 0.0,
    }


def describe(trace: Trace, options: argparse.Namespace) -> Row:
    """Returns the files, shape and batch size of the replayed trace."""
    return {
        "files": [str(file) for file in options.files],
        "requests": len(trace.requests),
        "tokens": trace.tokens,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "batch": options.batch,
        "experts_per_step_of_capacity": [
            round(trace.touched(options.batch) / (share * trace.experts), 3) for share in options.capacity
        ],
    }


def table(rows: Sequence[Row], what: Row) -> str:
    """Formats the rows as a table to read."""
    lines = [
        f"{what['requests']} requests, {what['tokens']} tokens, {what['layers']} layers of {what['experts']} experts, "
        f"{what['top_k']} each, batch {what['batch']}",
        f"{'capacity':>8}  {'policy':<10}{'misses':>9}{'gap closed':>12}"
        f"{'stall ms/token':>16}{'moves/token':>13}{'wasted':>9}",
    ]
    for row in rows:
        line = f"{row['capacity']:>8.0%}  {row['policy']:<10}{row['miss_ratio']:>9.2%}{row['gap_closed']:>12.1%}"
        if row["stall_s"] is not None:
            wasted = row["bytes_wasted"] / max(1, row["bytes_moved"])
            line += f"{row['stall_ms_per_token']:>16.3f}{row['moves_per_token']:>13.2f}{wasted:>9.1%}"
        else:
            line += f"{'-':>16}{'-':>13}{'-':>9}"
        lines.append(line)
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws stall against capacity, a line for each policy. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'edgemoe[bench]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="capacity, % of all experts", ylabel="stall, ms per token")
    for name in dict.fromkeys(row["policy"] for row in rows if row["stall_s"] is not None):
        line = sorted((100 * row["capacity"], row["stall_ms_per_token"]) for row in rows if row["policy"] == name)
        axes.plot(*zip(*line, strict=True), marker="o", label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=150, format=path.suffix.removeprefix(".") or "png")
        replace_file(path, drawn.getvalue(), 0o644)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error

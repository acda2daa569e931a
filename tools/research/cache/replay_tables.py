"""The cache policies on real traces: every table and picture of results/cache_replay.md.

    python tools/research/cache/replay_tables.py TRACES --out DIR [--only NAME,...]  runs what DIR lacks (hours)
    python tools/research/cache/replay_tables.py TRACES --out DIR --report  prints the tables, draws the pictures

TRACES is a folder with deepseek-v2-lite-esft/ and gpt-oss-20b-fingerprint/, tables `*.ids.csv.gz` in each.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from edgemoe.replay.box import BoxSpec
from edgemoe.replay.run import replay
from edgemoe.replay.trace import load
from tools.research.cache.replay import main as replay_command

DEEPSEEK, GPT_OSS = "deepseek-v2-lite-esft", "gpt-oss-20b-fingerprint"
TASKS = ("intent", "law", "translation")
DOMAINS = ("code_cs", "humanities_other", "law", "math", "medical")
ALL = "lru,lfu,lfru,belady,ewma,published,learned"
MAIN = "lru,lfu,lfru,belady,learned"
LINKS = (2e9, 8e9, 25e9)
PLOTS = Path(__file__).parent / "plots"


class Job(NamedTuple):
    """One replay: files, options."""

    files: list[str]
    options: list[str]


def jobs() -> dict[str, Job]:
    tasks = {task: f"{DEEPSEEK}/{task}.ids.csv.gz" for task in TASKS}
    sets = {f"ds-{task}": [file] for task, file in tasks.items()}
    sets |= {"ds-mix": list(tasks.values()), "go-mix": [f"{GPT_OSS}/{domain}.ids.csv.gz" for domain in DOMAINS]}
    wide, narrow = ["--capacity", "0.1,0.25,0.5,0.75"], ["--capacity", "0.25,0.5"]
    found = {name: Job(files, [*wide, "--policies", ALL if len(files) == 1 else MAIN]) for name, files in sets.items()}
    for task in TASKS:
        found[f"nt-ds-{task}"] = Job([tasks[task]], [*narrow, "--policies", MAIN, "--without-template"])
    for name, limit in (("ds-mix", "0"), ("go-mix", "20000")):
        tokens = [] if limit == "0" else ["--tokens", limit]
        found[f"b8-{name}"] = Job(sets[name], [*narrow, "--policies", MAIN, "--batch", "8", *tokens])
    return found


def run(job: Job, traces: Path, to: Path) -> None:
    """Writes one replay into a file."""
    import contextlib
    import io

    words = [str(traces / file) for file in job.files]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        replay_command([*words, *job.options, "--score-from", "0.5", "--json"])
    to.write_text(printed.getvalue().splitlines()[-1])


def prefetch(traces: Path, to: Path, tokens: int = 4000) -> None:
    """Measures stall with and without prefetch, on every set, at every link speed."""
    rows = []
    for name, job in jobs().items():
        if not name.startswith(("ds-", "go-")):
            continue
        trace = load([traces / file for file in job.files], limit=tokens)
        slots = [round(share * trace.layers * trace.experts) for share in (0.25, 0.5)]
        for link in LINKS:
            machine = BoxSpec(2.5e-3, 4 << 20, link, 3e9, 1.0, True)
            for share, metrics in zip((0.25, 0.5), replay(trace, "learned", slots, 1, 0.0, machine), strict=True):
                rows.append(
                    {
                        "set": name,
                        "capacity": share,
                        "link": link,
                        "with_s": metrics.box.stall_s,
                        "without_s": metrics.missed_bytes / link,
                        "prefetched": metrics.box.prefetched,
                        "wasted": metrics.box.wasted_bytes // machine.expert_bytes,
                    }
                )
    to.write_text(json.dumps(rows))


def report(out: Path) -> None:
    results = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    print("| set | capacity | LRU | LFU | LFRU | Belady | learned | gap closed |\n|---|---|---|---|---|---|---|---|")
    for name, result in results.items():
        if name == "prefetch":
            continue
        rows = {(row["capacity"], row["policy"]): row for row in result["results"]}
        for capacity in sorted({capacity for capacity, _ in rows}):
            misses = [f"{rows[capacity, p]['miss_ratio']:.4f}" for p in ("lru", "lfu", "lfru", "belady", "learned")]
            print(f"| {name} | {capacity:.0%} | {' | '.join(misses)} | {rows[capacity, 'learned']['gap_closed']:.3f} |")
    if "prefetch" in results:
        print(
            "\n| set | capacity | link GB/s | stall s, off | on | prefetched | wasted |\n|---|---|---|---|---|---|---|"
        )
        for row in results["prefetch"]:
            print(
                f"| {row['set']} | {row['capacity']:.0%} | {row['link'] / 1e9:.0f} | {row['without_s']:.2f} "
                f"| {row['with_s']:.2f} | {row['prefetched']} | {row['wasted']} |"
            )
    draw(results)


def draw(results: dict[str, Any]) -> None:
    """Plots stall against capacity, a panel for each set."""
    from matplotlib.figure import Figure

    names = [name for name in results if name.startswith(("ds-", "go-"))]
    if not names:
        return
    figure = Figure(figsize=(3 * len(names), 3.3), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for policy in MAIN.split(","):
            rows = [row for row in results[name]["results"] if row["policy"] == policy]
            axes.plot(
                [row["capacity"] for row in rows], [row["stall_ms_per_token"] for row in rows], "o-", label=policy
            )
        axes.set(title=name, yscale="log", xlabel="capacity, share of all experts", ylabel="stall, ms per token")
    figure.axes[0].legend()
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / "cache.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="names of replays, commas between")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True, parents=True)
    if options.report:
        report(options.out)
        return
    only = options.only.split(",") if options.only else [*jobs(), "prefetch"]
    for name in only:
        to, began = options.out / f"{name}.json", time.monotonic()
        if not to.exists():
            prefetch(options.traces, to) if name == "prefetch" else run(jobs()[name], options.traces, to)
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

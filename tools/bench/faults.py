"""A table of faults of a cluster of three boxes, trial by trial.

    python -m tools.bench.faults --log faults.jsonl --minutes 60  # the missing trials, as far as the time allows
    python -m tools.bench.faults --rows kill-peer,leader-stop --disk two-thirds --trials 10 --beside 2
    python -m tools.bench.faults --log faults.jsonl --table  # of the log

Needs root. results/faults.md describes the method. Logged trials are not repeated; Ctrl-C ends a run.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console

from edgemoe.families.config import spec_from_config
from edgemoe.store.manifest import Manifest
from tools.bench.fault_apart import ROLES
from tools.bench.fault_rows import ROWS, Kind
from tools.bench.fault_runs import DISKS, Beside, Piece, arrangement, ended_by_sigterm, lacking, piece_of, read
from tools.bench.fault_trial import NODES, TOKENS, Answers, Record, Trial
from tools.testbed.bed import Bed
from tools.testbed.daemons import Cluster, Daemon
from tools.testbed.float32_model import float32_demo, part_of

ROOT = Path(__file__).parents[2]
WANTED = {"two-thirds": 200, "all": 50}  # trials of each row
CALM_EVERY = 10  # trials; the first one has an undisturbed run, too
EXPERTS = 192  # of the demo model
PROMPTS = 16
POLICY = "lru"  # every box has its homes in memory: another policy would only cost each start some seconds
# --- running ----------------------------------------------------------------------------------------------------


def common(store: Path, experts: int) -> dict[str, object]:
    """Returns settings of a box with memory for `experts` at home."""
    slot_bytes = spec_from_config(Manifest.load(store).spec_config).geometry.stride_bytes(0)
    return {
        "model.path": store,
        "model.name": "m",
        "memory.ram_bytes": (experts * 16 // 15 + 3) * slot_bytes,
        "memory.kv_bytes": "8MiB",
        "memory.headroom_bytes": 0,
        "device.0.kind": "cpu",
        "engine.threads": 1,
        "engine.max_sequences": 8,
        "engine.prefix_cache": False,
    }


def references(folder: Path, store: Path, prompt_tokens: int = 12) -> Answers:
    """Returns the answers of one box with everything in memory to prompts of this length; kept in `folder`."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(3, 4096) for _ in range(prompt_tokens)) for _ in range(PROMPTS)]
    longer = f"-to-{prompt_tokens}" if prompt_tokens != 12 else ""
    kept = folder / f"answers-{TOKENS}{longer}-{Manifest.load(store).digest[:12]}.json"
    if not kept.exists():
        with Bed(["alone"]) as bed, tempfile.TemporaryDirectory(dir=folder) as scratch:
            daemon = Daemon(bed["alone"], Path(scratch), common(store, EXPERTS))
            try:
                daemon.start()
                daemon.wait_ready()
                texts = [daemon.complete(prompt, TOKENS).text for prompt in prompts]
            finally:
                daemon.close()
        kept.write_text(json.dumps(texts))
    pairs = zip(json.loads(kept.read_text()), prompts, strict=True)
    distinct = {text: prompt for text, prompt in pairs if len(text) >= TOKENS // 2}
    return {prompt: text for text, prompt in distinct.items()}


@contextmanager
def cluster(
    folder: Path, store: Path, kind: Kind, disk: str = DISKS[0], absent_s: float | None = None
) -> Iterator[Cluster]:
    """Runs three boxes; `replicas` of them have each expert at home, on disk either only there or on all boxes."""
    stores = {
        node: part_of(store, folder / f"store-{node}", lambda _, e, n=n: (e - n) % 3 < kind.replicas)  # type: ignore[misc]
        for n, node in enumerate(NODES if disk != "all" else ())
    }
    settings = common(store, EXPERTS * kind.replicas // 3)
    settings |= {"cluster.replicas": kind.replicas, "cache.policy": POLICY}
    settings |= {"cluster.absent_s": kind.absent_s[0] if absent_s is None else absent_s}
    settings |= dict(kind.settings)
    if kind.spread:
        settings["cluster.route"] = "least"
    own: dict[str, dict[str, object]] = {node: {"model.path": stores[node]} if stores else {} for node in NODES}
    for node, role in ROLES.items() if kind.apart else ():
        own[node]["cluster.role"] = role
    spoils = {"a": "tools.testbed.spoiled_kv"} if kind.spoils_kv else {}
    with (
        Bed([*NODES, *kind.empty]) as bed,
        Cluster(bed, folder / "cluster", settings, own, kind.empty, kind.state_bytes, spoils) as made,
    ):
        yield made


def commit() -> str:
    """Returns the commit of the tree; with a + if files other than logs differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    differs = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)*.jsonl")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if differs else "")


def run_piece(piece: Piece, log: Path, work: Path, ends: float) -> None:
    name, disk, absent_s = piece.row, piece.disk, piece.absent_s
    kind = ROWS[name]
    store = float32_demo(work)
    answers = references(work, store, kind.prompt_tokens)
    known = {"commit": commit(), "disk": disk, "tokens": TOKENS, "absent_s": absent_s, "policy": POLICY}
    with (
        tempfile.TemporaryDirectory(dir=work, prefix=f"{name}-") as scratch,
        cluster(Path(scratch), store, kind, disk, absent_s) as made,
    ):
        whole_s = 0.0
        for count, number in enumerate(piece.trials):
            if time.monotonic() > ends:
                return
            trial = Trial(made, answers, random.Random(f"{name} {number}"), whole_s if count % CALM_EVERY else 0.0)
            began_s = time.monotonic()
            record = {"row": name, "trial": number, **known, "led": made.leader(), **kind.run(trial)}
            record["in_flight"], whole_s = sum(trial.in_flight), trial.whole_s
            record["died"] = [daemon.box.name for daemon in made if not daemon.alive]
            record["load"] = round(os.getloadavg()[0], 1)
            record["trial_s"] = round(time.monotonic() - began_s, 2)
            with log.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), file=sys.stderr, flush=True)


def tables(records: Sequence[Record]) -> Iterator[str]:
    """Yields a table for each arrangement."""
    for tokens, disk in sorted({arrangement(record) for record in records}):
        yield f"\nRequests of {tokens} tokens; {disk} of the store on each disk:\n"
        mine = [record for record in records if arrangement(record) == (tokens, disk)]
        yield from table(mine)
        yield from homes([record for record in mine if "again_s" in record])


def homes(records: Sequence[Record]) -> Iterator[str]:
    """Yields lines on changed plans: released copies, and the time until a dead box's experts were pinned again."""
    if not records:
        return
    ways = ", ".join(f"{way} {sum(r['way'] == way for r in records)}" for way in sorted({r["way"] for r in records}))
    yield f"\nPlans that changed ({ways}): {sum(r['drops'] for r in records)} times a box gave up copies by a plan."
    died = [record for record in records if record["homeless"]]
    again = [record["again_s"] for record in died if record["again_s"] is not None]
    if died:
        count = sum(record["homeless"] for record in died)
        after = f"{np.median(again):.1f} / {max(again):.1f} s (p50 / max)" if again else "-"
        yield f"The last copies of {count} experts died in {len(died)} trials; all had one again after {after}"
        yield f"in {len(again)} of them."
    yield f"Once all boxes were back, nothing moved any more after {max(r['homes_s'] for r in records):.1f} s."


def table(records: Sequence[Record]) -> Iterator[str]:
    yield (
        "| fault | trials | requests | in flight | complete | of them right | wrong tokens "
        "| added latency p50 / p99 / max | new epoch p50 / max "
        "| obeyed stale, epochs back, frames let in, pins lost, blocks leaked |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in ROWS:
        rows = [record for record in records if record["row"] == name]
        if not rows:
            continue
        asked = [request for row in rows for request in row["requests"]]
        complete = [request for request in asked if request["complete"]]
        right = sum(request["right"] for request in complete)
        wrong = sum(not request["prefix"] for request in asked)
        added = [request["took_s"] - request["calm_s"] for request in complete if request["calm_s"] is not None]
        in_flight = sum(row["in_flight"] for row in rows if "in_flight" in row) if "in_flight" in rows[0] else ""
        disturbed = added and name != "restart-all"
        late = " / ".join(f"{np.quantile(added, q):.2f}" for q in (0.5, 0.99, 1.0)) + " s" if disturbed else ""
        deposed = [row for row in rows if row.get("led", row["hit"]) == row["hit"]] if name != "restart-all" else []
        epochs = [row["new_epoch_s"] for row in deposed if row.get("new_epoch_s") is not None]
        new = f"{np.median(epochs):.2f} / {max(epochs):.2f} s" if epochs else ""
        stale = max(row.get("stale_obeyed", 0) for row in rows)  # each is of the whole log
        ends = ("regressions", "let_in", "pins_lost", "leaked")
        stale += int(sum(row.get(end, 0) for row in rows for end in ends))
        yield (
            f"| {name} | {len(rows)} | {len(asked)} | {in_flight} | {len(complete)} | {right} | {wrong} | {late} "
            f"| {new} | {stale} |"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="of the table, separated by commas")
    parser.add_argument("--trials", type=int, help="of each row, those in the log included; else as the table wants")
    parser.add_argument("--disk", choices=DISKS, help="how much of the store each box has on disk; else either")
    parser.add_argument("--beside", type=int, default=(os.cpu_count() or 1) + 1, help="clusters at once")
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-faults")
    parser.add_argument("--minutes", type=float, default=1e9, help="no trial begins after so long")
    parser.add_argument("--table", action="store_true", help="only prints what the log holds")
    parser.add_argument("--piece", type=piece_of, metavar="ROW,DISK,ABSENT_S,TRIALS", help="only that, in this process")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    if args.piece is not None:
        run_piece(args.piece, args.log, args.work, ends)
        return 0
    wanted = {disk: args.trials or WANTED[disk] for disk in DISKS if args.disk in (None, disk)}
    lacks = lacking(read(args.log), args.rows.split(","), wanted)
    failed = not args.table and not run_beside(lacks, args, ends)
    print("\n".join(tables(read(args.log))))
    return int(failed)


def run_beside(pieces: Sequence[Piece], args: argparse.Namespace, ends: float) -> bool:
    """Runs pieces, each in a process of its own. Returns whether none has failed."""
    for folder in ("edgemoe", "tools"):  # as an installation has it; else each daemon compiles all at its start
        compileall.compile_dir(ROOT / folder, quiet=2)
    store = float32_demo(args.work)
    for tokens in {ROWS[piece.row].prompt_tokens for piece in pieces}:
        references(args.work, store, tokens)

    def command(piece: Piece) -> list[str]:
        minutes = max(0.0, ends - time.monotonic()) / 60
        words = ["--piece", piece.word, "--log", args.log, "--work", args.work, "--minutes", minutes]
        return [sys.executable, "-m", "tools.bench.faults", *map(str, words)]

    console = Console(stderr=True)
    beside = Beside(command, ends, console)
    with ended_by_sigterm():
        beside.run(pieces, args.beside)
    left = sum(len(piece.trials) for piece in pieces) - beside.made
    console.print(f"{beside.made} trials, {beside.rate:.1f} a minute; {left} are left")
    return not beside.failed


if __name__ == "__main__":
    sys.exit(main())

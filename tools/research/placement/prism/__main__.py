"""Prism's evaluation [Prism, IV] on the test bed: seven placements under the same requests.

    python -m tools.research.placement.prism --prompts DIR --log prism.jsonl --minutes 30  # continues from the log
    python -m tools.research.placement.prism --log prism.jsonl --table --plots plots       # --list lists the runs

Needs root and a machine of its own. results/prism.md describes the boxes and the parts (`--parts`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.bench.fault_runs import read
from tools.bench.faults import commit
from tools.research.placement.prism.models import MODELS, SETTINGS, Model
from tools.research.placement.prism.moving import measure_moving, moving_runs
from tools.research.placement.prism.plans import METHODS
from tools.research.placement.prism.prism_runs import ALONE, REDIRECT, Machine, Record, Run, measure
from tools.research.placement.prism.prism_tables import skew_tables, tables
from tools.research.placement.prism.profile import profile_of
from tools.research.placement.prism.remote_share import SHARES, measure_share

PARTS = ("methods", "migration", "redirection", "share")
LONG = "long"
LONG_S, LONG_MIGRATE_S = 1800.0, 300.0
MOVED = (("prism", 60.0), ("prism", 0.0), ("rendezvous", 60.0), ("rendezvous", 0.0))
HOW = {"share": measure_share, "moving": measure_moving}  # parts with a measurement of their own
BESIDE = (ALONE, REDIRECT, "redundance", "rendezvous")


def runs_of(part: str, model: Model, args: argparse.Namespace, seed: int) -> Iterator[Run]:
    """Returns a part's runs of one seed."""
    requests, pace = args.requests or model.requests, args.pace
    if part == "methods":
        for setting in SETTINGS:
            for method in args.methods.split(","):
                yield Run(part, model.name, method, (setting,), seed, requests, pace)
    elif part == "migration" and not seed:
        for method, migrate_s in MOVED:
            yield Run(part, model.name, method, SETTINGS[::-1], seed, 2 * args.requests or 200, pace, migrate_s)
    elif part == "redirection" and not seed:
        for method in BESIDE:
            yield Run(part, model.name, method, SETTINGS[:1], seed, requests // 2, pace)
    elif part == "share" and not seed:
        for share in SHARES:
            yield Run(part, model.name, str(share), SETTINGS[1:], seed, 30)
    elif part == "moving":
        yield from moving_runs(model, seed, args.requests, pace)
    elif part == LONG and not seed:
        asked = round(LONG_S / sum(1 / (pace * model.rate[setting]) for setting in SETTINGS))
        yield Run(part, model.name, "rendezvous", SETTINGS[::-1], seed, asked, pace, LONG_MIGRATE_S)


# models of a part
ABOUT = {"migration": ("constructed",), "redirection": ("demo",), "long": ("constructed",), "moving": ("demo",)}


def wanted(args: argparse.Namespace, models: dict[str, Model]) -> list[tuple[Model, Run]]:
    """Returns all runs, whole rounds of one seed after the other."""
    return [
        (model, run)
        for seed in range(args.seeds)
        for part in args.parts.split(",")
        for model in models.values()
        if model.name in ABOUT.get(part, models)
        for run in runs_of(part, model, args, seed)
    ]


def is_in(log: Path, run: Run, machine: Machine) -> bool:
    known = json.loads(json.dumps(asdict(run) | asdict(machine)))
    return any(known.items() <= record.items() for record in read(log))


def sitting(args: argparse.Namespace, machine: Machine) -> None:
    """Makes the runs that the log lacks, until the time is over."""
    ends_s = time.monotonic() + 60 * args.minutes
    models = {name: MODELS[name](args.work) for name in args.models.split(",")}
    profiles = {name: profile_of(model, args.prompts, args.work) for name, model in models.items()}
    for name, profile in profiles.items():
        print("\n".join(skew_tables(models[name], profile)), flush=True)
    for model, run in wanted(args, models):
        if is_in(args.log, run, machine):
            continue
        if time.monotonic() + run.seconds(model) > ends_s:
            print("no time for more", file=sys.stderr)
            return
        with tempfile.TemporaryDirectory(dir=args.work, prefix=f"{run.part}-") as scratch:
            how = HOW.get(run.part, measure)
            record: Record = how(run, model, profiles[model.name], machine, Path(scratch))
        record |= {"commit": commit(), "cores": os.cpu_count(), "at_s": round(time.time())}
        with args.log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        brief = {key: value for key, value in record.items() if key not in ("latency", "samples")}
        print(json.dumps(brief), file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", type=Path, default=Path(), help="a folder with a file of prompts per task")
    p.add_argument("--log", type=Path, default=Path("prism.jsonl"))
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-prism")
    p.add_argument("--minutes", type=float, default=1e9, help="no run begins that would end later")
    p.add_argument("--parts", default=",".join(PARTS))
    p.add_argument("--models", default=",".join(MODELS))
    p.add_argument("--methods", default=",".join(METHODS))
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--requests", type=int, default=0, help="at each box in a run; 0: as each model has it")
    p.add_argument("--pace", type=float, default=1.0, help="of the models' rates; less where boxes are held back")
    p.add_argument("--cpus", type=float, default=1.0, help="of the machine, for each device")
    p.add_argument("--disk-mb", type=float, default=50.0, help="megabytes a second that each box reads")
    p.add_argument("--link-gb", type=float, default=2.0, help="gigabytes a second between memory and a device")
    p.add_argument("--list", action="store_true", help="only says what would be run, and how long that takes")
    p.add_argument("--table", action="store_true", help="only prints what the log holds")
    p.add_argument("--plots", type=Path, help="only draws what the log holds, into this folder")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    machine = Machine(args.cpus, args.disk_mb, args.link_gb)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.plots:
        from tools.research.placement.prism.prism_plots import draw

        draw(read(args.log), args.plots)
    elif args.list:
        models = {name: MODELS[name](args.work) for name in args.models.split(",")}
        runs = wanted(args, models)
        for model, run in runs:
            there = "there" if is_in(args.log, run, machine) else f"{run.seconds(model):.0f} s"
            print(run.part, run.model, *run.settings, run.method, run.seed, there)
        print(f"{len(runs)} runs, {sum(run.seconds(model) for model, run in runs) / 60:.0f} minutes in all")
    elif args.table:
        print("\n".join(tables(read(args.log))))
    else:
        sitting(args, machine)
        print("\n".join(tables(read(args.log))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Routing of requests between live daemons in boxes of a test bed. Needs root.

    python -m tools.research.routing.live --data DIR --log live.jsonl --parts apart --models demo
    python -m tools.research.routing.live --log live.jsonl --table --plots plots

Clusters that take turns stand side by side and share the machine's cores. results/routing_live.md describes the parts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.bench.fault_runs import read
from tools.research.placement.prism.models import MODELS, Model
from tools.research.routing.live.answers import measure_affinity, measure_same, references
from tools.research.routing.live.live_load import measure_apart, measure_load
from tools.research.routing.live.live_tables import tables
from tools.research.routing.live.sitting import Sitting
from tools.research.routing.live.terms import measure_terms

PARTS: dict[str, Callable[[Sitting, Model], None]] = {
    "same": measure_same,
    "affinity": measure_affinity,
    "load": measure_load,
    "apart": measure_apart,
    "terms": measure_terms,
}
ABOUT = {"affinity": ("demo",)}  # models of a part, if not all


def sit(args: argparse.Namespace) -> None:
    """Makes the measurements that the log lacks."""
    sitting = Sitting(args.data, args.work, args.log, args.rounds, args.scale)
    for name in args.models.split(","):
        model = MODELS[name](args.work)
        references(model, args.work)  # compiles kernels once
        for part in args.parts.split(","):
            if name in ABOUT.get(part, MODELS):
                began_s = time.monotonic()
                PARTS[part](sitting, model)
                print(f"{part}, {name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, default=Path(), help="the folder of traces and prompts")
    p.add_argument("--log", type=Path, default=Path("routing_live.jsonl"))
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgemoe-routing")
    p.add_argument("--parts", default=",".join(PARTS))
    p.add_argument("--models", default=",".join(MODELS))
    p.add_argument("--rounds", type=int, default=3, help="of what takes turns")
    p.add_argument("--scale", type=float, default=1.0, help="of all numbers of requests in such a round")
    p.add_argument("--table", action="store_true", help="only prints what the log holds")
    p.add_argument("--plots", type=Path, help="only draws what the log holds, into this folder")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.plots:
        from tools.research.routing.live.live_plots import draw

        draw(read(args.log), args.plots)
    elif not args.table:
        sit(args)
    print("\n".join(tables(read(args.log))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures whether a room's tests notice small changes to its sources, each made in a copy of the tree.

    tools/mutate policy --count 20 --seed 1     # twenty mutants; the same seed and sources give the same ones

A mutant is killed (a test failed), survived or timed out; equivalents.toml lists equivalent ones.
Exit status: 0 none survived, 1 some did, 2 no start.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from pathlib import Path

from tools.mutation.mutant_runs import Bench, copy_tree
from tools.mutation.rooms import ROOMS, Room

ROOT = Path(__file__).parents[2]


def main(words: list[str] | None = None, root: Path = ROOT, rooms: dict[str, Room] = ROOMS) -> int:
    parser = argparse.ArgumentParser("tools/mutate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("room", nargs="?", choices=sorted(rooms), help="the room of the sources and tests")
    parser.add_argument("--count", type=int, default=20, help="number of mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their choice (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants of files whose path has TEXT in it")
    parser.add_argument("--least-s", type=float, default=60.0, help="seconds that every mutant may take (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON array instead of a table")
    parser.add_argument("--list", action="store_true", help="list the rooms and their numbers of mutants")
    parser.add_argument(
        "--log",
        type=Path,
        default=root / ".cache/mutants.jsonl",
        help="results, which later runs on the same tree reuse (%(default)s)",
    )
    args = parser.parse_args(words)
    if args.list or not args.room:
        for name, room in sorted(rooms.items()):
            print(f"{name:<12}{len(room.mutants(root)):>6}  {' '.join(room.sources)}")
        return 0
    mutants = [one for one in rooms[args.room].mutants(root) if args.only in one.file]
    chosen = random.Random(args.seed).sample(mutants, min(args.count, len(mutants)))
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        copy = copy_tree(root, Path(directory))
        bench = Bench(copy, rooms[args.room], args.log, args.least_s)
        if why_not := bench.begin():
            print(f"mutate: {why_not}", file=sys.stderr)
            return 2
        rows = []
        for mutant in chosen:
            rows.append(row := bench.try_out(mutant))
            if not args.json:
                print(
                    f"{row['outcome']:<10}{row['file']}:{row['line']}  {row['key']}  {row['seconds']:.0f} s", flush=True
                )
    survivors = [row for row in rows if row["outcome"] == "survived"]
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print("".join(f"\n{row['key']}  {row['file']}:{row['line']}\n{row['diff']}\n" for row in survivors))
        counts = {what: sum(row["outcome"] == what for row in rows) for what in ("killed", "timed out", "survived")}
        print(", ".join(f"{count} {what}" for what, count in counts.items()), f"of {len(mutants)} in {args.room}")
    return 1 if survivors else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running tests end, too
    sys.exit(main())

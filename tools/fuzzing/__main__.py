"""Fuzzes one interface: no process may die, grow or answer wrongly. The last line is one JSON object.

    tools/fuzz channel control --count 1000000 --seed 7

The package says how to add an interface. The same count and seed send the same input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

DOORS = {  # name -> module
    "engine": "tools.fuzzing.fuzz_engine",
    "http": "tools.fuzzing.http",
    "channel": "tools.fuzzing.fuzz_channel",
    "settings": "tools.fuzzing.fuzz_settings",
    "store": "tools.fuzzing.store",
    "gguf": "tools.fuzzing.gguf",
    "recordings": "tools.fuzzing.recordings",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("door", choices=sorted(DOORS))
    parser.add_argument("what", nargs="?", default="", help="the part of it; all of them if none is named")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    door = importlib.import_module(DOORS[args.door])
    if args.what and args.what not in door.WHATS:
        parser.error(f"{args.door} has {', '.join(door.WHATS)}, not {args.what}")
    seen = door.fuzz(args.what, args.count, args.seed)
    print(json.dumps(seen))
    return 0 if seen["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Builds several boxes on one machine, runs daemons in them, and injects faults. Needs root.

    python -m tools.testbed up --boxes 3 --link 500 --set memory.ram_bytes=10MiB

`--help` lists the other verbs.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgemoe.demo import model_path
from tools.testbed.bed import NAMESPACES, PREFIX, RATE_MBIT, Bed, BedError, leftovers, sweep
from tools.testbed.daemons import Cluster
from tools.testbed.limits import Limits

VERBS = {
    "up": "builds boxes with a daemon each, until Ctrl-C, and prints their sockets for `edgemoe chat --socket`",
    "list": "prints test beds and their boxes",
    "kill": "kill b: SIGKILL to all processes of box b",
    "stop": "stop b: SIGSTOP to all processes of box b",
    "cont": "cont b: SIGCONT, after stop",
    "unplug": "unplug b: disconnects its cable",
    "plug": "plug b: connects its cable again",
    "cut": "cut a b: drops all packets from a to b",
    "mend": "undoes stop, unplug, cut and slow of all boxes",
    "slow": "slow b 20: sets its link to 20 Mbit/s",
    "down": "removes what crashed test beds left",
}
NAMES = "abcdefghijklmnopqrstuvwxyz"


def up(args: argparse.Namespace) -> None:
    limits = Limits(cpus=args.cpus, disk_bytes_per_s=int(args.disk_mb * 1e6))
    settings: dict[str, object] = {"model.path": args.model, "model.name": "m", "engine.threads": 1}
    settings |= dict(setting.split("=", 1) for setting in args.set)
    with (
        tempfile.TemporaryDirectory(prefix="edgemoe-bed-") as folder,
        Bed(NAMES[: args.boxes], args.link, limits) as bed,
        Cluster(bed, Path(folder), settings) as cluster,
    ):
        for daemon in cluster:
            print(f"{daemon.box.name}  {daemon.box.address}  {daemon.folder / 'api.sock'}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


def beds() -> list[Bed]:
    prefixes = {
        PREFIX + path.name.removeprefix(PREFIX).partition("-")[0] + "-" for path in NAMESPACES.glob(f"{PREFIX}*")
    }
    return [Bed.found(prefix) for prefix in sorted(prefixes)]


def the_bed(prefix: str) -> Bed:
    found = [bed for bed in beds() if bed.prefix.startswith(prefix)]
    if len(found) != 1:
        raise BedError(f"there are {len(found)} test beds here, not one; name one with --bed, as list does")
    return found[0]


def act(bed: Bed, verb: str, words: Sequence[str]) -> None:
    """Carries out a verb on a test bed. Raises BedError."""
    if unknown := [name for name in words[: 2 if verb == "cut" else 1] if name not in bed.boxes]:
        raise BedError(f"there is no box {unknown[0]}; there are {', '.join(bed.boxes)}")
    boxes = [bed[name] for name in words if name in bed.boxes]
    match verb, boxes:
        case "mend", []:
            bed.mend()
        case "kill", [box]:
            box.kill()
        case "stop", [box]:
            box.pause()
        case "cont", [box]:
            box.resume()
        case "unplug", [box]:
            box.link(up=False)
        case "plug", [box]:
            box.link(up=True)
        case "cut", [box, other]:
            box.cut(other)
        case "slow", [box] if len(words) == 2:
            box.rate(float(words[1]))
        case _:
            raise BedError(f"{verb} {' '.join(words)}: see --help")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.testbed",
        description=__doc__,
        epilog="\n".join(f"{verb:6}  {meaning}" for verb, meaning in VERBS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("words", nargs="*", help="boxes, a rate")
    parser.add_argument("--bed", default="", help="prefix of the test bed, if there are several")
    parser.add_argument("--boxes", type=int, default=3)
    parser.add_argument("--link", type=float, default=RATE_MBIT, help="Mbit/s of each box's link")
    parser.add_argument("--cpus", type=float, default=0.0, help="CPUs of each box")
    parser.add_argument("--disk-mb", type=float, default=0.0, help="megabytes per second that each box may read")
    parser.add_argument("--model", type=Path, default=model_path(), help="as for edgemoe serve")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all daemons")
    args = parser.parse_args(argv)
    try:
        if args.verb == "up":
            up(args)
        elif args.verb == "list":
            for bed in beds():
                print(bed.prefix, *(f"{box.name}={box.address}" for box in bed.boxes.values()))
        elif args.verb == "down":
            for prefix in leftovers():
                sweep(prefix)
        else:
            act(the_bed(args.bed), args.verb, args.words)
    except BedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Attacks a daemon and measures a victim: prints a table, and a line of JSON for each attack.

    tools/attack                                  # all of them, against a daemon of its own with the demo model
    tools/attack --only "long prompts" --rounds 5
    tools/attack --address HOST:PORT --victim KEY --attacker KEY    # against a running daemon

The attacker has a lower priority than its victim. One without any answer has not attacked.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from rich.console import Console
from rich.table import Table

from tools.attacking.attacked import ATTACKER, VICTIM, Attacked, attacked_daemon
from tools.attacking.measuring import Measured, measure, p99
from tools.attacking.with_key import KEYED
from tools.attacking.without_key import KEYLESS

ATTACKS = (*KEYED, *KEYLESS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ATTACKS, help="an attack; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of each of the victim's answers")
    parser.add_argument("--width", type=int, default=0, help="of the started daemon's experts, which sets its speed")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting of the started daemon")
    parser.add_argument("--address", default="", help="HOST:PORT of a running daemon, with --victim and --attacker")
    parser.add_argument("--victim", default="", help="a key of it")
    parser.add_argument("--attacker", default="", help="another key of it")
    return parser.parse_args()


def show(found: list[Measured]) -> None:
    """Prints a table with a row for each attack."""
    table = Table(
        "attack",
        "answered",
        "alone: p99",
        "beside one",
        "under: p99",
        "times",
        "of share",
        "engine",
        "front",
        "new connection",
        "recovers",
        "log",
        "engines",
        "wrong",
    )
    for one in found:
        table.add_row(
            one.attack,
            str(sum(one.answers.values())),
            f"{1e3 * p99(one.alone_s):.1f} ms",
            f"{1e3 * p99(one.beside_s):.1f} ms",
            f"{1e3 * p99(one.under_s):.1f} ms",
            f"{one.ratio:.2f}",
            f"{one.ratio_to_share:.2f}",
            f"{one.engine_before_mb:.0f}, {one.engine_mb:.0f} MB",
            f"{one.front_mb:.0f} MB",
            f"{one.fresh_s:.1f} s",
            f"{one.recover_s:.1f} s",
            str(one.log_lines),
            str(one.engines),
            str(one.wrong),
        )
    Console(width=140).print(table)


def main() -> int:
    options = arguments()
    given = Attacked(options.address, {VICTIM: options.victim, ATTACKER: options.attacker})
    held = contextlib.closing(given) if options.address else attacked_daemon(tuple(options.sets), options.width)
    found = list[Measured]()
    with held as attacked:
        for attack in options.only or ATTACKS:
            found.append(measure(attack, attacked, options.rounds, options.tokens))
            print(found[-1].as_json(), flush=True)
    show(found)
    return int(any(one.wrong or one.engines > 1 for one in found))


if __name__ == "__main__":
    sys.exit(main())

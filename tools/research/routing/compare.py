"""Which engine runs which request: studies of the routing policies that the daemon has.

    python -m tools.research.routing.compare --study eldr DATA  # decode workers, by experts [ELDR]
    python -m tools.research.routing.compare --study gimbal DATA  # whole engines: TTFT, TPOT and prefix hits [Gimbal]
    python -m tools.research.routing.compare --study both DATA  # whole engines whose steps take what their experts do
    python -m tools.research.routing.compare --study known DATA  # the same, by what is known of a request
    python -m tools.research.routing.compare --study residency DATA # decode workers with half of the experts
    python -m tools.research.routing.compare --study ablation DATA  # the default policy, and each part of it left out

DATA holds the routing tables, the traces of arrivals and what LLMServingSim measured. The clock is simulated, so other
work on the machine changes no figure. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.research.routing import (
    routing_ablation,
    routing_both,
    routing_eldr,
    routing_gimbal,
    routing_known,
    routing_residency,
)

STUDIES: dict[str, Callable[[Path, range], dict[str, Any]]] = {
    "eldr": routing_eldr.study,
    "gimbal": routing_gimbal.study,
    "both": routing_both.study,
    "known": routing_known.study,
    "residency": routing_residency.study,
    "ablation": routing_ablation.study,
}
console = Console(stderr=True, width=200)


def show(name: str, found: Any) -> None:
    """Prints rows as a table, and what holds tables one by one."""
    if isinstance(found, dict) and any(isinstance(value, dict | list) for value in found.values()):
        for key, value in found.items():
            show(f"{name}: {key}" if name else key, value)
    elif isinstance(found, list) and found and isinstance(found[0], dict):
        table = Table(title=name)
        for column in found[0]:
            table.add_column(column, justify="right")
        for row in found:
            table.add_row(*(str(value) for value in row.values()))
        console.print(table)
    else:
        console.print(f"{name}: {found}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--study", choices=sorted(STUDIES), required=True)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no tables")
    args = parser.parse_args(argv)
    found = STUDIES[args.study](args.data, range(args.first, args.first + args.seeds))
    if not args.json:
        show("", found)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

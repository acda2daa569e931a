"""Studies of the daemon's routing policies, on a simulated clock that other work on the machine does not disturb.

    python -m tools.research.routing.compare --study ablation DATA

STUDIES lists the others. DATA holds the routing tables, the traces of arrivals and LLMServingSim's measurements. The
last line is one JSON object.
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
    "eldr": routing_eldr.study,  # decode workers, by experts [ELDR]
    "gimbal": routing_gimbal.study,  # whole engines: TTFT, TPOT and prefix hits [Gimbal]
    "both": routing_both.study,  # whole engines whose steps take the time of their experts
    "known": routing_known.study,  # the same, by the knowledge of a request
    "residency": routing_residency.study,  # decode workers with half of the experts
    "ablation": routing_ablation.study,  # the default policy without each of its parts
}
console = Console(stderr=True, width=200)


def show(name: str, found: Any) -> None:
    """Prints rows as a table, and nested tables one by one."""
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

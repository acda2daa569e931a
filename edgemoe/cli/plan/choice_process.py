"""Prints the planner's choice of an encoding: a process of its own, because it loads torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edgemoe.cli.plan.plan_command import chosen_here
from edgemoe.config.loading import load
from edgemoe.errors import EdgemoeError


def main() -> None:
    """Prints the choice for a model as JSON, for `edgemoe.cli.auto_encoding`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("--config", default="")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    settings = load(Path(args.config) if args.config else None, args.set).settings
    try:
        offer, why = chosen_here(args.model, settings)
    except EdgemoeError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"experts": offer.packing.removeprefix("--experts ") or "keep", "why": why}))


if __name__ == "__main__":
    main()

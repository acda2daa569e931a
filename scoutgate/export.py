"""Exports a trained ScoutGate for a daemon.

`python -m scoutgate.export --run DIR --data DIR --model DIR --to DIR` calibrates the best weights on the validation
split and judges them on the test split. `edgemoe.experts.predict.scoutgate_model` reads the export.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edgemoe.errors import EdgemoeError
from edgemoe.experts.predict.scoutgate_model import RECORD, WEIGHTS, write_export
from edgemoe.rights import become_owner
from scoutgate.evaluate import judge_run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scoutgate.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="training folder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="checkpoint or store of the recorded model")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    try:
        become_owner(options.to)
        judged = judge_run(options.run, options.data, options.model)
    except (ValueError, EdgemoeError) as error:
        raise SystemExit(str(error)) from error
    write_export(options.to, judged.gate, judged.calibration, judged.model, judged.metrics)
    print(f"wrote {options.to / WEIGHTS} and {options.to / RECORD}")


if __name__ == "__main__":
    main()

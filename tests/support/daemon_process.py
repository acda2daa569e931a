"""A daemon in a process of its own, with the scripted engine: `daemon_process.py SETTINGS_JSON`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
ENGINE = (sys.executable, str(Path(__file__).parent / "scripted_engine.py"))

if __name__ == "__main__":
    from edgemoe.config.settings import Settings
    from edgemoe.errors import EdgemoeError
    from edgemoe.front import main as daemon

    logging.basicConfig(level=logging.INFO)
    try:
        sys.exit(daemon.run(msgspec.json.decode(sys.argv[1], type=Settings), ENGINE))
    except EdgemoeError as error:
        sys.exit(f"{type(error).__name__}: {error}")

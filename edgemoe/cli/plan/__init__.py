"""Works out before a download whether a model fits, and how fast it will be: `edgemoe plan`."""

from __future__ import annotations

import argparse
import os
import time

from edgemoe.jit.env import WORKER_ENV


def run(args: argparse.Namespace) -> int:
    """Runs `edgemoe plan` with threads that wait as an engine's do, which is settled when torch is loaded."""
    began_s = time.monotonic()
    os.environ.update(WORKER_ENV)
    from edgemoe.jit.compile_target import check_processor

    check_processor()
    from edgemoe.cli.plan.plan_command import run as plan

    return plan(args, began_s)

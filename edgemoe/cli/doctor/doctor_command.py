"""Runs `edgemoe doctor`: every check, a line each, with the remedy of a fault."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from edgemoe.cli.client import socket_of
from edgemoe.cli.doctor import checks
from edgemoe.cli.doctor.checks import REMEDIES, CheckResult
from edgemoe.cli.doctor.cluster_checks import etcd_programs, stages
from edgemoe.cli.output import console
from edgemoe.cli.plan.disk import disk_rate
from edgemoe.config.loading import load
from edgemoe.config.paths import beside
from edgemoe.config.settings import Settings
from edgemoe.errors import ConfigError, EdgemoeError
from edgemoe.front.start_note import noted_start
from edgemoe.rights import become_owner
from edgemoe.telemetry import probes

COLOURS = {"pass": "green", "warning": "yellow", "failure": "red"}


def run(args: argparse.Namespace) -> int:
    """Prints the result of every check. Returns 1 if any is a failure."""
    found = list(examine(args))
    if args.json:
        rows = [asdict(each) | ({} if each.state == "pass" else {"remedy": REMEDIES[each.check]}) for each in found]
        print(json.dumps(rows, indent=2))
    else:
        console().print(picture(found))
    return int(any(each.state == "failure" for each in found))


def examine(args: argparse.Namespace) -> Iterator[CheckResult]:
    """Checks everything that the settings name. No finding holds keys or users' text."""
    yield from run_check("versions", checks.software)
    yield from run_check("processor", checks.processor)
    machine = probes.probe_machine(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield from run_check("gpu", lambda: checks.gpus(machine))
    yield from run_check("memory", lambda: checks.memory(machine))
    try:
        loaded = load(Path(args.config) if args.config else None, args.set)
        path = socket_of(args)
    except (ConfigError, OSError) as error:
        yield CheckResult("settings", "failure", str(error))
        return
    settings = loaded.settings
    become_owner(Path(settings.model.store_dir), env=os.environ)  # a test file is written there, and all is read
    files = ", ".join(map(str, loaded.files)) or "no file; all defaults"
    yield CheckResult("settings", "pass", files)
    yield from run_check("disk", lambda: checks.disk(served_folder(settings), disk_rate))
    yield from run_check("clock", lambda: checks.clock(checks.dated(settings), time.time()))
    yield from run_check("store", lambda: checks.stores(settings, verify=args.verify))
    yield from run_check("keys", lambda: checks.keys(loaded))
    yield from run_check("model", lambda: checks.model(loaded))
    yield from run_check("device", lambda: checks.devices(settings, machine))
    yield from run_check("memory", lambda: checks.budgets(settings, machine))
    yield from run_check("kernels", lambda: checks.kernels(settings))
    yield from run_check("open-files", lambda: checks.open_files(settings))
    found, health = checks.daemon(path)
    yield from run_check("port", lambda: checks.port(settings, runs=bool(health or noted_start(beside(path)))))
    yield from found
    yield from run_check("unit", checks.unit)
    yield from run_check("peer-list", lambda: checks.boxes(settings.cluster, health))
    yield from run_check("stages", lambda: stages(health))
    yield from run_check("etcd", lambda: etcd_programs(settings.cluster))


def served_folder(settings: Settings) -> Path:
    """Returns the folder that has the served store, or in which stores are kept."""
    path = Path(settings.model.path)
    return path.parent if path.is_absolute() and path.exists() else Path(settings.model.store_dir)


def run_check(name: str, check: Callable[[], Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """Yields the results of one check. A check that raises yields a failure; the other checks go on."""
    try:
        yield from check()
    except PermissionError as error:
        yield CheckResult("permission", "warning", f"{name}: you may not look at {error.filename}")
    except (EdgemoeError, OSError, LookupError, TypeError, ValueError) as error:
        yield CheckResult(name, "failure", f"it cannot be looked at: {error or type(error).__name__}")


def picture(found: list[CheckResult]) -> Table:
    """Returns a line for each finding, with its remedy."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for each in found:
        remedy = "" if each.state == "pass" else f"\n{REMEDIES[each.check]}"
        table.add_row(Text(each.state, COLOURS[each.state]), Text(each.check, "bold"), f"{each.said}{remedy}")
    return table

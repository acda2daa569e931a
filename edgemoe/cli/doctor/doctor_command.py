"""Runs `edgemoe doctor`: every check, a line each, with the remedy of a fault. Checks of a cluster are here."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from edgemoe.cli.client import socket_of
from edgemoe.cli.doctor import checks
from edgemoe.cli.doctor.checks import REACH_S, REMEDIES, CheckResult
from edgemoe.cli.output import console
from edgemoe.cli.plan.disk import disk_rate
from edgemoe.cluster.control.coordination.etcd_process import find_program
from edgemoe.config.loading import load
from edgemoe.config.paths import beside
from edgemoe.config.settings import ClusterSettings, Settings
from edgemoe.errors import ConfigError, EdgemoeError
from edgemoe.front.start_note import noted_start
from edgemoe.rights import become_owner
from edgemoe.telemetry import probes
from edgemoe.types.json_object import Json
from edgemoe.types.stages import Stage


def etcd_programs(settings: ClusterSettings) -> Iterator[CheckResult]:
    """Checks the programs that a voter runs."""
    if not settings.node or settings.coordination != "raft" or settings.join:
        return
    if not (program := find_program(settings.etcd_program)):
        yield CheckResult("etcd", "failure", f"no program {settings.etcd_program or 'etcd'}: this box has no vote")
        return
    try:
        said = subprocess.run(
            [program, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=REACH_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        yield CheckResult("etcd", "failure", f"{program} cannot be run: {error}")
        return
    version = re.search(r"etcd Version: (\d+)\.(\d+)\S*", said)
    if version is None or (int(version[1]), int(version[2])) < (3, 4):
        yield CheckResult("etcd", "failure", f"{program} is {version[0] if version else 'no etcd'}, not 3.4 or newer")
    elif shutil.which("openssl") is None:
        yield CheckResult("etcd", "failure", "no program openssl, which makes this box's certificate for etcd")
    else:
        yield CheckResult("etcd", "pass", f"{program}, {version[0]}")


def stages(health: Json) -> Iterator[CheckResult]:
    """Checks that each box with a part of the layers is here and answers, as the daemon reports."""
    for stage in (health.get("cluster") or {}).get("stages", []):
        is_here = stage["state"] == "here" and stage["answers"] is not False
        layers = Stage(stage["node"], stage["first"], stage["last"] + 1)
        trouble = "" if is_here else ", and does not answer: no request can be computed"
        yield CheckResult("stages", "pass" if is_here else "failure", f"{stage['node']} holds {layers}{trouble}")


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

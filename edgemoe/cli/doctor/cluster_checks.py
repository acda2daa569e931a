"""The checks of a cluster: the programs that a voter runs, and the boxes among which a model's layers are divided."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

from edgemoe.cli.doctor.checks import REACH_S, CheckResult
from edgemoe.cluster.control.coordination.etcd_process import find_program
from edgemoe.config.settings import ClusterSettings
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

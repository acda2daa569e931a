"""The check of the programs that a voter of a cluster runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

from edgemoe.cli.doctor.checks import REACH_S, CheckResult
from edgemoe.cluster.control.coordination.etcd_process import find_program
from edgemoe.config.settings import ClusterSettings


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

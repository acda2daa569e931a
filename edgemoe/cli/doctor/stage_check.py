"""The check of the boxes among which a model's layers are divided."""

from __future__ import annotations

from collections.abc import Iterator

from edgemoe.cli.doctor.checks import CheckResult
from edgemoe.types.json_object import Json
from edgemoe.types.stages import Stage


def stages(health: Json) -> Iterator[CheckResult]:
    """Checks that each box with a part of the layers is here and answers, as the daemon reports."""
    for stage in (health.get("cluster") or {}).get("stages", []):
        is_here = stage["state"] == "here" and stage["answers"] is not False
        layers = Stage(stage["node"], stage["first"], stage["last"] + 1)
        trouble = "" if is_here else ", and does not answer: no request can be computed"
        yield CheckResult("stages", "pass" if is_here else "failure", f"{stage['node']} holds {layers}{trouble}")

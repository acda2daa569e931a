"""NVIDIA's management library with one GPU that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


def install(patch: Any = setattr, **link: int) -> None:
    """Puts it in the place of the real one, through `patch(object, name, value)`."""
    has = {"generation": 4, "width": 16, "most_generation": 4, "most_width": 16, "state": 0} | link
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetName": "Made Up 4090",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GIB, free=20 * GIB),
        "nvmlDeviceGetCurrPcieLinkGeneration": has["generation"],
        "nvmlDeviceGetCurrPcieLinkWidth": has["width"],
        "nvmlDeviceGetMaxPcieLinkGeneration": has["most_generation"],
        "nvmlDeviceGetMaxPcieLinkWidth": has["most_width"],
        "nvmlDeviceGetPerformanceState": has["state"],
    }
    for name, answer in answers.items():
        assert hasattr(pynvml, name)
        patch(pynvml, name, lambda *_, answer=answer: answer)

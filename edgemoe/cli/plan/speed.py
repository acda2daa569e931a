"""How fast a model will be, from rates of the machine and what memory holds of its experts. Pure.

A step takes what its layers take with every expert in memory, and what missing experts take on their way. How many
are missing is read from a curve that was fixed before, from other models' routing: the mean miss ratio of the policy
`learned` on recordings of DeepSeek-V2-Lite and GPT-OSS-20B, as in tools/bench/results/cache_replay.md. A model whose
gates choose evenly, as random weights do, misses what is not held: `even`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.experts.compute.cpu_experts import WORTH_S

HELD = (0.0, 0.10, 0.25, 0.50, 0.75, 1.0)
MISSES = {"usual": (1.0, 0.55, 0.31, 0.13, 0.04, 0.0), "even": tuple(1 - held for held in HELD)}
READ_AT_ONCE = (1, 2, 4, 8)  # experts; more are read one after the other
STEP_S = 1.4e-3  # of a step that no layer takes: scheduling, sampling, and messages; on two cores of an EPYC
REMOTE_S = 1e-3  # that a layer waits for the boxes it calls, side by side


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step of one kind has to do. `layer_s` is of one layer with every expert in memory."""

    tokens: int  # in the step
    layer_s: float
    head_s: float
    read_bytes: float  # of keys and values of the context so far


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes that speed depends on."""

    layers: int  # with experts
    experts: int  # of a layer
    top_k: int
    expert_bytes: int


@dataclass(frozen=True, slots=True)
class Places:
    """Shares of all experts in each tier, and how fast those below move."""

    top: float  # held where they are computed
    ram: float  # held in RAM; the same as `top` without a device of its own memory
    link_bytes_per_s: float  # RAM to device; 0: there is none
    disk_s: tuple[float, ...]  # that READ_AT_ONCE experts take from the disk; (): none is read from there
    memory_bytes_per_s: float
    boxes: int = 1


@dataclass(frozen=True, slots=True)
class Times:
    """Where the seconds of a step go."""

    compute_s: float
    link_s: float
    disk_s: float
    boxes_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.link_s + self.disk_s + self.boxes_s

    @property
    def limit(self) -> str:
        """Returns what takes most of it."""
        parts = {
            "memory and processor": self.compute_s,
            "link": self.link_s,
            "disk": self.disk_s,
            "boxes": self.boxes_s,
        }
        return max(parts, key=lambda name: parts[name])


def step(model: Model, work: StepWork, places: Places, curve: str) -> Times:
    """Returns the seconds of one step."""
    touched = model.layers * distinct(model, work.tokens)
    held, below = min(1.0, places.top * places.boxes), min(1.0, places.ram * places.boxes)
    missed, absent = touched * _missed(held, curve), touched * _missed(below, curve)
    compute_s = STEP_S + model.layers * work.layer_s + work.head_s + work.read_bytes / places.memory_bytes_per_s
    link_s = 0.0
    if places.link_bytes_per_s:
        by_link_s = missed / model.layers * model.expert_bytes / places.link_bytes_per_s
        link_s = model.layers * min(by_link_s, WORTH_S)  # from there on the CPU computes what is in RAM
    disk_s = model.layers * read_s(absent / model.layers, places.disk_s) if places.disk_s else 0.0
    boxes_s = model.layers * REMOTE_S if places.boxes > 1 and places.top < 1 else 0.0
    return Times(compute_s, link_s, disk_s, boxes_s)


def read_s(experts: float, disk_s: Sequence[float]) -> float:
    """Returns the seconds of reading so many experts that a layer lacks: few at once do not keep a disk busy."""
    most = READ_AT_ONCE[-1]
    if experts > most:
        return disk_s[-1] * experts / most
    return float(np.interp(experts, (0, *READ_AT_ONCE), (0.0, *disk_s)))


def distinct(model: Model, tokens: int) -> float:
    """Returns how many experts of a layer so many tokens touch, on average, where they choose evenly."""
    return model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)


def _missed(held: float, curve: str) -> float:
    return float(np.interp(held, HELD, MISSES[curve]))

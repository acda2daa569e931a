"""Memory, cores and GPUs that a process may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A GPU's link to the host: its present speed, and the highest that GPU and slot agree on."""

    generation: int
    lanes: int
    most_generation: int
    most_lanes: int
    idle: bool  # when GPUs lower the generation to save power


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, numbered as this process will see it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    link: PcieLink | None = None  # None: the driver does not say


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory, cores and GPUs that this process may use, at the time of the probe."""

    ram_total_bytes: int
    ram_available_bytes: int
    cpus: int
    memlock_bytes: int | None  # how much it may lock (pin); None: no limit
    gpus: tuple[Gpu, ...] = ()

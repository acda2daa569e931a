"""Looks at the box itself: software, GPU, memory, disk, clock, store, keys."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import edgemoe
from edgemoe.api.keys import read_keys
from edgemoe.cli.doctor.remedies import Finding, State
from edgemoe.cluster.rpc.keys import load_secret
from edgemoe.config.loading import Loaded
from edgemoe.config.settings import Settings
from edgemoe.config.sizes import format_rate, format_size
from edgemoe.errors import EdgemoeError, UnsupportedProcessor
from edgemoe.store import catalog
from edgemoe.store.manifest import MANIFEST, Manifest
from edgemoe.types.machine import Machine

LEAST_FREE, ENOUGH_FREE = 0.05, 4 << 30  # share and bytes of the disk of the stores; either will do
SLOW_BYTES_PER_S = 400e6  # below it a miss takes longer than most models' layers
LEAST_RAM_BYTES = 2 << 30
USUAL_LOCKED_BYTES = 8 << 20  # may be locked where nobody has set less
AHEAD_S = 60.0  # that a file may be from the future
DRIVER = Path("/proc/driver/nvidia/version")


def software() -> Iterator[Finding]:
    """Versions of Python, edgemoe and what it needs."""
    missing = []
    try:
        required = importlib.metadata.requires("edgemoe") or ()
    except importlib.metadata.PackageNotFoundError:
        said = f"edgemoe {edgemoe.__version__} runs from the source tree {Path(edgemoe.__file__).parents[1]}"
        yield Finding("versions", "warning", f"{said} and is not installed, so what it needs was not looked at")
        required = ()
    for line in required:
        name = re.match(r"[\w.-]+", line)
        if name and "extra ==" not in line and not _version(name[0]):
            missing.append(name[0])
    said = f"edgemoe {edgemoe.__version__}, Python {platform.python_version()}, torch {_version('torch') or 'missing'}"
    if missing:
        yield Finding("versions", "failure", f"{said}; not installed: {', '.join(missing)}")
    else:
        yield Finding("versions", "pass", said)


def processor() -> Iterator[Finding]:
    """Whether kernels can run here."""
    try:
        from edgemoe.jit.target import TARGET, check_processor  # loads LLVM

        check_processor()
    except UnsupportedProcessor as error:
        yield Finding("processor", "failure", str(error))
    else:
        yield Finding("processor", "pass", f"code is compiled for {TARGET.name}")


def gpus(machine: Machine) -> Iterator[Finding]:
    """GPUs, and whether torch can use them."""
    if machine.gpus:
        names = ", ".join(f"{gpu.name} ({format_size(gpu.free_bytes)} free)" for gpu in machine.gpus)
        usable = "+cpu" not in _version("torch")
        yield Finding(
            "gpu", "pass" if usable else "failure", names + ("" if usable else "; torch is built without CUDA")
        )
        yield from links(machine)
    elif DRIVER.exists():
        yield Finding("gpu", "failure", "there is a driver, and no GPU that this process may use")
    else:
        yield Finding("gpu", "pass", "none; experts are computed by the CPU")


def links(machine: Machine) -> Iterator[Finding]:
    """Each GPU's link to the host, which every expert that is not on it goes over."""
    for gpu in machine.gpus:
        if (link := gpu.link) is None:
            yield Finding("gpu-link", "pass", f"the driver does not tell {gpu.name}'s link")
            continue
        slow = link.lanes < link.most_lanes or (link.generation < link.most_generation and not link.idle)
        said = f"{gpu.name}: PCIe {link.generation} x{link.lanes} of {link.most_generation} x{link.most_lanes}"
        said += ", idle" if link.idle else ""
        yield Finding("gpu-link", "warning" if slow else "pass", said)


def memory(machine: Machine) -> Iterator[Finding]:
    """RAM that is free for this process, and how much of it may be locked."""
    free, total = machine.ram_available_bytes, machine.ram_total_bytes
    said = f"{format_size(free)} of {format_size(total)} free, {machine.cpus} cores"
    yield Finding("memory", "pass" if free >= LEAST_RAM_BYTES else "warning", said)
    limit = machine.memlock_bytes
    if limit is None or limit >= total // 2:
        yield Finding("memlock", "pass", "no limit" if limit is None else format_size(limit))
    else:
        state: State = "warning" if machine.gpus or limit < USUAL_LOCKED_BYTES else "pass"
        said = f"{format_size(limit)} may be locked" + ("; copies to a GPU are slower" if machine.gpus else "")
        yield Finding("memlock", state, said)


def disk(store_dir: Path, rate: Callable[[Path], float]) -> Iterator[Finding]:
    """Room and speed where the stores lie. `rate` measures bytes a second."""
    place = next(each for each in (store_dir, *store_dir.parents) if each.exists())
    found = os.statvfs(place)
    free, total = found.f_bavail * found.f_frsize, max(1, found.f_blocks * found.f_frsize)
    said = f"{format_size(free)} of {format_size(total)} free at {place}"
    if free < min(LEAST_FREE * total, ENOUGH_FREE):
        yield Finding("disk", "failure", said)
        return
    yield Finding("disk", "pass", said)
    if not os.access(place, os.W_OK):
        yield Finding("disk-rate", "warning", f"{place} may not be written, so that its speed is not measured")
    elif bytes_per_s := rate(place):
        slow = bytes_per_s < SLOW_BYTES_PER_S
        yield Finding("disk-rate", "warning" if slow else "pass", f"reads {format_rate(bytes_per_s)} at {place}")


def clock(files: Iterator[Path], now_s: float) -> Iterator[Finding]:
    """Whether this box's files are older than now."""
    ahead = {file: file.stat().st_mtime - now_s for file in files if file.exists()}
    latest = max(ahead, key=lambda file: ahead[file], default=None)
    if latest is not None and ahead[latest] > AHEAD_S:
        yield Finding("clock", "failure", f"it is at least {ahead[latest]:,.0f} s behind: {latest} is from the future")
    else:
        yield Finding("clock", "pass", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_s)))


def stores(settings: Settings, *, verify: bool) -> Iterator[Finding]:
    """The store that is served, or all of them: sizes, and with `verify` every checksum."""
    path = Path(settings.model.path)
    found = [path] if settings.model.path and catalog.is_store(path) else catalog.find_stores(settings.model.store_dir)
    for store in found:
        if not (store / MANIFEST).is_file():
            yield Finding("store", "warning", f"{store.name} is {catalog.UNFINISHED}")
            continue
        try:
            faults: list[EdgemoeError] = [*catalog.verify(store)] if verify else []
            if not verify:
                Manifest.load(store)
        except EdgemoeError as error:
            faults = [error]
        if faults:
            yield Finding("store", "failure", str(faults[0]))
        else:
            yield Finding(
                "store", "pass", f"{store.name} is {'whole' if verify else 'complete; --verify reads it all'}"
            )


def keys(loaded: Loaded) -> Iterator[Finding]:
    """The files of keys, as far as the settings use them. The default file is made by `edgemoe serve`."""
    api, cluster = loaded.settings.api, loaded.settings.cluster
    readers: list[tuple[Path, Callable[[Path], object]]] = []
    there = Path(api.api_key_file).exists()
    if api.tcp and not there and loaded.origins["api.api_key_file"] == "default":
        yield Finding("keys", "pass", f"`edgemoe serve` makes {api.api_key_file}")
    elif there or api.tcp:
        readers.append((Path(api.api_key_file), read_keys))
    if cluster.node:
        readers.append((Path(cluster.key_file), load_secret))
    for file, read in readers:
        try:
            read(file)
        except EdgemoeError as error:
            yield Finding("keys", "failure", str(error))
        else:
            yield Finding("keys", "pass", f"{file} is private")


def dated(settings: Settings) -> Iterator[Path]:
    """Files that were written in the past."""
    yield Path(edgemoe.__file__)
    stores_found = catalog.find_stores(settings.model.store_dir)
    yield from (store / MANIFEST for store in (*stores_found, Path(settings.model.path or "/nowhere")))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

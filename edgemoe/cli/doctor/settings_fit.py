"""Looks whether the settings ask for what this box has: addresses, folders, devices, memory, open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from edgemoe.cli.doctor.remedies import Finding
from edgemoe.config.loading import Loaded
from edgemoe.config.settings import Settings
from edgemoe.config.sizes import format_size
from edgemoe.errors import CheckpointError, ServiceError, StoreError
from edgemoe.front.listen import bound_socket
from edgemoe.store.catalog import demand_path, missing_part, resolve
from edgemoe.types.machine import Machine

LEAST_FILES = 1024  # each client and each file of a store is one
OTHERS_MAY_WRITE = 0o022


def port(settings: Settings, *, runs: bool) -> Iterator[Finding]:
    """The address of api.tcp, where no daemon of these settings has it: it must be free."""
    if not settings.api.tcp or runs:
        return
    try:
        bound_socket(settings.api.tcp).close()
    except ServiceError as error:
        yield Finding("port", "failure", str(error))
    else:
        yield Finding("port", "pass", f"{settings.api.tcp} is free")


def model(loaded: Loaded) -> Iterator[Finding]:
    """Whether model.path and model.store_dir are there. A folder of stores that is the default is made when needed."""
    named, store_dir = loaded.settings.model, Path(loaded.settings.model.store_dir)
    missing = missing_part(store_dir.parent)
    if missing and loaded.origins["model.store_dir"] != "default":
        yield Finding("model", "failure", f"model.store_dir is {store_dir}, but {missing} is missing")
    if not named.path:
        return
    path = Path(named.path).expanduser()
    try:
        if path != Path(path.name):
            demand_path(path)
        elif not path.exists():
            path = resolve(named.path, store_dir)
    except (CheckpointError, StoreError) as error:
        yield Finding("model", "failure", f"model.path: {error}")
    else:
        yield Finding("model", "pass", f"model.path is {path}")


def devices(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Whether each GPU that is named is there."""
    for number, device in enumerate(settings.device):
        kind, _, index = device.kind.partition(":")
        if kind == "cuda" and int(index or 0) >= len(machine.gpus):
            there = ", ".join(f"cuda:{gpu.index}" for gpu in machine.gpus) or "none"
            yield Finding("device", "failure", f"device.{number}.kind is {device.kind}; GPUs here: {there}")


def budgets(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Whether the memory that the settings name is there at all."""
    memory, total = settings.memory, machine.ram_total_bytes
    asked = {f"memory.{name}": getattr(memory, name) or 0 for name in ("ram_bytes", "kv_bytes")}
    named = " and ".join(f"{key} ({format_size(size)})" for key, size in asked.items() if size)
    if sum(asked.values()) > total:
        yield Finding("memory", "failure", f"{named} are more than the {format_size(total)} that this box has")


def kernels(settings: Settings) -> Iterator[Finding]:
    """Whether compiled kernels can be kept: nobody else may write their folder."""
    folder = Path(settings.model.store_dir).with_name("kernels")
    if not folder.exists():
        return
    status = folder.stat()
    if status.st_mode & OTHERS_MAY_WRITE:
        yield Finding("kernels", "warning", f"others can write {folder}, so kernels are compiled at each start")
    elif status.st_uid != os.geteuid():
        yield Finding("kernels", "pass", f"{folder} belongs to another user, whose daemon keeps kernels there")
    else:
        yield Finding("kernels", "pass", f"{folder} is private")


def open_files(settings: Settings) -> Iterator[Finding]:
    """Whether as many files may be open as clients and stores take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(LEAST_FILES, settings.api.max_connections)
    if hard != resource.RLIM_INFINITY and hard < least:
        yield Finding("open-files", "failure", f"{hard} files may be open at once; the daemon needs {least}")
    else:
        yield Finding("open-files", "pass", "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} at once")

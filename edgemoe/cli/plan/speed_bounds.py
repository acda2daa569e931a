"""Finds the bounds of a running daemon's speed, for `edgemoe bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from edgemoe.cli.plan import speed
from edgemoe.cli.plan.compiled_kernels import encodings_of
from edgemoe.cli.plan.disk import read_times
from edgemoe.cli.plan.measure import decode_times, memory_rate
from edgemoe.cli.plan.speed import ModelVariant, find_model, model_of, rest_bytes
from edgemoe.config.budgets import devices_of, runs_on_gpu
from edgemoe.config.settings import Settings
from edgemoe.errors import EdgemoeError, StoreError
from edgemoe.store.catalog import find_stores, is_store
from edgemoe.store.manifest import Manifest
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry import probes
from edgemoe.telemetry.metrics import select
from edgemoe.types.json_object import Json
from edgemoe.worker.model_preparation import link_kernels


@dataclass(frozen=True, slots=True)
class SpeedBound:
    """The speed of one number of streams: seconds a token, tokens a second of all, and the step's longest part."""

    streams: int
    per_output_token_s: float
    tokens_per_s: float
    limit: str


def bounds(
    settings: Settings, model: Json, metrics: Mapping[str, float], streams: Sequence[int], context_tokens: int
) -> list[SpeedBound]:
    """Returns the bounds of a daemon's model, as its /health and /metrics tell of it, on a machine that is idle.

    Raises StoreError if its store is not found, its experts are on a GPU, or a disk cannot be measured. Raises
    CapacityError if there is not enough memory to measure.
    """
    machine = probes.probe_machine(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    if runs_on_gpu(devices_of(settings, machine)):
        raise StoreError("bounds are known for CPUs only, and these experts run on a GPU")
    (variant,) = find_model(
        str(served_store(settings, str(model["digest"]))), Path(settings.model.store_dir)
    ).variants()
    threads = settings.engine.threads or machine.cpus
    torch.set_num_threads(threads)
    bf16, encodings = variant.spec.dtype == "bfloat16", encodings_of(variant.spec)
    kernels = link_kernels(settings, threads, bf16, lambda *_: None, encodings)
    places = _places_of(settings, variant, metrics, memory_rate(kernels.pool))
    rest_s = rest_bytes(variant) / places.memory_bytes_per_s
    read_bytes = variant.spec.kv_layout.held_bytes(context_tokens // 2)
    found = []
    for count, layer_s in zip(streams, decode_times(variant.spec, kernels, streams), strict=True):
        work = speed.StepWork(count, layer_s, rest_s, count * read_bytes)
        times = speed.step(model_of(variant), work, places, "usual")
        found.append(SpeedBound(count, times.total_s, count / times.total_s, times.limit))
    return found


def served_store(settings: Settings, digest: str) -> Path:
    """Returns the store of that content. Raises StoreError."""
    named = Path(settings.model.path or "/nowhere")
    for store in ([named] if is_store(named) else []) + find_stores(settings.model.store_dir):
        try:
            if Manifest.read(store).digest == digest:
                return store
        except (EdgemoeError, OSError):  # another one, unfinished or damaged
            continue
    raise StoreError(
        f"the daemon's store is not in {settings.model.store_dir}; name the daemon's settings with --config"
    )


def _places_of(
    settings: Settings, variant: ModelVariant, metrics: Mapping[str, float], memory_bytes_per_s: float
) -> speed.TierShares:
    count = variant.spec.geometry.count
    ram, vram = (min(1.0, select(metrics, names.TIER_SLOTS, tier=tier) / count) for tier in ("ram", "vram"))
    link = settings.device[0].link_bytes_per_s or select(metrics, names.LINK_RATE, link="0")
    size, directory = variant.spec.geometry.largest_bytes, Path(settings.model.store_dir)
    (disk_s,) = read_times(directory, [size], speed.READ_AT_ONCE) if ram < 1 else [()]
    if ram < 1 and not disk_s:
        raise StoreError(f"the disk of {directory} was not measured: it may not be written to, or is full")
    return speed.TierShares(vram or ram, ram, link if vram else 0.0, disk_s, memory_bytes_per_s)

"""Reads facts about a model from its store, and the memory that models may take."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgemoe.api.resources import StoreFacts
from edgemoe.config.budgets import VRAM_HEADROOM_BYTES, devices_of
from edgemoe.config.settings import Settings
from edgemoe.errors import EdgemoeError
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import dense_shapes, row_tables
from edgemoe.policy.model_memory import ModelMemory
from edgemoe.store.catalog import resolve
from edgemoe.store.manifest import MANIFEST, Manifest, served_info, spec_of
from edgemoe.telemetry.probes import probe_machine
from edgemoe.types.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Describes a model by its store, whether it is loaded or not."""

    path: str  # of its store, as far as that is known
    store: StoreFacts = field(default_factory=StoreFacts)
    info: ModelInfo | None = None  # None where the store cannot be read
    context_tokens: int = 0
    dense_bytes: int = 0  # of all weights except the experts
    table_bytes: int = 0  # of tables whose rows are read from disk


def facts_of(settings: Settings) -> ModelFacts:
    """Returns the facts about the model of these settings, which may name its store by a path or a name."""
    path = Path(settings.model.path).expanduser()
    try:
        if not path.exists():
            path = resolve(settings.model.path, settings.model.store_dir)
        manifest = Manifest.read(path)
        spec = replace(spec_of(manifest), kv_int8=settings.engine.kv_cache_dtype == "int8")
    except (EdgemoeError, OSError):
        return ModelFacts(str(path))
    info = served_info(settings.model.name, manifest, spec)
    context_tokens = min(settings.engine.context_tokens or spec.context_tokens, spec.context_tokens)
    return ModelFacts(str(path), store_facts(path), info, context_tokens, manifest.dense.bytes, manifest.table_bytes)


def store_facts(directory: Path) -> StoreFacts:
    """Returns the sizes of a packed store; zeros where it cannot be read, for the engine says why."""
    try:
        manifest = Manifest.read(directory)
        spec = spec_from_config(manifest.spec_config)
        modified_s = (directory / MANIFEST).stat().st_mtime
    except (EdgemoeError, OSError):
        return StoreFacts()
    dense = sum(math.prod(shape) for shape in (dense_shapes(spec) | row_tables(spec)).values())
    experts = sum(len(layer.experts) for layer in manifest.layers)
    expert = math.prod(spec.geometry.gate_up_shape) + math.prod(spec.geometry.down_shape)
    return StoreFacts(manifest.total_bytes, dense + experts * expert, modified_s)


def room_of(settings: Settings, held: ModelMemory) -> ModelMemory:
    """Returns the memory that all models together may take, where they hold `held` of it now."""
    machine = probe_machine(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    free_bytes = machine.ram_available_bytes - settings.memory.headroom_bytes + held.ram_bytes
    kinds = [device.kind for device in devices_of(settings, machine)]
    free = [gpu.free_bytes - VRAM_HEADROOM_BYTES for gpu in machine.gpus if f"cuda:{gpu.index}" in kinds]
    vram_bytes = max(0, min(free)) + held.vram_bytes if free else 0
    return ModelMemory(settings.memory.models_bytes or max(0, free_bytes), vram_bytes)

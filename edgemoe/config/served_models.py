"""The settings of each model that a daemon serves, made of `[model]` and `[models.NAME]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgemoe.config.settings import ALONE, DeviceSettings, NamedModelSettings, Settings
from edgemoe.errors import ConfigError

replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class ServedModelSettings:
    """One model: the settings of its engine, and when it is loaded."""

    engine: Settings
    is_pinned: bool
    idle_s: float = 0.0  # without a request after which it is unloaded; 0: only where another needs its memory


def served_models(settings: Settings) -> dict[str, ServedModelSettings]:
    """Returns the models by name. The first is for requests that name none, and it is the cluster's.

    That is `[model]`, which is pinned, or the first of `[models]` where `model.path` is not set. Raises ConfigError.
    """
    found: dict[str, ServedModelSettings] = {}
    if settings.model.path or not settings.models:
        found[settings.model.name] = ServedModelSettings(replace(settings, models={}), is_pinned=True)
    for name, model in settings.models.items():
        if name in found:
            raise ConfigError(f"models.{name} has the name of the model in [model]: choose another, or set model.name")
        engine = _engine_of(settings, name, model, is_first=not found)
        found[name] = ServedModelSettings(engine, model.pin, model.idle_s)
    return found


def _engine_of(settings: Settings, name: str, model: NamedModelSettings, *, is_first: bool) -> Settings:
    """Returns the settings of a named model's engine. Files of another model's are not its own."""
    own = replace(
        settings,
        model=replace(settings.model, path=model.path or name, name=name),
        memory=replace(settings.memory, limit_bytes=model.memory_bytes),
        device=tuple(_limited(device, model.vram_bytes) for device in settings.device),
        models={},
    )
    if is_first:
        return own
    folder = str(Path(settings.record.dir) / name.replace("/", "--")) if settings.record.dir else ""
    return replace(
        own,
        cache=replace(settings.cache, state_file="", scoutgate=""),
        record=replace(settings.record, dir=folder),
        cluster=ALONE,
    )


def _limited(device: DeviceSettings, limit_bytes: int) -> DeviceSettings:
    return device if device.kind in ("cpu", "emulated") else replace(device, limit_bytes=limit_bytes)

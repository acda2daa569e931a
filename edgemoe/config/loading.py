"""Loads Settings from TOML files and `--set section.key=value`, and keeps the origin of every value.

Later sources win: defaults, /etc/edgemoe/edgemoe.toml, $XDG_CONFIG_HOME/edgemoe/edgemoe.toml, --set; `--config FILE`
replaces both files. Every source is first flattened to "section.key" -> value, so that an error can name the setting,
its line and the most similar known name.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from edgemoe.config.paths import PATHS, cluster_folder, fill_paths, search_path
from edgemoe.config.settings import FORMS, SERVED_NAME, DeviceSettings, NamedModelSettings, Settings, faults
from edgemoe.config.sizes import parse_rate, parse_size
from edgemoe.config.this_box import fill_this_box
from edgemoe.durable import read_plain
from edgemoe.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
NOT_TOML = (ValueError, RecursionError)  # raised by tomllib, also for overlong numbers and deep nesting
SHOWN_CHARS = 120  # of a key or a value in an error
MOST_FAULTS = 20  # of settings that are told at once
RENAMED = {  # values that an error gives the present name of
    "cache.policy": {"published": "two-tier"},
    "cluster.placement": {"published": "prism"},
    "cluster.route": {"published": "gimbal", "spread": "least", "local": "pull"},
    "engine.scheduler": {"linear": "sjf", "gimbal": "sjf"},
}


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A setting as one source states it; `origin` is "default", "FILE:LINE" or "--set"."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Validated settings with the paths filled in, and the origin of every "section.key"."""

    settings: Settings
    origins: Mapping[str, str]
    files: tuple[Path, ...]


def load(
    config: Path | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, SettingValue] = MappingProxyType({}),
    *,
    env: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    is_named_later: bool = False,
) -> LoadedSettings:
    """Returns the effective settings. Raises ConfigError, which names all that is wrong.

    If `config` is given, no other file is read. `options` win over all other sources. With `is_named_later`, settings
    of a cluster may come before this box's name in it.
    """
    files = (config,) if config else tuple(path for path in search_path(env, root) if path.is_file())
    stated: dict[str, SettingValue] = {}
    wrong = SettingFaults()
    for file in files:
        values = _checked(_file_values(file), wrong)
        if any(key.startswith("device.") for key in values):  # a file states all devices or none
            stated = {key: value for key, value in stated.items() if not key.startswith("device.")}
        stated |= values
    stated |= _checked(_set_values(sets, wrong), wrong) | _checked(options.items(), wrong)
    settings = _build(stated, wrong)
    settings = _with_this_box(settings, cluster_folder(settings, env, root), wrong)
    for fault in faults(settings, is_named_later=is_named_later):
        if not any(key in fault for key in wrong.keys):  # else it may follow from that key's own fault
            wrong.add("", fault)
    wrong.raise_all()
    settings = fill_paths(settings, env, root)
    origins = {key: stated[key].origin if key in stated else "default" for key in flatten(settings)}
    return LoadedSettings(settings, origins, files)


def _with_this_box(settings: Settings, folder: Path, wrong: SettingFaults) -> Settings:
    """Returns the settings with this box's part of a cluster, which a command or an invitation has written."""
    try:
        cluster = fill_this_box(settings.cluster, folder)
    except ConfigError as error:
        wrong.add("", str(error))
        return settings
    return msgspec.structs.replace(settings, cluster=cluster)


class SettingFaults:
    """Collects the faults of settings, so that one error names them all."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._faults: list[str] = []

    def add(self, key: str, fault: str) -> None:
        """Adds a fault; `key` is the setting that is left out for it."""
        self.keys += [key] if key else []
        self._faults.append(fault)

    def raise_all(self) -> None:
        """Raises ConfigError where anything is wrong."""
        told, more = list(dict.fromkeys(self._faults))[:MOST_FAULTS], len(self._faults) - MOST_FAULTS
        if len(told) == 1:
            raise ConfigError(told[0])
        if told:
            rest = [f"and {more} more"] if more > 0 else []
            raise ConfigError("\n  ".join([f"{len(self._faults)} settings are wrong:", *told, *rest]))


def flatten(settings: Settings) -> dict[str, Any]:
    """Returns values by "section.key" in the order of the structs.

    Devices are "device.0.kind" and so on, named models "models.NAME.path".
    """
    flat: dict[str, Any] = {}
    for name in settings.__struct_fields__:
        section = getattr(settings, name)
        parts = {name: section}
        if name == "device":
            parts = {f"{name}.{index}": one for index, one in enumerate(section)}
        elif name == "models":
            parts = {f"{name}.{model}": one for model, one in section.items()}
        for prefix, part in parts.items():
            flat |= {f"{prefix}.{key}": getattr(part, key) for key in part.__struct_fields__}
    return flat


# --- sources, flattened ----------------------------------------------------------------------------------------


def _file_values(file: Path) -> Iterator[tuple[str, SettingValue]]:
    try:
        data = read_plain(file, MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the settings in {file}: it is no text in UTF-8") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is too large for a file of settings, which has {MAX_FILE_BYTES} bytes at most")
    try:
        tables = tomllib.loads(text)
    except NOT_TOML as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    lines = dict(_key_lines(text))
    for key, value in _flat_tables(tables):
        yield key, SettingValue(value, f"{file}:{lines[key]}" if key in lines else str(file))


def _flat_tables(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, table in tables.items():
        if section == "device" and isinstance(table, list) and all(isinstance(one, dict) for one in table):
            for index, one in enumerate(table):
                yield from ((f"device.{index}.{key}", value) for key, value in one.items())
        elif section == "models" and isinstance(table, dict) and all(isinstance(one, dict) for one in table.values()):
            for model, one in table.items():
                yield from ((f"models.{model}.{key}", value) for key, value in one.items())
                if not one:  # all of its settings are defaults
                    yield f"models.{model}.path", NamedModelSettings().path
        elif isinstance(table, dict):
            prefix = "device.0" if section == "device" else section
            yield from ((f"{prefix}.{key}", value) for key, value in table.items())
        else:
            yield section, table  # a key outside any section: refused as unknown, with the nearest name


def _key_lines(text: str) -> Iterator[tuple[str, int]]:
    """Yields each "section.key" with its line number; omits dotted and inline keys."""
    section, devices = "", -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*(\[\[?)\s*((?:[\w.-]+|\"[^\"]*\")+)\s*\]", line):
            section = header[2].replace('"', "")
            if section == "device":
                devices += 1
                section = f"device.{devices}"
        elif key := re.match(r"\s*(\w+)\s*=", line):
            yield f"{section}.{key[1]}" if section else key[1], number


def _set_values(sets: Iterable[str], wrong: SettingFaults) -> Iterator[tuple[str, SettingValue]]:
    for text in sets:
        key, equals, word = text.partition("=")
        if not equals:
            wrong.add("", f"--set {text[:SHOWN_CHARS]}: write --set section.key=value")
            continue
        try:
            value = tomllib.loads(f"value = {word}")["value"]
        except NOT_TOML:
            value = word
        key = key.strip()
        if _holds_text(key) and not isinstance(value, str):
            value = word  # --set model.name=3 means the name "3"
        yield key, SettingValue(value, "--set")


# --- one value -------------------------------------------------------------------------------------------------


def _checked(values: Iterable[tuple[str, SettingValue]], wrong: SettingFaults) -> dict[str, SettingValue]:
    """Returns values converted to their fields' types, without wrong values."""
    found: dict[str, SettingValue] = {}
    for key, value in values:
        try:
            found[key] = SettingValue(_convert(key, value), value.origin)
        except ConfigError as error:
            wrong.add(key, str(error))
    return found


def _convert(key: str, stated: SettingValue) -> Any:
    """Returns the value in its field's type. Raises ConfigError, which names origin, key and remedy."""
    expected = _type_of(key)
    model = key.removeprefix("models.").rpartition(".")[0]
    if key.startswith("models.") and model and not re.fullmatch(SERVED_NAME, model):
        form = FORMS[rf"^{SERVED_NAME}\Z"]
        raise ConfigError(f"{stated.origin}: {_shown(model)} is no name of a model in [models]: it has to be {form}")
    if expected is None:
        raise ConfigError(f"{stated.origin}: unknown setting {_shown(key)}{nearest(key)}")
    value = stated.value
    try:
        if isinstance(value, str) and (parse := _unit_parser(key)):
            value = parse(value)
        if isinstance(value, str) and (key in PATHS or (key.startswith("models.") and key.endswith(".path"))):
            value = os.path.expanduser(value)
        elif isinstance(value, list) and key in PATHS:
            value = [os.path.expanduser(each) if isinstance(each, str) else each for each in value]
        return msgspec.convert(value, expected)
    except (ConfigError, msgspec.ValidationError, OverflowError, UnicodeError) as error:
        choices = get_args(expected) if get_origin(expected) is Literal else ()
        hint = f"; one of {', '.join(choices)}" if choices else ""
        if isinstance(value, str) and (now := RENAMED.get(key, {}).get(value)):
            hint += f"; what was {value!r} is {now!r}"
        raise ConfigError(f"{stated.origin}: {key} = {_shown(stated.value)}: {_reason(error)}{hint}") from None


def _reason(error: Exception) -> str:
    """Returns the reason why a value is refused; words in place of a regular expression."""
    form = next((words for pattern, words in FORMS.items() if repr(pattern) in str(error)), "")
    return f"it has to be {form}" if form else str(error)[-SHOWN_CHARS:]


def _shown(value: Any) -> str:
    """Returns a value's text, cut to the length that an error may quote."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with more digits than Python writes
        text = f"an endless {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _unit_parser(key: str) -> Callable[[str], float] | None:
    return parse_rate if key.endswith("_bytes_per_s") else parse_size if key.endswith("_bytes") else None


def _sections() -> dict[str, type[msgspec.Struct]]:
    tables: dict[str, type[msgspec.Struct]] = {"device": DeviceSettings, "models": NamedModelSettings}
    return {field.name: field.type for field in msgspec.structs.fields(Settings)} | tables


def _type_of(key: str) -> Any:
    """Returns the type of "section.key", "device.N.key" or "models.NAME.key"; None where there is no such setting."""
    section, _, name = key.partition(".")
    if section == "device":
        index, _, name = name.partition(".")
        section = section if re.fullmatch("[0-9]{1,4}", index) else ""
    elif section == "models":
        model, _, name = name.rpartition(".")
        section = section if model else ""
    struct = _sections().get(section)
    fields = msgspec.structs.fields(struct) if struct else ()
    return next((field.type for field in fields if field.name == name), None)


def _holds_text(key: str) -> bool:
    expected = _type_of(key)
    if get_origin(expected) is Annotated:
        expected = get_args(expected)[0]
    return expected is str or get_origin(expected) is Literal


def nearest(key: str) -> str:
    """Returns the end of an error message about an unknown key, which suggests a known one."""
    known = [
        f"{section}.{field.name}" for section, struct in _sections().items() for field in msgspec.structs.fields(struct)
    ]
    plain = re.sub(r"^device\.\d+|^models\..+(?=\.)", lambda found: found[0].split(".")[0], key[:SHOWN_CHARS])
    leaf = plain.rpartition(".")[2]
    same_leaf = [name for name in known if name.endswith(f".{leaf}")]
    close = same_leaf or difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
    if not close:
        close = [name for name in known if difflib.get_close_matches(leaf, [name.rpartition(".")[2]], cutoff=0.6)]
    if not close:
        return "; see `edgemoe config`"
    return f"; did you mean {close[0].replace('device.', 'device.0.').replace('models.', 'models.NAME.')!r}?"


def _build(stated: Mapping[str, SettingValue], wrong: SettingFaults) -> Settings:
    groups: dict[str, Any] = {}
    for key, value in stated.items():
        section, _, name = key.rpartition(".")
        groups.setdefault(section, {})[name] = value.value
    numbers = sorted(int(match[1]) for group in list(groups) if (match := re.fullmatch(r"device\.([0-9]{1,4})", group)))
    if numbers != list(range(len(numbers))) and not any(key.startswith("device.") for key in wrong.keys):
        given = f"device.{numbers[-1]} is set, but not every device before it; devices are counted from 0"
        wrong.add(f"device.{numbers[-1]}", given)
    devices = [groups.pop(f"device.{number}") for number in numbers]
    named = [group for group in groups if group.startswith("models.")]
    models = {group.removeprefix("models."): groups.pop(group) for group in named}
    try:
        return msgspec.convert(groups | {"models": models} | ({"device": devices} if devices else {}), Settings)
    except msgspec.ValidationError as error:  # of all together: too many devices
        wrong.add("", f"these settings cannot be: {error}")
        return Settings()

"""Fuzzes files of settings and --set: the result is valid settings or a ConfigError."""

from __future__ import annotations

import math
import random
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from edgemoe.cli.service_command import templates
from edgemoe.cli.show_config import as_toml
from edgemoe.config.loading import flatten, load
from edgemoe.config.settings import DeviceSettings, NamedModelSettings, Settings
from edgemoe.errors import ConfigError
from tools.fuzzing.trials import run_trials

WHATS = ("file", "set", "damaged")
GROWTH_MB = 100.0
ENV = {"HOME": "/nowhere"}
LITERALS = (
    *("true", "0", "1", "-1", "3", "64", "0x7fffffffffffffff", "9223372036854775808", "0x" + "f" * 5000, "9" * 5000),
    *("0.5", "1.5", "-0.0", "1e999", "inf", "-inf", "nan", "1e308", "5e-324", "1e15", "1e16", "+1_000"),
    *('""', '"x"', '"auto"', '"emulated"', '"cuda:0"', '"cuda:99999999999999999999"', '"12GiB"', '"8GB/s"', '"1e5GB"'),
    *(f'"{"9" * 400}TB"', '"-1GiB"', r'"a\u0000b"', r'"a\n"', '"raft"', '"127.0.0.1:8080"', '":99999"', '"[::1]:80"'),
    *(f'"{"x" * 5000}"', "1979-05-27", "07:32:00", "[]", "[[]]", "[1, 'a']", "{}", "{a = 1}", '[{kind = "cpu"}]'),
    *("[" * 3000 + "]" * 3000, "{a={a={a={a=1}}}}", "'''\nx'''", r'"\u202e"'),
)
WORDS = ("a", "kind", "device", "0", "²", "é", "", "api", "a b", "x" * 500)
HEADERS = ("[model]", "[device]", "[[device]]", "[device.0]", "[[model]]", "[a.b.c]", "[api", "[]", "[cluster]")


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Makes and reads `count` settings for each part of the interface."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-fuzz-") as name:
        path, parts = Path(name) / "edgemoe.toml", (what,) if what else WHATS
        return run_trials(parts, count, seed, lambda part, rng: _trial(part, rng, path), GROWTH_MB)


def _trial(part: str, rng: random.Random, path: Path) -> str:
    sets: list[str] = []
    if part == "set":
        path.write_text("")
        sets = [_assignment(rng).replace(" = ", "=", 1) for _ in range(rng.choice((1, 1, 3)))]
    else:
        path.write_bytes(_file(rng) if part == "file" else _damaged(rng))
    refused = ""
    try:
        settings = load(path, sets, env=ENV).settings
    except ConfigError as error:
        refused = str(error)
    else:
        _check(settings)
    assert len(refused) < 1500, f"an error of {len(refused)} characters"
    return "refused" if refused else "read"


def _check(settings: Settings) -> None:
    """Fails unless printed settings read the same again, with all numbers bounded."""
    values = flatten(settings)
    printed = "\n".join(as_toml(values, dict.fromkeys(values, "here")))
    printed.encode()
    again = tomllib.loads(printed)
    assert len(again["device"]) == len(settings.device)
    for key, value in values.items():
        if isinstance(value, int | float):
            assert math.isfinite(value), key
            assert abs(value) <= 1 << 50, key
        elif isinstance(value, str):
            assert len(value) <= 5000, key
            assert "\0" not in value, key


def _file(rng: random.Random) -> bytes:
    lines = []
    for _ in range(rng.randrange(1, 12)):
        section = rng.choice(tuple(_keys()))
        header = f"[[{section}]]" if section == "device" and rng.random() < 0.7 else f"[{section}]"
        lines.append(header if rng.random() < 0.9 else rng.choice(HEADERS))
        lines += [_line(section, rng) for _ in range(rng.randrange(4))]
    if rng.random() < 0.02:
        lines += ["[[device]]"] * 100
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _line(section: str, rng: random.Random) -> str:
    odd = (".".join(["a"] * 2000), '"a.b"', *WORDS)
    name = rng.choice(_keys()[section]) if rng.random() < 0.9 else rng.choice(odd)
    return f"{name} = {rng.choice(LITERALS)}"


def _assignment(rng: random.Random) -> str:
    section = rng.choice(tuple(_keys()))
    name = rng.choice(_keys()[section])
    if section == "device":
        section = rng.choice(
            ("device.0", "device.1", "device.²", "device.", "device", "device.99999999999", "device.-1")
        )
    if rng.random() < 0.1:
        section, name = rng.choice(WORDS), rng.choice(WORDS)
    value = rng.choice(LITERALS) if rng.random() < 0.7 else rng.choice((*WORDS, "\udcff", "\0", "\n"))
    return f"{section}.{name} = {value}"


def _damaged(rng: random.Random) -> bytes:
    """Returns the example file with its settings uncommented, and some damage in it."""
    lines = (templates() / "edgemoe.toml").read_text().split("\n")
    said = [line[1:] if line.startswith("#") and " = " in line and line[1] != " " else line for line in lines]
    data = bytearray("\n".join(said).encode())
    for _ in range(rng.choice((0, 1, 1, 3, 20))):
        at = rng.randrange(len(data))
        match rng.choice(("flip", "cut", "repeat", "insert", "zero")):
            case "flip":
                data[at] ^= 1 << rng.randrange(8)
            case "cut":
                del data[at : at + rng.choice((1, 10, 1000))]
            case "repeat":
                data[at:at] = data[at : at + rng.choice((5, 200))]
            case "insert":
                data[at:at] = rng.randbytes(3)
            case "zero":
                data[at] = 0
    return bytes(data)


def _keys() -> dict[str, list[str]]:
    """Returns the settings' names by section."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Settings)} | {"device": DeviceSettings}
    del sections["models"]
    sections |= dict.fromkeys(("models.small", 'models."a b"', "models.\u00e9", "models."), NamedModelSettings)
    return {name: [field.name for field in msgspec.structs.fields(kind)] for name, kind in sections.items()}

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

from edgemoe.cli.service_command import templates
from edgemoe.config.loading import flatten, load
from edgemoe.config.settings import Settings

EXAMPLE = templates() / "edgemoe.toml"


def test_the_shipped_example_states_every_setting_with_its_default() -> None:
    uncommented = re.sub(r"(?m)^#(\w+ = )", r"\1", EXAMPLE.read_text())
    tables = tomllib.loads(uncommented)
    stated = {
        f"{section}.{key}": value
        for section, table in tables.items()
        if section != "device"
        for key, value in table.items()
    }
    stated |= {f"device.0.{key}": value for key, value in tables["device"][0].items()}
    assert stated == {
        key: list(value) if isinstance(value, tuple) else value for key, value in flatten(Settings()).items()
    }


def test_the_shipped_example_changes_nothing_as_it_is(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    assert load(EXAMPLE, env=env).settings == load(env=env, root=tmp_path).settings


def test_every_group_of_settings_in_the_example_is_explained() -> None:
    lines = EXAMPLE.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"#\w+ = ", line):
            assert before.startswith("#"), line

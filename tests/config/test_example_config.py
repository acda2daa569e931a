from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest

from edgemoe.cli.service_command import templates
from edgemoe.config.loading import flatten, load
from edgemoe.config.paths import fill_paths, search_path
from edgemoe.config.settings import ClusterSettings, Settings
from edgemoe.worker.model_preparation import kernel_dir

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


@pytest.mark.parametrize("column", [2, 3], ids=["user", "service"])
def test_the_table_of_files_is_where_files_are(column: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    rows = [re.split(r"\s*\|\s*", line) for line in page.partition("| files |")[2].splitlines()[2:8]]
    told = {" ".join(row[1].split()[:2]): row[column].strip("`").replace("~", "/home/u") for row in rows}
    env = {"HOME": "/home/u"} if column == 2 else {"HOME": "/", "STATE_DIRECTORY": "/var/lib/edgemoe"}
    found = fill_paths(Settings(cluster=ClusterSettings(node="a")), env)
    assert told["settings"] in {str(path) for path in search_path(env)}
    assert told["keys of"] == found.api.api_key_file
    assert told["packed models"] == found.model.store_dir
    assert told["compiled kernels"] == str(kernel_dir(found))
    assert told["a cluster's"] == str(Path(found.cluster.state_dir).parent)

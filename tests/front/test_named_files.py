"""A file that the settings name is read before the expensive work, never waited for, and never read without end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edgemoe.cluster.rpc.keys import generate
from edgemoe.config.loading import load
from edgemoe.errors import EdgemoeError
from edgemoe.front.main import reserve

CLUSTER = (
    "cluster.node=a",
    "cluster.listen=127.0.0.1:7540",
    "cluster.coordination=etcd",
    "cluster.etcd=http://[::1]:2",
)
NAMED = {
    "api.api_key_file": ("api.tcp=127.0.0.1:18999",),
    "cluster.key_file": CLUSTER,
    "cluster.peers_file": CLUSTER,
    "cluster.etcd_password_file": CLUSTER,
    "cluster.etcd_ca": CLUSTER,
    "cluster.etcd_cert": CLUSTER,
    "cluster.etcd_key": (*CLUSTER, "cluster.etcd_cert=CERT"),
}


@pytest.fixture
def unusable(tmp_path: Path) -> dict[str, Path]:
    """Returns paths that are no files of settings, by their kind."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").touch(0o600)
    os.truncate(tmp_path / "large", 1 << 40)
    (tmp_path / "bytes").write_bytes(b"\xff\x00" * 50)
    (tmp_path / "bytes").chmod(0o600)
    return {name: tmp_path / name for name in ("pipe", "folder", "large", "bytes", "missing")} | {
        "device": Path("/dev/zero")
    }


@pytest.mark.parametrize("setting", NAMED)
def test_an_unusable_file_is_refused_by_its_name(setting: str, unusable: dict[str, Path], tmp_path: Path) -> None:
    key, home = tmp_path / "key", tmp_path / "home"
    generate(key)
    shutil.copy(key, tmp_path / "CERT")
    beside = [each.replace("CERT", str(tmp_path / "CERT")) for each in NAMED[setting]]
    if "cluster.node=a" in beside and setting != "cluster.key_file":
        beside.append(f"cluster.key_file={key}")
    for kind, path in unusable.items():
        env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
        settings = load(None, [*beside, f"{setting}={path}"], env=env, root=tmp_path).settings
        with pytest.raises(EdgemoeError) as refused:
            reserve(settings, env)
        assert str(path) in str(refused.value) or "etcd" in str(refused.value), (kind, refused.value)


def test_a_file_of_settings_is_no_pipe(unusable: dict[str, Path]) -> None:
    for kind, path in unusable.items():
        with pytest.raises(EdgemoeError) as refused:
            load(path, [])
        assert str(path) in str(refused.value), kind

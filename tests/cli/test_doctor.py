"""Faults are planted one by one; doctor finds each, names its remedy, and gives no secret away."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fake_nvml

from edgemoe.cli import main
from edgemoe.cli.doctor import checks as box
from edgemoe.cli.doctor.checks import REMEDIES, daemon, members, neighbours, page
from edgemoe.cli.doctor.doctor_command import served_folder, stages
from edgemoe.cli.status_command import stage_state
from edgemoe.cluster.rpc.keys import generate
from edgemoe.config.settings import ModelSettings, Settings
from edgemoe.config.sizes import parse_size
from edgemoe.demo import model_path
from edgemoe.front.cluster_status import list_stages
from edgemoe.store.packer import pack
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry import probes
from edgemoe.types.machine import Gpu, Machine

ROOT = Path(__file__).parents[2]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "demo"
    pack(model_path(), folder)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: Path) -> Path:
    """The settings of a user with one store and no fault, except that no daemon runs."""
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("edgemoe.cli.doctor.doctor_command.disk_rate", lambda place: 2e9)  # 256 MiB a test
    monkeypatch.setattr("edgemoe.cli.client.SERVICE_SOCKET", tmp_path / "none")
    has_room(monkeypatch)
    shutil.copytree(packed, tmp_path / "edgemoe/stores/demo")
    return tmp_path


def has_room(monkeypatch: pytest.MonkeyPatch, free: int = 100 << 30, total: int = 200 << 30) -> None:
    """Makes every disk have `free` bytes of `total`."""
    blocks = SimpleNamespace(f_frsize=4096, f_bavail=free // 4096, f_blocks=total // 4096)
    monkeypatch.setattr("edgemoe.cli.doctor.checks.os.statvfs", lambda _: blocks)


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit status and the faults by check."""
    capsys.readouterr()
    status = main(["doctor", "--json", *words])
    rows = json.loads(capsys.readouterr().out)
    assert all(("remedy" in row) == (row["state"] != "pass") for row in rows)
    return status, {row["check"]: row for row in rows if row["state"] != "pass"}


def test_a_box_without_faults_passes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(capsys, "--verify")
    assert (status, set(found) - {"memory", "disk"}) == (0, {"daemon"})
    assert main(["doctor"]) == 0
    assert "edgemoe serve" in capsys.readouterr().out


def test_a_damaged_store_is_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = home / "edgemoe/stores/demo/experts/layer_000.safetensors"
    data = bytearray(layer.read_bytes())
    data[-5000] ^= 1
    layer.write_bytes(data)
    assert examined(capsys)[0] == 0  # one bit takes reading everything
    status, found = examined(capsys, "--verify")
    assert (status, "layer_000" in found["store"]["said"]) == (1, True)
    layer.write_bytes(data[:-4096])
    status, found = examined(capsys)
    assert (status, "layer_000" in found["store"]["said"]) == (1, True)


@pytest.mark.parametrize("words", [(), ("--verify",)])
def test_a_store_that_is_still_packed_or_pulled_is_no_fault(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    begun = home / "edgemoe/stores/begun"
    begun.mkdir()
    (begun / "packing.json").write_text("{}")
    status, found = examined(capsys, *words)
    assert (status, found["store"]["state"]) == (0, "warning")
    assert "begun is unfinished" in found["store"]["said"]


def test_a_clock_that_is_behind_is_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = home / "edgemoe/stores/demo/manifest.json"
    later = manifest.stat().st_mtime + 86400
    os.utime(manifest, (later, later))
    status, found = examined(capsys)
    assert (status, "manifest.json" in found["clock"]["said"]) == (1, True)


def test_a_setting_that_is_none_is_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(capsys, "--set", "cache.polcy=lru")
    assert (status, "cache.policy" in found["settings"]["said"]) == (1, True)


def test_keys_that_others_may_read_are_found_and_not_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "laptop"]) == 0
    secret = capsys.readouterr().out.strip()
    (file,) = home.rglob("api-keys")
    file.chmod(0o644)
    status, found = examined(capsys)
    assert (status, "chmod" in found["keys"]["said"]) == (1, True)
    assert secret not in json.dumps(found)


def test_a_stale_key_and_a_wrong_port_are_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, peers = home / "key", home / "peers.toml"
    own, other = generate(key).public.decode(), generate(home / "other").public.decode()
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = here.getsockname()[1], closed.getsockname()[1]
        closed.close()
        words = [
            f"cluster.{name}" for name in ("node=a", "listen=127.0.0.1:1", f"key_file={key}", f"peers_file={peers}")
        ]
        sets = [each for word in words for each in ("--set", word)]
        for mine, port, check in ((own, ports[0], None), (own, ports[1], "ports"), (other, ports[0], "peer-list")):
            rows = (
                ("a", "127.0.0.1:1", mine),
                ("b", f"127.0.0.1:{port}", generate(home / f"k{check}").public.decode()),
            )
            peers.write_text(
                "".join(f'[[peer]]\nnode = "{n}"\naddress = "{a}"\nkey = {json.dumps(k)}\n' for n, a, k in rows)
            )
            status, found = examined(capsys, *sets)
            assert (status, set(found) & {"ports", "peer-list"}) == (int(check is not None), {check} - {None})
            assert key.read_text() not in json.dumps(found)


def test_another_model_and_boxes_without_a_leader_are_found() -> None:
    there = [{"node": "a", "state": "here"}, {"node": "b", "state": "refused", "why": "serves another model"}]
    found = {each.check: each for each in members({"members": there, "leader": None, "trouble": ""})}
    assert {each.state for each in found.values()} == {"failure"}
    assert "another model" in found["peers"].said
    assert "nobody leads" in found["leader"].said
    assert [each.state for each in members({"members": there[:1], "leader": "a", "trouble": ""})] == ["pass"]


@pytest.mark.parametrize(
    ("state", "open_", "finding", "word"),
    [
        ("here", 1.0, "pass", "answers"),
        ("here", 0.0, "failure", "does not answer"),
        ("gone", 1.0, "failure", "gone"),
        ("here", None, "pass", "here"),  # as boxes behind the first one know
    ],
)
def test_stages_that_do_not_answer_are_found(state: str, open_: float | None, finding: str, word: str) -> None:
    there = [{"node": "a", "state": "here"}, {"node": "b", "state": state}]
    sizes = {names.named(names.STAGE_DENSE_BYTES, peer=node): 3e9 for node in "ab"}
    known = {} if open_ is None else {names.named(names.STAGE_OPEN, peer="b"): open_}
    listed = list_stages("a:0-3 b:4-7", there, sizes | known)
    assert [(each["node"], each["first"], each["last"], each["dense_bytes"]) for each in listed] == [
        ("a", 0, 3, 3_000_000_000),
        ("b", 4, 7, 3_000_000_000),
    ]
    assert [stage_state(each) for each in listed] == ["here", word]
    told = list(stages({"cluster": {"stages": listed}}))
    assert [each.state for each in told] == ["pass", finding]
    assert told[1].said.startswith("b holds layers 4 to 7")


@pytest.mark.parametrize(
    ("free", "total", "state"), [(1 << 30, 16 << 30, "pass"), (5 << 30, 2 << 40, "pass"), (3 << 30, 2 << 40, "failure")]
)
def test_too_little_room_is_found(
    free: int, total: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room(monkeypatch, free, total)
    assert next(box.disk(tmp_path, lambda _: 2e9)).state == state


def test_a_slow_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_room(monkeypatch)
    states = {rate: [each.state for each in box.disk(tmp_path, lambda _, rate=rate: rate)] for rate in (50e6, 2e9)}
    assert (states[50e6][-1], states[2e9][-1]) == ("warning", "pass")


def test_a_folder_that_may_not_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_room(monkeypatch)
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    last = list(box.disk(tmp_path, lambda _: 2e9))[-1]
    assert (last.check, last.state) == ("disk", "warning")
    assert "no model is packed there" in last.said


@pytest.mark.parametrize(
    ("link", "state"),
    [
        ({}, "pass"),
        ({"width": 8}, "warning"),
        ({"generation": 3}, "warning"),
        ({"generation": 1, "state": 8}, "pass"),  # idle, to save power
        ({"width": 4, "state": 8}, "warning"),
    ],
)
def test_a_gpu_with_a_slower_link_than_possible_is_found(
    link: dict[str, int], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.install(monkeypatch.setattr, **link)
    (found,) = (each for each in box.gpus(probes.probe_machine()) if each.check == "gpu-link")
    assert (found.state, "of 4 x16" in found.said) == (state, True)


def test_ports_and_clocks_of_other_boxes_are_told_with_the_direction() -> None:
    rows = [
        {"node": "b", "from_here": ["bulk"], "from_there": ["calls"], "ahead_s": -90.0, "within_s": 0.5},
        {"node": "c", "from_here": [], "from_there": [], "ahead_s": 3.0, "within_s": 2.5},
        {"node": "d", "from_here": [], "why": "it runs an earlier release"},
    ]
    found = [(each.check, each.state) for each in neighbours(rows)]
    assert found == [
        ("ports", "failure"),
        ("clock", "failure"),
        ("ports", "pass"),
        ("clock", "pass"),
        ("ports", "warning"),
    ]
    first = next(neighbours(rows)).said
    assert first == "b's bulk port is not reached from here; our calls port is not reached from b"


def test_a_limit_of_locked_memory_matters_where_there_is_a_gpu() -> None:
    for gpus, state in (((), "pass"), ((Gpu(0, "one", 1 << 34, 1 << 34),), "warning")):
        machine = Machine(1 << 35, 1 << 34, 4, parse_size("8MiB"), gpus)
        assert [each.state for each in box.memory(machine) if each.check == "memlock"] == [state]


@as_root
def test_a_socket_that_the_user_may_not_use_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as door:
        path = Path(f"/tmp/edgemoe-doctor-{os.getpid()}")
        door.bind(str(path))
        try:
            path.chmod(0o600)
            door.listen()
            os.seteuid(NOBODY)
            found, _ = daemon(path)
        finally:
            os.seteuid(0)
            path.unlink()
    assert [(each.check, each.state) for each in found] == [("permission", "failure")]


def test_a_look_that_cannot_go_on_is_a_finding_and_the_others_go_on(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(place: Path) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("edgemoe.cli.doctor.doctor_command.disk_rate", full)
    status, found = examined(capsys)
    assert (status, found["disk"]["state"]) == (1, "failure")
    assert "No space left" in found["disk"]["said"]
    assert "daemon" in found


@as_root
@pytest.mark.parametrize("private", ["stores", "stores/inside", "keys/file"])
def test_inaccessible_parts_are_reported_and_all_others_checked(
    private: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["doctor", "--json"])  # imports further modules, perhaps from a folder that others may not read
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / private.partition("/")[0]).mkdir(mode=0o700)
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
            monkeypatch.setenv(name, made)
        setting = "api.api_key_file" if private.startswith("keys") else "model.store_dir"
        try:
            os.seteuid(NOBODY)
            status, found = examined(capsys, "--set", f"{setting}={folder / private}", "--socket", f"{made}/none")
        finally:
            os.seteuid(0)
    assert made in found["permission"]["said"]
    assert {"permission", "daemon"} <= set(found)
    assert status == 0


@pytest.mark.slow
@as_root
def test_a_full_disk_is_found(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (tmp_path / "full").write_bytes(bytes(1020 << 10))
        assert [each.state for each in box.disk(tmp_path, lambda _: 2e9)] == ["failure"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_page_of_troubles_is_made_of_the_remedies() -> None:
    assert (ROOT / "docs/troubleshooting.md").read_text() == page()
    looks = "".join(path.read_text() for path in (ROOT / "edgemoe/cli/doctor").glob("*.py"))
    assert all(f'CheckResult("{check}"' in looks for check in REMEDIES)


def planted(home: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> list[str]:
    """Plants a fault of the settings or of the box. Returns the options of `edgemoe doctor`."""
    if fault == "kernels":
        (home / "edgemoe/kernels").mkdir(mode=0o777)
        (home / "edgemoe/kernels").chmod(0o777)
    if fault == "open-files":
        monkeypatch.setattr("edgemoe.cli.doctor.checks.resource.getrlimit", lambda _: (64, 64))
    return {
        "model": ["--set", f"model.path={home}/gone/model"],
        "mount": ["--set", f"model.store_dir={home}/usb/stores"],
        "name": ["--set", "model.path=nobodys-model"],
        "device": ["--set", "device.0.kind=cuda:0"],
        "memory": ["--set", "memory.ram_bytes=512TiB"],
    }.get(fault, [])


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        ("model", "model", "gone is missing"),
        ("mount", "model", "usb is missing"),
        ("name", "model", "no store of the name 'nobodys-model'"),
        ("device", "device", "device.0.kind is cuda:0; GPUs here: none"),
        ("memory", "memory", "memory.ram_bytes (512 TiB) are more than"),
        ("kernels", "kernels", "others can write"),
        ("open-files", "open-files", "64 files may be open"),
    ],
)
def test_settings_for_missing_resources_are_found(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    check: str,
    said: str,
) -> None:
    _, found = examined(capsys, *planted(home, monkeypatch, fault))
    assert said in found[check]["said"]
    assert found[check]["remedy"] == REMEDIES[check]


def test_a_taken_port_is_found_and_a_key_that_serve_makes_is_no_fault(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"api.tcp=127.0.0.1:{taken.getsockname()[1]}"
        status, found = examined(capsys, "--set", address)
        assert (status, "another program has this port" in found["port"]["said"]) == (1, True)
        assert "keys" not in found
    status, found = examined(capsys, "--set", address)
    assert (status, "port" in found) == (0, False)
    status, found = examined(capsys, "--set", address, "--set", f"api.api_key_file={home}/named")
    assert (status, found["keys"]["state"]) == (1, "failure")


def test_a_source_tree_that_is_not_installed_is_said_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    status, found = examined(capsys)
    assert (status, "is not installed" in found["versions"]["said"]) == (0, True)


def test_the_disk_of_the_served_store_is_looked_at(tmp_path: Path) -> None:
    store = tmp_path / "srv" / "store"
    store.mkdir(parents=True)
    for path, folder in (
        (str(store), store.parent),
        (str(tmp_path / "none"), Path("/var/x")),
        ("name", Path("/var/x")),
    ):
        assert served_folder(Settings(model=ModelSettings(path=path, store_dir="/var/x"))) == folder

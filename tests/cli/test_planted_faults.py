"""Ten faults are planted in real boxes; `edgemoe doctor`, run as a command, finds each and names the remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.box_processes import Box, make_boxes
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until

from edgemoe.cli.doctor.checks import REMEDIES
from edgemoe.cluster.rpc.keys import generate, load_peers
from edgemoe.demo import model_path
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import pack
from tools.testbed.limits import Group, Limits

ROOT = Path(__file__).parents[2]
NOBODY, AHEAD_S = 65534, 3600.0
LATER = f"""import time, sys
now = time.time
time.time = lambda: now() + {AHEAD_S}
from edgemoe.cli import main
sys.exit(main(sys.argv[1:]))"""
FAKE_GPU = f"""import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support.fake_nvml import install
install()
from edgemoe.cli import main
sys.exit(main(sys.argv[1:]))"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="limits, mounts and other users take root"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes() -> AsyncIterator[dict[str, Box]]:
    """Two boxes that serve the demo model, of which b leads. Other users may look at their folder."""
    folder = Path(f"/var/tmp/edgemoe-faults-{os.getpid()}")
    folder.mkdir(mode=0o755)
    pack(model_path(), folder / "store-a")
    shutil.copytree(folder / "store-a", folder / "store-b")
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": "demo", "store_dir": str(STORES)},
        "memory": {"ram_bytes": 20 << 20, "kv_bytes": 8 << 20, "headroom_bytes": 0},
        "engine": {"threads": 1},
        "service": {"drain_s": 2.0},
        "cluster": {"leader": "b", "replicas": 1},
    }
    made = make_boxes(folder, {"a": folder / "store-a", "b": folder / "store-b"}, free_ports(2), **sections)
    try:
        for box in made:
            box.start()
        await until(lambda: together(made), 900.0)
        yield {box.node: box for box in made}
    finally:
        for box in made:
            await box.close()
        shutil.rmtree(folder)


async def together(boxes: list[Box]) -> bool:
    """Returns whether all boxes are ready, see each other with their engines, and have a leader."""
    for box in boxes:
        health = await box.health()
        if health.get("status") != "ready" or not health["cluster"]["leader"]:
            return False
        if not all(member["state"] == "here" and member["engine"] for member in health["cluster"]["members"]):
            return False
    return True


def doctor(box: Box, *words: str, before: list[str] | None = None, program: list[str] | None = None) -> dict[str, Any]:
    """Returns the faults that the command finds at a box, by check; each must have its remedy."""
    program = program or [sys.executable, "-m", "edgemoe"]
    command = [*(before or ()), *program, "doctor", "--json", "--config", str(box.config), *words]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300, check=False)
    rows = json.loads(done.stdout)
    assert done.returncode == int(any(row["state"] == "failure" for row in rows)), done.stderr
    bad = {row["check"]: row for row in rows if row["state"] != "pass"}
    assert all(row["remedy"] == REMEDIES[check] for check, row in bad.items())
    return bad


def found(planted: str, check: str, rows: dict[str, Any], *said: str, state: str = "failure") -> None:
    """Prints a row of the table of faults."""
    assert rows[check]["state"] == state, rows
    assert all(each in rows[check]["said"] for each in said), rows[check]
    print(f"| {planted} | {state} | {check} | {rows[check]['said']} |")


@contextmanager
def listing(box: Box, old: str, new: str) -> Iterator[None]:
    """Changes a box's list of peers during the block; the box reads it again within a second."""
    file = box.folder / "peers.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    try:
        yield
    finally:
        file.write_text(text)


async def state_of(box: Box, node: str) -> str:
    members = (await box.cluster()).get("members", [])
    return next((member["state"] for member in members if member["node"] == node), "")


async def test_nothing_ails_two_boxes_that_hear_each_other(boxes: dict[str, Box]) -> None:
    assert not {check for check, row in doctor(boxes["a"]).items() if row["state"] == "failure"} - {"disk"}
    rows = json.loads((await boxes["a"].http.get("/reach")).text)["boxes"]
    assert [(row["node"], row["from_here"], row["from_there"]) for row in rows] == [("b", [], [])]
    assert abs(rows[0]["ahead_s"]) <= rows[0]["within_s"] + 1e-3


async def test_a_wrong_port(boxes: dict[str, Box]) -> None:
    a, b = boxes.values()
    address = load_peers(a.folder / "peers.toml")["b"].address
    wrong = f"127.0.0.1:{free_ports(1)[0]}"
    with listing(a, address, wrong):
        found("a wrong port in the list of peers", "ports", doctor(a), "b at", wrong, "not reached")
    await until(lambda: together([a, b]))


async def test_a_stale_key(boxes: dict[str, Box]) -> None:
    a, b = boxes.values()
    peers = load_peers(b.folder / "peers.toml")
    stale = generate(b.folder / "stale").public.decode()
    with listing(b, str(peers["a"].key), stale):

        async def is_cut_off() -> bool:
            return await state_of(a, "b") == "gone"

        await until(is_cut_off)
        found("a's key in b's list is that of before", "peers", doctor(a), "b is gone")
        found("the same, asked at b", "peers", doctor(b), "a is gone")
    with listing(a, str(peers["a"].key), stale):
        found("a's own key in its list is that of before", "peer-list", doctor(a), "belongs to the key")
    await until(lambda: together([a, b]))


async def test_a_full_disk(boxes: dict[str, Box]) -> None:
    place = boxes["a"].folder / "full"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (place / "file").write_bytes(bytes(1020 << 10))
        found("a full disk", "disk", doctor(boxes["a"], "--set", f"model.store_dir={place}"), "free at", str(place))
    finally:
        subprocess.run(["umount", str(place)], check=True)


async def test_a_slow_disk(boxes: dict[str, Box]) -> None:
    limits = Limits(disk_bytes_per_s=50_000_000, disk_of=boxes["a"].folder)
    if why := limits.why_not():
        pytest.skip(why)
    group = Group(f"edgemoe-doctor-{os.getpid()}")
    try:
        group.make(limits)
        rows = doctor(boxes["a"], "--set", f"model.store_dir={boxes['a'].folder}", before=group.enter([]))
    finally:
        group.remove()
    found("a disk of 50 MB/s (blkio)", "disk-rate", rows, "reads", "MB/s", state="warning")


async def test_a_damaged_store(boxes: dict[str, Box]) -> None:
    b = boxes["b"]
    store = b.folder.parent / "store-b"
    layer = store / Manifest.load(store).layers[1].file
    data = layer.read_bytes()
    at = Manifest.load(store).entry(1, 2).offset
    try:
        layer.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found("one bit of an expert of b's store", "store", doctor(b, "--verify"), layer.name)
    finally:
        layer.write_bytes(data)


async def test_a_socket_and_a_limit_of_locked_memory_as_an_unprivileged_user(boxes: dict[str, Box]) -> None:
    a = boxes["a"]
    for each in (a.folder, a.config, a.folder / "peers.toml"):
        each.chmod(0o755)
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env", "HOME=/nonexistent"]
    become.append(f"PYTHONPATH={ROOT}:{sysconfig.get_path('purelib')}")
    python = ["/usr/bin/python3", "-B"]
    if subprocess.run([*become, *python, "-c", "import edgemoe, torch"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Python that an unprivileged user can run this tree with")
    limit = ["prlimit", f"--memlock={64 << 10}:{64 << 10}"]
    stores = f"model.store_dir={a.folder.parent}"
    rows = doctor(a, "--set", stores, before=[*limit, *become], program=[*python, "-c", FAKE_GPU])
    found("64 KiB may be locked (prlimit), a user of no group; the GPU is made up", "memlock", rows, state="warning")
    found("the same user may not use the socket", "permission", rows, "you may not use", str(a.socket))


async def test_a_clock_that_is_ahead(boxes: dict[str, Box]) -> None:
    a, b = boxes.values()
    await stop(b)
    command = [sys.executable, "-c", LATER, "serve", "--config", str(b.config)]
    with (b.folder / "log").open("ab") as log:
        b.process = subprocess.Popen(command, stdout=log, stderr=log)
    await until(lambda: together([a, b]), 300.0)
    found("b's clock is an hour ahead (injected)", "clock", doctor(a), "b's is 3,", "s ahead of ours")
    found("the same, asked at b", "clock", doctor(b), "a's is 3,", "s behind ours")


async def test_another_model(boxes: dict[str, Box]) -> None:
    a, b = boxes.values()
    await stop(b)
    other = b.folder.parent / "store-other"
    pack(model_path(), other, wanted=WantedEncodings.parse("int8", "keep"))
    b.start("--model", str(other))

    async def is_refused() -> bool:
        return "refused" in (await state_of(a, "b"), await state_of(b, "a"))

    await until(is_refused, 300.0)
    rows = doctor(a) if await state_of(a, "b") == "refused" else doctor(b)
    found("b serves another model", "peers", rows, "refused", "model")


async def test_no_leader(boxes: dict[str, Box]) -> None:
    a, b = boxes.values()
    await stop(b)

    async def is_alone() -> bool:
        return not (await a.cluster())["leader"]

    await until(is_alone)
    rows = doctor(a)
    found("the box that is to lead is stopped", "leader", rows, "nobody leads")
    assert "b is gone" in rows["peers"]["said"]


async def stop(box: Box) -> None:
    assert box.process is not None
    box.stop()

    async def has_ended() -> bool:
        return box.process is not None and box.process.poll() is not None

    await until(has_ended)

"""Voters with real etcd members, which they start, join, repair and end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from support.planes import ABC, Front, fronts, led
from support.waiting import until, wait_until

from edgemoe.cluster.control.coordination import etcd_process
from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.coordination.etcd_tls import is_certificate, make_certificate
from edgemoe.cluster.control.etcd_member import EtcdMember
from edgemoe.errors import CoordUnavailable
from edgemoe.helper import tied_program

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary: install Debian's etcd-server"),
]
LONG_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Front]]:
    """Three voters that have a leader; every one is a member with a vote."""
    async with fronts(tmp_path_factory.mktemp("three"), real=True) as found:
        await led(list(found.values()), LONG_S)
        await until(lambda: all_vote(found), LONG_S)
        yield found


def member(front: Front) -> EtcdMember:
    assert front.plane.etcd is not None
    return front.plane.etcd


async def all_vote(found: dict[str, Front]) -> bool:
    if not all(member(front).is_healthy for front in found.values()):
        return False
    listed = [await member(front)._members() for front in found.values()]
    voting = [sorted(str(each.get("name")) for each in names if not each.get("isLearner")) for names in listed]
    return voting == [list(ABC)] * len(found)


async def test_voters_become_members_of_one_etcd(three: dict[str, Front]) -> None:
    statuses = [await member(front)._call("maintenance/status") for front in three.values()]
    assert len({status["header"]["cluster_id"] for status in statuses}) == 1
    assert {front.plane.blocker for front in three.values()} == {""}


async def test_a_member_lets_in_nobody_without_the_key_of_a_voter(three: dict[str, Front], tmp_path: Path) -> None:
    make_certificate(tmp_path, "x", "127.0.0.1")
    plan = member(three["a"]).process.plan
    assert plan is not None
    port = int(plan.members["a"].rpartition(":")[2])

    async def speaks(folder: Path) -> bool:
        context = ssl.create_default_context(cafile=str(Path(three["a"].settings.state_dir) / "etcd/certificate.pem"))
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(b"GET /version HTTP/1.0\r\n\r\n")
            await writer.drain()
            return b"200 OK" in await reader.read(4096)
        except (ssl.SSLError, ConnectionError):
            return False
        finally:
            writer.close()

    assert await speaks(Path(three["b"].settings.state_dir) / "etcd")
    assert not await speaks(tmp_path)


async def test_the_socket_of_a_member_is_its_users_alone(three: dict[str, Front]) -> None:
    assert os.stat(Path(three["a"].settings.state_dir) / "etcd").st_mode & 0o077 == 0


async def test_a_member_that_is_killed_is_started_again(three: dict[str, Front]) -> None:
    own = member(three["b"])
    starts = own.process.starts
    os.kill(own.process.pid, signal.SIGKILL)
    await until(lambda: own.process.starts > starts and own.is_healthy, LONG_S)
    await led(list(three.values()), LONG_S)


async def test_another_box_leads_when_the_leaders_box_dies_and_a_lost_disk_comes_back_with_a_vote(
    three: dict[str, Front],
) -> None:
    first = await led(list(three.values()), LONG_S)
    epoch, own = three[first].plane.state.fence.highest, member(three[first])
    pid = own.process.pid
    os.kill(pid, signal.SIGKILL)  # as the kernel does when the front is killed
    await three[first].die()
    others = [front for node, front in three.items() if node != first]
    await until(lambda: all(each.plane.leader not in ("", first) for each in others), LONG_S)
    assert min(each.plane.state.fence.highest for each in others) > epoch
    shutil.rmtree(Path(three[first].settings.state_dir) / "etcd")
    await three[first].start()
    await until(lambda: all_vote(three), LONG_S)
    await until(lambda: three[first].plane.leader == others[0].plane.leader != "", LONG_S)


def damage(folder: Path) -> None:
    for file in (folder / "data/member/wal").glob("*.wal"):
        content = bytearray(file.read_bytes())
        content[:64] = bytes(range(64))
        file.write_bytes(content)


def lose(folder: Path) -> None:
    shutil.rmtree(folder / "data")


@pytest.mark.parametrize(("node", "harm"), [("a", lose), ("c", damage)], ids=["lost", "damaged"])
async def test_a_box_without_its_data_comes_back_with_a_vote(
    three: dict[str, Front], node: str, harm: Callable[[Path], None]
) -> None:
    """Also box a, which began the cluster: it begins no other."""
    await until(lambda: all_vote(three), LONG_S)
    front = three[node]
    folder = Path(front.settings.state_dir) / "etcd"
    before = await member(three["b"])._call("maintenance/status")
    await front.die()
    harm(folder)
    await front.start()
    await until(lambda: member(front).is_healthy, LONG_S)
    await until(lambda: all_vote(three), LONG_S)
    after = await member(front)._call("maintenance/status")
    assert after["header"]["cluster_id"] == before["header"]["cluster_id"]
    assert (folder / "data.aside").exists() == (harm is damage)


async def test_a_plan_is_agreed_and_no_process_is_left(three: dict[str, Front]) -> None:
    first = await led(list(three.values()), LONG_S)
    leader = three[first].plane._leader
    assert leader is not None
    await leader._store.commit_plan(leader.epoch, PlanRef(1, "digest"))
    for front in three.values():
        store = front.plane._leader
        assert store is not None
        await until(lambda store=store: store._store.view().plan == PlanRef(1, "digest"), LONG_S)
    pids = [member(front).process.pid for front in three.values()]
    for front in three.values():
        await front.die()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_without_etcd_a_voter_serves_and_says_why_it_has_no_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_process.shutil, "which", lambda _name: None)
    async with fronts(tmp_path, real=True) as found:
        await until(lambda: "install etcd-server" in found["a"].plane.etcd.blocker)  # type: ignore[union-attr]
        await until(lambda: found["a"].plane.state.members.is_alive("b"))


async def test_a_program_that_is_tied_is_killed_with_its_parent(tmp_path: Path) -> None:
    """Also if the parent is killed before the program has begun."""
    child = tmp_path / "pid"
    parent = f"""
import subprocess, sys
from edgemoe.helper.tied_program import tied
open({str(child)!r}, "w").write(str(subprocess.Popen(tied(["/bin/sleep", "300"])).pid) + "\\n")
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE) as process:
        wait_until(lambda: child.exists() and child.read_text().endswith("\n"))
        pid = int(child.read_text())
        wait_until(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes())
        process.kill()
    wait_until(lambda: is_gone(pid))
    late = [sys.executable, "-I", "-S", tied_program.__file__, "1", "/bin/sleep", "300"]
    assert subprocess.run(late, timeout=60, check=False).returncode == 0


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True


async def test_a_certificate_is_checked_before_it_is_trusted(tmp_path: Path) -> None:
    made = make_certificate(tmp_path, "a", "192.0.2.7")
    assert is_certificate(made)
    assert is_certificate(make_certificate(tmp_path, "a", "box.lan"))
    for wrong in ("", "x", made + made, made.replace("M", "N", 3), made + "x" * 3000, made[:-40]):
        assert not is_certificate(wrong)
    with pytest.raises(CoordUnavailable, match="no certificate for"):
        make_certificate(tmp_path, "a", "not a host,x=y")

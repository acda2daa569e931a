"""Boxes as processes, with real etcd, whose members and voters the owner's commands change."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.front_kit import http_client, settings_for
from support.ports import free_ports
from support.rolling import THIS, Box, ask, settings_of
from support.waiting import until

from edgemoe.cli.doctor import checks
from edgemoe.cli.doctor.checks import CheckResult
from edgemoe.cli.joining import join_cluster, read_token
from edgemoe.cluster.rpc.invite_token import InviteToken
from edgemoe.cluster.rpc.keys import load_secret
from edgemoe.config.settings import ClusterSettings, Settings
from edgemoe.errors import ConfigError, PeerError

pytestmark = [
    pytest.mark.early,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary: install Debian's etcd-server"),
]
LONG_S = 90.0


@asynccontextmanager
async def boxes_of(folder: Path, model: Path, names: Sequence[str], **cluster: Any) -> AsyncIterator[dict[str, Box]]:
    """Starts boxes that list each other."""
    boxes = {
        one.cluster.node: Box(one, folder / f"{one.cluster.node}.log")
        for one in settings_of(folder, model, names, **cluster)
    }
    try:
        for box in boxes.values():
            box.start(THIS)
        yield boxes
    finally:
        for box in boxes.values():
            if box.process is not None and box.process.poll() is None:
                box.process.kill()
                box.process.wait(60)


async def members(box: Box) -> dict[str, Any]:
    with contextlib.suppress(httpx.HTTPError):
        async with http_client(box.settings) as client:
            return dict((await client.get("/cluster")).json())
    return {}


async def change(box: Box, verb: str, node: str = "", dead: int = 0) -> tuple[int, str]:
    """Returns the status and the message of a command."""
    async with http_client(box.settings) as client:
        answer = await client.post("/cluster", params={"verb": verb, "node": node, "dead": dead}, timeout=60)
    body = answer.json()
    return answer.status_code, body["message"] if answer.is_success else body["error"]["message"]


async def done(box: Box, verb: str, node: str = "", dead: int = 0) -> str:
    status, said = await change(box, verb, node, dead)
    assert status == 200, said
    return said


async def seen(box: Box, **votes: str) -> bool:
    """Whether the box sees these boxes with these votes, all present, and a leader."""
    about = await members(box)
    found = {each["node"]: each["vote"] for each in about.get("boxes", [])}
    states = {each["state"] for each in about.get("boxes", [])}
    return found == votes and states <= {"here", "this box"} and about["leader"] != ""


ABC = {"a": "yes", "b": "yes", "c": "yes"}


async def all_see(boxes: Iterable[Box], **votes: str) -> None:
    for box in boxes:
        await until(lambda box=box: seen(box, **votes), LONG_S)


async def test_members_of_lists_are_agreed_and_changed_by_commands(tmp_path: Path, model_dir: Path) -> None:
    async with boxes_of(tmp_path, model_dir, "abcd", coordination="raft") as boxes:
        a, b, c, d = boxes.values()
        await all_see(boxes.values(), **ABC, d="yes")
        assert (await members(a))["cluster"] == ""
        assert "`edgemoe cluster init`" in (await change(a, "unvote", "d"))[1]
        assert "4 boxes belong to cluster" in await done(d, "begin")
        await all_see(boxes.values(), **ABC, d="yes")
        assert len({(await members(box))["cluster"] for box in boxes.values()}) == 1
        assert await done(a, "unvote", "d") == "d votes no more; a, b, c vote"
        await all_see(boxes.values(), **ABC, d="no")
        assert "no vote" in (await change(d, "unvote", "d"))[1]
        await done(d, "vote", "d")
        await all_see(boxes.values(), **ABC, d="yes")
        for refused in (await change(b, "vote", "d"), await change(b, "remove", "nobody"), await change(b, "x")):
            assert refused[0] == 409
        (tmp_path / "peers.toml").write_text("no longer a list")
        assert "a is removed" in await done(a, "remove", "a")
        await all_see((b, c, d), b="yes", c="yes", d="yes")
        assert "has been removed" in (await members(a))["trouble"]
        assert await ask(a)
        await d.leave()
        d.start(THIS)
        await all_see((b, c, d), b="yes", c="yes", d="yes")
        assert "have a majority" in (await change(d, "recover"))[1]
        before = (await members(d))["cluster"]
        for box in (b, c):
            box.kill()
        await until(lambda: leaderless(d), LONG_S)
        assert "invite b, c again" in await done(d, "recover")
        await all_see([d], d="yes")
        assert (await members(d))["cluster"] != before


async def test_a_dead_voter_is_removed_and_let_in_no_more(tmp_path: Path, model_dir: Path) -> None:
    async with boxes_of(tmp_path, model_dir, "abc", coordination="raft") as boxes:
        a, b, c = boxes.values()
        await all_see(boxes.values(), **ABC)
        await done(a, "begin")
        await all_see(boxes.values(), **ABC)
        assert "without --dead" in (await change(a, "remove", "c", dead=1))[1]
        c.kill()
        await until(lambda: gone(a, "c"), LONG_S)
        assert "say --dead" in (await change(a, "remove", "c"))[1]
        assert "b must keep its vote: c does not answer" in (await change(a, "unvote", "b"))[1]
        assert "neither may fail" in await done(b, "remove", "c", dead=1)
        await all_see((a, b), a="yes", b="yes")
        c.start(THIS)
        await until(lambda: served(c), LONG_S)
        await all_see((a, b), a="yes", b="yes")
        assert not await seen(c, **ABC)


def joined(box: Box, token: str) -> None:
    """Has a box join by an invitation, as `edgemoe serve --invite` does first."""
    join_cluster(box.settings, read_token(token), {})


async def test_a_cluster_grows_from_one_box_by_invitations(tmp_path: Path, model_dir: Path) -> None:
    made = settings_of(tmp_path, model_dir, "abx")
    a, b, other = (Box(without_list(one), tmp_path / f"{one.cluster.node}.log") for one in made)
    try:
        a.start(THIS)
        await until(lambda: served(a), LONG_S)
        assert "`edgemoe cluster init`" in (await change(a, "invite", "b"))[1]
        await done(a, "begin")
        await all_see([a], a="yes")
        assert (await change(a, "invite", "A b"))[0] == 409
        token = await done(a, "invite", "b")
        assert (await members(a))["invited"][0]["node"] == "b"
        with pytest.raises(ConfigError, match="is for b"):
            joined(other, token)
        await until(lambda: asyncio.to_thread(accepted, b, token), LONG_S)
        b.start(THIS)
        await all_see((a, b), a="yes", b="no")
        assert (await members(a))["invited"] == []
        joined(b, token)  # again, as a service does with each start
        (Path(b.settings.cluster.state_dir) / "members").unlink()  # as if the answer had been lost
        await asyncio.to_thread(joined, b, token)
        (Path(b.settings.cluster.state_dir) / "members").unlink()
        Path(b.settings.cluster.key_file).unlink()
        with pytest.raises(PeerError, match="used already"):
            await asyncio.to_thread(joined, b, token)
        late = read_token(await done(b, "invite", "late"))
        with pytest.raises(ConfigError, match="too old"):
            join_cluster(msgspec.structs.replace(b.settings, cluster=ClusterSettings()), late_now(late), {})
        assert "taken back" in await done(b, "remove", "late")
        await done(b, "vote", "b")
        await all_see((a, b), a="yes", b="yes")
        assert "a votes" in await done(a, "unvote", "b")
        await all_see((a, b), a="yes", b="no")
        await done(a, "remove", "b")
        await all_see([a], a="yes")
        assert "last box" in (await change(a, "remove", "a"))[1]
    finally:
        for box in (a, b):
            if box.process is not None:
                box.process.kill()
                box.process.wait(60)


@pytest.mark.slow
async def test_the_last_box_of_a_lost_majority_goes_on_and_takes_the_others_that_are_left_along(
    tmp_path: Path, model_dir: Path
) -> None:
    async with boxes_of(tmp_path, model_dir, "abcd", coordination="raft") as boxes:
        a, b, c, d = boxes.values()
        await all_see(boxes.values(), **ABC, d="yes")
        await done(a, "begin")
        await done(a, "unvote", "d")
        await all_see(boxes.values(), **ABC, d="no")
        before, epoch = (await members(a))["cluster"], (await c.health())["cluster"]["epoch"]
        assert "have a majority" in (await change(c, "recover"))[1]
        for box in (a, b):
            box.kill()
        await until(lambda: leaderless(c), LONG_S)
        assert "invite a, b again" in await done(c, "recover")
        await all_see((c, d), c="yes", d="no")
        await until(lambda: same_cluster(c, d), LONG_S)
        assert (await members(c))["cluster"] != before
        assert (await c.health())["cluster"]["epoch"] > epoch
        a.start(THIS)
        await until(lambda: served(a), LONG_S)
        assert (await members(a))["cluster"] == before
        await done(d, "vote", "d")
        await all_see((c, d), c="yes", d="yes")
        token = await done(d, "invite", "a")
        await a.leave()
        await until(lambda: asyncio.to_thread(accepted, a, token), LONG_S)
        a.start(THIS)
        await all_see((a, c, d), a="no", c="yes", d="yes")


@pytest.mark.slow
async def test_a_key_is_replaced_by_a_command_and_one_restart(tmp_path: Path, model_dir: Path) -> None:
    async with boxes_of(tmp_path, model_dir, "abc", coordination="raft") as boxes:
        a, _, c = boxes.values()
        await all_see(boxes.values(), **ABC)
        await done(a, "begin")
        await all_see(boxes.values(), **ABC)
        old = load_secret(Path(c.settings.cluster.key_file)).public.decode()
        assert "restart this box" in await done(c, "replace-key")
        new = load_secret(Path(c.settings.cluster.key_file)).public.decode()
        assert await keys_of(a, "c") == [old, new]
        await all_see(boxes.values(), **ABC)
        await c.leave()
        c.start(THIS)
        await all_see(boxes.values(), **ABC)

        async def has_one_key() -> bool:
            return await keys_of(a, "c") == await keys_of(c, "c") == [new]

        await until(has_one_key, LONG_S)
        await all_see(boxes.values(), **ABC)


def copied(box: Box, folder: Path) -> Box:
    """Returns a box with this one's name, key and state, as the image of its disk in another machine has."""
    shutil.copytree(box.settings.cluster.state_dir, folder / "state", ignore=shutil.ignore_patterns("client:1"))
    cluster = msgspec.structs.replace(
        box.settings.cluster, listen=f"127.0.0.1:{free_ports(1)[0]}", state_dir=str(folder / "state")
    )
    made = settings_for(folder, Path(box.settings.model.path), cluster=cluster)
    return Box(made, folder / "log")


async def trouble(box: Box) -> str:
    return str((await members(box)).get("trouble", ""))


async def test_a_box_and_its_copy_are_named_and_one_of_them_is_followed(tmp_path: Path, model_dir: Path) -> None:
    async with boxes_of(tmp_path, model_dir, "abc", coordination="raft") as boxes:
        a, b, c = boxes.values()
        await all_see(boxes.values(), **ABC)
        await done(a, "begin")
        await all_see(boxes.values(), **ABC)
        copy = copied(c, tmp_path / "copy")
        epoch = (await a.health())["cluster"]["epoch"]
        copy.start(THIS)
        try:
            for box, place in ((a, copy), (b, copy), (c, copy), (copy, c)):
                await until(lambda box=box, place=place: names(box, place.settings.cluster.listen), LONG_S)
            right = await ask(a)
            assert right
            assert [await ask(box) for box in (b, c, copy)] == [right] * 3
            await all_see(boxes.values(), **ABC)
            assert (await a.health())["cluster"]["epoch"] == epoch
            told = (await copy.health())["cluster"]["etcd"]
            assert not told["healthy"]
            assert told["starts"] == 0
            findings = {
                each.said: each.state for each in checked(await a.health()) if "two boxes run as c" in each.said
            }
            assert list(findings.values()) == ["failure"]
        finally:
            assert copy.process is not None
            copy.process.kill()
            copy.process.wait(60)
        await until(lambda: quiet(boxes.values()), LONG_S)
        assert "two boxes run with one name and key" in a.log.read_text()
        assert "another box runs with this one's name and key" in copy.log.read_text()


async def test_a_box_with_an_old_state_comes_back_as_a_learner(tmp_path: Path, model_dir: Path) -> None:
    async with boxes_of(tmp_path, model_dir, "abc", coordination="raft") as boxes:
        a, _, c = boxes.values()
        await all_see(boxes.values(), **ABC)
        await done(a, "begin")
        await until(lambda: votes(c), LONG_S)
        state = Path(c.settings.cluster.state_dir)
        await c.leave()
        shutil.copytree(state, tmp_path / "backup")
        c.start(THIS)
        await until(lambda: votes(c), LONG_S)
        assert OLDER not in c.log.read_text()
        await c.leave()
        epoch = (await a.health())["cluster"]["epoch"]
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "backup", state)
        c.start(THIS)
        await until(lambda: OLDER in c.log.read_text(), LONG_S)
        await until(lambda: votes(c), LONG_S)
        assert (state / "etcd" / "data.aside").exists()
        await all_see(boxes.values(), **ABC)
        assert (await c.health())["cluster"]["epoch"] - epoch <= 1
        await c.leave()
        c.start(THIS)
        await until(lambda: votes(c), LONG_S)
        assert c.log.read_text().count(OLDER) == 1


OLDER = "the data of etcd is older than others remember: a backup, or a copy of this box; this box comes"


async def votes(box: Box) -> bool:
    """Whether the box's own etcd takes part."""
    cluster = (await box.health()).get("cluster") or {}
    return bool((cluster.get("etcd") or {}).get("healthy"))


async def names(box: Box, address: str) -> bool:
    """Whether the box's status names that address as one of two boxes with one key."""
    cluster = (await box.health()).get("cluster") or {}
    said = [cluster.get("double", ""), *(member.get("why", "") for member in cluster.get("members", []))]
    return any(address in each for each in said)


async def quiet(boxes: Iterable[Box]) -> bool:
    """Whether no box sees two with one key."""
    found = [(await box.health())["cluster"] for box in boxes]
    return not any(each["double"] or any(member.get("why") for member in each["members"]) for each in found)


def checked(health: dict[str, Any]) -> list[CheckResult]:
    """Returns the findings of `edgemoe doctor` about the members."""
    return list(checks.members(health["cluster"]))


async def keys_of(box: Box, node: str) -> list[str]:
    return {each["node"]: list(each["keys"]) for each in (await members(box))["boxes"]}[node]


async def leaderless(box: Box) -> bool:
    return (await members(box))["leader"] == ""


async def same_cluster(*boxes: Box) -> bool:
    return len({(await members(box))["cluster"] for box in boxes}) == 1


def accepted(box: Box, token: str) -> bool:
    """Joins; the invitation may not be known everywhere yet."""
    try:
        joined(box, token)
    except PeerError:
        return False
    return True


def late_now(token: InviteToken) -> InviteToken:
    return msgspec.structs.replace(token, until_s=1.0)


def without_list(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, cluster=msgspec.structs.replace(settings.cluster, peers_file=""))


async def gone(box: Box, node: str) -> bool:
    return {each["node"]: each["state"] for each in (await members(box))["boxes"]}[node] == "gone"


async def served(box: Box) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(await ask(box))
    return False

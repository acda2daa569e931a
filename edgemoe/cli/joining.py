"""Begins a cluster on this box, or joins one by an invitation, before the daemon starts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from edgemoe.cluster.control.messages import CONTROL, ControlMessage, JoinCluster, MemberChanged
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.invite_token import InviteToken, read_token
from edgemoe.cluster.rpc.keys import AllowList, Peer, Secret, check_peer, generate, load_secret
from edgemoe.cluster.rpc.roster import KEPT_ROSTER, KeptRoster, Roster
from edgemoe.cluster.rpc.transport import ChannelSettings, Transport
from edgemoe.config.paths import cluster_folder
from edgemoe.config.settings import Settings
from edgemoe.config.this_box import LISTEN, THIS_BOX, ThisBox
from edgemoe.durable import make_folder, replace_file
from edgemoe.errors import ConfigError, PeerError, PeerRefused, PeerUnavailable, ServiceError
from edgemoe.front.peers_list import address_of
from edgemoe.rights import become_owner

MEET_S, ASK_S, LOOK_S = 5.0, 60.0, 0.02
NOWHERE = ("192.0.2.1", 9)  # to which nothing is sent; the way there begins at this box's address


__all__ = ["begin_cluster", "join_cluster", "read_token"]


def begin_cluster(settings: Settings, node: str, address: str, env: MutableMapping[str, str]) -> tuple[ThisBox, Roster]:
    """Makes this box the first one of a cluster. Raises ConfigError, ServiceError."""
    node = node or _own_name()
    address = address or address_of(settings.cluster) or f"{_own_address(NOWHERE)}:{LISTEN.rpartition(':')[2]}"
    check_peer(Peer(node, address, "." * 40), "--node, --address")
    folder = cluster_folder(settings, env)
    become_owner(folder, env=env)
    cluster = settings.cluster
    box = ThisBox(
        node,
        cluster.listen or f"0.0.0.0:{address.rpartition(':')[2]}",
        address,
        cluster.key_file or str(folder / node / "key"),
        cluster.state_dir or str(folder / node),
    )
    kept = KeptRoster(Path(box.state_dir) / KEPT_ROSTER)
    if kept.roster is not None and kept.roster.find(node) is not None:
        raise ConfigError(f"{box.state_dir} is of a cluster already; remove it to begin another")
    key = _key(Path(box.key_file)).public.decode()
    roster = Roster(secrets.token_hex(8), 1, (Peer(node, address, key),))
    _write(folder, box, kept, roster)
    return box, roster


def join_cluster(settings: Settings, token: InviteToken, env: MutableMapping[str, str]) -> None:
    """Joins by an invitation, unless this box has. Raises ConfigError, PeerError, ServiceError."""
    cluster, folder = settings.cluster, cluster_folder(settings, env)
    if cluster.node not in ("", token.node):
        raise ConfigError(f"the invitation is for {token.node}, and cluster.node is {cluster.node}")
    box = ThisBox(
        token.node,
        cluster.listen or LISTEN,
        address_of(cluster),
        cluster.key_file or str(folder / token.node / "key"),
        cluster.state_dir or str(folder / token.node),
    )
    become_owner(Path(box.state_dir), env=env)
    kept = KeptRoster(Path(box.state_dir) / KEPT_ROSTER)
    if kept.roster is not None and kept.roster.cluster == token.cluster and kept.roster.find(token.node) is not None:
        return
    if token.until_s < time.time():
        raise ConfigError("the invitation is too old: make a new one by `edgemoe cluster invite`")
    if not box.address:
        host, _, port = token.peers[0].address.rpartition(":")
        own = _own_address((host.strip("[]"), int(port)))
        box = msgspec.structs.replace(box, address=f"{own}:{box.listen.rpartition(':')[2]}")
    secret = _key(Path(box.key_file))
    roster = asyncio.run(_ask(token, secret, box.address))
    entry = roster.find(token.node)
    if roster.cluster != token.cluster or entry is None or secret.public.decode() not in entry.keys:
        raise ServiceError("the boxes answered with members that do not have this box")
    _write(None if cluster.node else folder, box, kept, roster)


async def _ask(token: InviteToken, own: Secret, address: str) -> Roster:
    """Asks the boxes of the token in turn. Raises PeerError with the last refusal.

    It asks by this box's own key too: an earlier try may have succeeded, and its answer been lost.
    """
    failure = PeerError("none of them answers; is the invitation used already?")
    asked = JoinCluster(own.public.decode(), address)
    for key in (token.key, own):
        transport = Transport(token.node, secrets.token_hex(8), key, AllowList({}))
        channel: Channel[ControlMessage] = Channel(transport, "control", CONTROL, _refuse, ChannelSettings())
        running = [asyncio.ensure_future(each) for each in (transport.run(), channel.run())]
        try:
            for peer in token.peers:
                channel.connect(peer)
            for peer in token.peers:
                try:
                    return await _ask_one(channel, peer.node, asked)
                except PeerError as error:
                    failure = error if channel.is_up(peer.node) else failure
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            transport.close()
    places = ", ".join(f"{peer.node} ({peer.address})" for peer in token.peers)
    raise PeerError(f"the cluster cannot be joined by {places}: {failure}")


async def _ask_one(channel: Channel[ControlMessage], node: str, asked: JoinCluster) -> Roster:
    """Returns the members that a box answers with. Raises PeerError."""
    ends_s = time.monotonic() + MEET_S
    while not channel.is_up(node):
        if time.monotonic() > ends_s:
            raise PeerUnavailable(f"{node} does not answer")
        await asyncio.sleep(LOOK_S)
    answer = (await channel.ask(node, asked, timeout_s=ASK_S)).message
    if not isinstance(answer, MemberChanged) or answer.roster is None or answer.roster.fault():
        raise PeerError(f"{node} answered with something else than the members")
    return answer.roster


async def _refuse(question: Question[Any]) -> Answer[Any] | None:
    raise PeerRefused("nothing is served here")


def _write(folder: Path | None, box: ThisBox, kept: KeptRoster, roster: Roster) -> None:
    """Keeps the members, and this box's part in `folder` unless settings name it. Raises ServiceError."""
    try:
        make_folder(Path(box.state_dir), 0o700)
        kept.keep(roster)
        if folder is not None:
            replace_file(folder / THIS_BOX, msgspec.json.format(msgspec.json.encode(box)) + b"\n")
    except OSError as error:
        raise ServiceError(f"{error.filename or box.state_dir} cannot be written: {error.strerror}") from error


def _key(path: Path) -> Secret:
    """Returns the key in the file, which is made where it is missing."""
    if path.exists():
        return load_secret(path)
    with contextlib.suppress(OSError):  # making the key then fails with a better word
        make_folder(path.parent, 0o700)
    return generate(path)


def _own_name() -> str:
    """Returns this machine's name as a box's name. Raises ConfigError where it is none."""
    name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:63]
    if not name:
        raise ConfigError("this machine's name is no name for a box: give --node")
    return name


def _own_address(towards: tuple[str, int]) -> str:
    """Returns the address of this machine on the way to another one, in brackets if it is of IPv6."""
    try:
        kind, _, _, _, place = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(place)  # sends nothing
            host = str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"this box's address is not known: set cluster.address, or --address: {error}") from error
    return f"[{host}]" if ":" in host else host

"""Makes the agreement that the settings ask for."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgemoe.cluster.control.coordination.coord_store import CoordStore, SingleBoxStore
from edgemoe.cluster.control.coordination.election_rules import voters_of
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.etcd import EtcdStore, MemberStore, OwnMember
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.roster import Roster
from edgemoe.config.settings import ClusterSettings
from edgemoe.durable import open_plain, read_plain
from edgemoe.errors import ConfigError

RAFT_VOTERS = 3  # with fewer, none may fail
MOST_PASSWORD_BYTES = 4096


def is_voter(settings: ClusterSettings, voters: Sequence[str], roster: Roster | None) -> bool:
    """Returns whether this box is one of the voters that elect a leader."""
    if roster is not None:
        return settings.node in roster.voters
    elects = settings.coordination == "raft" and not settings.join
    return elects and settings.node in voters and len(voters) >= RAFT_VOTERS


def make_store(
    settings: ClusterSettings,
    peers: Mapping[str, Peer],
    fence: EpochFence,
    member: OwnMember | None,
    *,
    is_agreed: bool = False,
) -> CoordStore | None:
    """Returns the agreement, kept by `member` if this box is a voter; None if it has no part in it and only follows.

    With `is_agreed`, the agreed members replace the settings. Raises ConfigError.
    """
    node = settings.node
    if is_agreed and settings.coordination != "etcd":
        return None if member is None else MemberStore(member, settings.lease_s)
    if settings.join and settings.coordination != "etcd":
        return None
    match settings.coordination:
        case "single":
            if settings.leader and settings.leader != node and settings.leader not in peers:
                raise ConfigError(f"cluster.leader is {settings.leader}, which is not in {settings.peers_file}")
            if not settings.leader and len(set(peers) - {node}):
                raise ConfigError(
                    "several boxes need a leader: set cluster.leader to the same node on all, or cluster.coordination"
                )
            return SingleBoxStore(fence.highest, fence.admit) if settings.leader in ("", node) else None
        case "raft":
            return None if member is None else MemberStore(member, settings.lease_s)
        case "etcd":
            return EtcdStore(
                [url.strip().rstrip("/") for url in settings.etcd.split(",")],
                settings.etcd_prefix,
                settings.lease_s,
                etcd_tls(settings),
                settings.etcd_user,
                etcd_password(settings),
            )


def voters_fault(settings: ClusterSettings, peers: Mapping[str, Peer], voters: Sequence[str]) -> str:
    """Returns the fault of the voters in the list of peers, compared with the agreement; "" if there is none."""
    if settings.coordination != "raft" or settings.join:
        return ""
    if len(voters) < RAFT_VOTERS:
        return (
            f"raft needs {RAFT_VOTERS} voters or more, {settings.peers_file} has {len(voters)}: add a box, "
            'an `edgemoe witness`, or use coordination = "single" with a leader'
        )
    if (named := voters_of(peers)) != list(voters):
        return (
            f"the agreement's voters are {', '.join(voters)}, {settings.peers_file} has {', '.join(named)}: the former "
            "hold; `edgemoe cluster init` and `edgemoe cluster vote` change them"
        )
    return ""


def etcd_tls(settings: ClusterSettings) -> ssl.SSLContext | None:
    """Returns the certificates for an etcd of the owner's; None if the settings name none. Raises ConfigError."""
    if not settings.etcd_ca and not settings.etcd_cert:
        return None
    try:
        for file in filter(None, (settings.etcd_ca, settings.etcd_cert, settings.etcd_key)):
            open_plain(Path(file)).close()
        context = ssl.create_default_context(cafile=settings.etcd_ca or None)
        if settings.etcd_cert:
            context.load_cert_chain(settings.etcd_cert, settings.etcd_key or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the certificates for etcd cannot be used: {error}") from error
    return context


def etcd_password(settings: ClusterSettings) -> str:
    """Returns the password for an etcd of the owner's; "" if the settings name none. Raises ConfigError."""
    if not settings.etcd_password_file:
        return ""
    try:
        password = read_plain(Path(settings.etcd_password_file), MOST_PASSWORD_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster.etcd_password_file cannot be read: {error}") from error
    if len(password) > MOST_PASSWORD_BYTES:
        raise ConfigError(
            f"cluster.etcd_password_file is larger than {MOST_PASSWORD_BYTES} bytes, which no password is"
        )
    return password.strip()

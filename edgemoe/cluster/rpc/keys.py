"""Reads and writes CURVE keys: a box's secret key, the TOML list of peers with public keys, the allow-list.

A secret key is in a file that only its owner can read, or comes as a systemd credential. While a box's key is being
replaced, its entry in the list of peers has the next key as `new_key`.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from edgemoe.durable import open_plain, read_plain, write_new
from edgemoe.errors import ConfigError, write_remedy
from edgemoe.types.bounds import MAX_NODES, Text, Word, is_port

MOST_LIST_BYTES = 1 << 20
NODE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
HOST = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}(%[0-9A-Za-z_.-]{1,15})?\]")


class Secret(msgspec.Struct, frozen=True):
    """A box's secret key and the public key that belongs to it, as 40 characters of Z85 each."""

    secret: bytes
    public: bytes

    def __repr__(self) -> str:
        return f"Secret(public={self.public!r})"


class Peer(msgspec.Struct, frozen=True):
    """A box that may connect, and where it is reached. Ports of other channels are announced on the control channel.

    `voter` says whether it has a vote in the embedded agreement; the voters must be the same in every box's list.
    A box without a vote may be listed on one box only: the others learn it from there. If its address is "", the box
    announces it. While its key is being replaced, both `key` and `new_key` are valid.

    `trusted` and `vouches` are this box's own opinion. KV blocks from a trusted box serve all requests. The boxes that
    a vouching box lists are let in.
    """

    node: Text
    address: Text
    key: Word
    voter: bool = True
    new_key: Word = ""
    trusted: bool = False
    vouches: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns its one or two valid keys."""
        return (self.key, self.new_key) if self.new_key else (self.key,)

    @property
    def to_announce(self) -> Peer:
        """Returns the entry without this box's opinion."""
        return msgspec.structs.replace(self, trusted=False, vouches=False)

    def with_keys_swapped(self) -> Peer:
        """Returns the same box with its other key first."""
        return msgspec.structs.replace(self, key=self.new_key, new_key=self.key) if self.new_key else self


class AllowList:
    """Maps public keys to node names. May change while connections are open."""

    def __init__(self, keys: Mapping[str, tuple[str, ...]]) -> None:
        """Allows `keys`: node names with their Z85 public keys, each of which is valid."""
        self.replace(keys)

    def replace(self, keys: Mapping[str, tuple[str, ...]]) -> None:
        """Allows these keys from now on, and no others."""
        self._names = {key.encode(): name for name, its in keys.items() for key in its}

    def allow(self, node: str, *keys: str) -> None:
        """Allows these keys for that node from now on, and no others of it."""
        self.revoke(node)
        self._names |= {key.encode(): node for key in keys}

    def revoke(self, node: str) -> None:
        self._names = {key: name for key, name in self._names.items() if name != node}

    def name_of(self, key: bytes) -> str | None:
        """Returns the node that this Z85 key belongs to; None where it is not allowed."""
        return self._names.get(key)


class _Entry(Peer, frozen=True, forbid_unknown_fields=True):
    """A peer in the list's file, where an unknown field is an error."""


def generate(path: Path) -> Secret:
    """Writes a new secret key to `path` (0600) and returns it. Raises ConfigError where the file exists."""
    public, secret = zmq.curve_keypair()
    try:
        write_new(path, secret + b"\n")
    except FileExistsError as error:
        raise ConfigError(f"{path}: a key is there already; remove it first to replace it") from error
    except OSError as error:
        remedy = write_remedy(error, "name a file that you may write")
        raise ConfigError(f"{path}: the key cannot be written: {error.strerror}; {remedy}") from error
    return Secret(secret, public)


def make_secret() -> Secret:
    """Returns a new secret key, which is in no file."""
    public, secret = zmq.curve_keypair()
    return Secret(secret, public)


def public_of(secret: bytes) -> bytes:
    """Returns the public key of a secret one."""
    return zmq.curve_public(secret)


def load_secret(path: Path) -> Secret:
    """Reads a secret key. Raises ConfigError where the file is missing, readable by others, or no key."""
    try:
        with open_plain(path) as file:
            info = os.fstat(file.fileno())
            text = file.read(256).strip()
    except OSError as error:
        remedy = "; make one with edgemoe keygen" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: the key cannot be read: {error.strerror}{remedy}") from error
    if stat.S_IMODE(info.st_mode) & 0o077 and not _is_credential(path):
        raise ConfigError(f"{path}: others can read this secret key; chmod 600 it")
    if not _is_key(text.decode("ascii", "replace")):
        raise ConfigError(f"{path}: holds no secret key; make one with edgemoe keygen")
    return Secret(text, zmq.curve_public(text))


def load_peers(path: Path) -> dict[str, Peer]:
    """Returns the peers listed in a TOML file by node name. Raises ConfigError."""
    try:
        text = read_plain(path, MOST_LIST_BYTES + 1).decode()
        if len(text) > MOST_LIST_BYTES:
            raise ConfigError(f"{path}: larger than {MOST_LIST_BYTES} bytes, which no list of peers is")
        entries = msgspec.convert(tomllib.loads(text).get("peer", []), list[_Entry])
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: the list of peers cannot be read: {error}") from error
    peers = [Peer(**msgspec.structs.asdict(entry)) for entry in entries]
    if len(peers) > MAX_NODES:
        raise ConfigError(f"{path}: lists {len(peers)} boxes; {MAX_NODES} are possible")
    for peer in peers:
        check_peer(peer, path)
    named = {"node": [peer.node for peer in peers], "key": [key for peer in peers for key in peer.keys]}
    for what, values in named.items():
        if twice := sorted({v for v in values if values.count(v) > 1}):
            raise ConfigError(f"{path}: the same {what} is listed twice: {twice[0]}")
    return {peer.node: peer for peer in peers}


def check_peer(peer: Peer, where: Path | str) -> None:
    """Raises ConfigError for an invalid name, address or key."""
    host, _, port = peer.address.rpartition(":")
    if not NODE_NAME.fullmatch(peer.node):
        raise ConfigError(f"{where}: node name {peer.node!r}: use lower-case letters, digits and dashes, at most 63")
    announced = not peer.address and not peer.voter
    if not announced and not (HOST.fullmatch(host) and is_port(port)):
        raise ConfigError(f"{where}: address {peer.address!r} of {peer.node}: write HOST:PORT, or [HOST]:PORT for IPv6")
    if not all(_is_key(key) for key in peer.keys):
        raise ConfigError(f"{where}: the key of {peer.node} is no public key; edgemoe keygen prints it")


def _is_key(text: str) -> bool:
    """Returns whether `text` is 32 bytes in Z85."""
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def _is_credential(path: Path) -> bool:
    """Returns whether `path` is a systemd credential, whose directory only the service can enter."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return directory is not None and path.parent == Path(directory)

"""The token by which a box joins a cluster: boxes to ask, and the secret key of an invitation, for one use.

A token is text: a prefix, then msgpack in Base64 for URLs, with a checksum against mistakes in copying.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta
from zmq.utils import z85

from edgemoe.cluster.rpc.keys import Peer, Secret, check_peer, public_of
from edgemoe.errors import ConfigError
from edgemoe.types.bounds import Text, WallSeconds, Word

PREFIX = "edgemoe1-"
MAX_TOKEN_CHARS = 4096
MAX_SEEDS = 5
SUM_BYTES = 4
KEY_BYTES = 32


class Seed(msgspec.Struct, frozen=True, array_like=True):
    """A box of the cluster to ask."""

    node: Text
    address: Text
    key: Word


class InviteToken(msgspec.Struct, frozen=True, array_like=True):
    """An invitation for a box of that name, until then."""

    cluster: Word
    node: Text
    secret: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    until_s: WallSeconds
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=MAX_SEEDS)]

    def __repr__(self) -> str:
        return f"InviteToken(cluster={self.cluster!r}, node={self.node!r})"

    @property
    def key(self) -> Secret:
        """The key with which to ask."""
        secret = z85.encode(self.secret)
        return Secret(secret, public_of(secret))

    @property
    def peers(self) -> list[Peer]:
        """The boxes to ask."""
        return [Peer(seed.node, seed.address, seed.key) for seed in self.seeds]

    def text(self) -> str:
        """Returns the token as text."""
        packed = msgspec.msgpack.encode(self)
        return PREFIX + base64.urlsafe_b64encode(packed + _sum(packed)).decode().rstrip("=")


def read_token(text: str) -> InviteToken:
    """Returns the invitation of a token. Raises ConfigError for anything else."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TOKEN_CHARS:
        raise ConfigError(f"this is no invitation: one begins with {PREFIX}, as `edgemoe cluster invite` prints it")
    body = text.removeprefix(PREFIX)
    try:
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        if _sum(packed[:-SUM_BYTES]) != packed[-SUM_BYTES:]:
            raise ConfigError("the invitation is cut short or mistyped; copy it again")
        token = msgspec.msgpack.decode(packed[:-SUM_BYTES], type=InviteToken)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"the invitation cannot be read; copy it again: {error}") from error
    if token.text() != text:  # bits that Base64 leaves unused at the end, or another form of the same values
        raise ConfigError("the invitation is mistyped; copy it again")
    for peer in (*token.peers, Peer(token.node, "host:1", token.peers[0].key)):
        check_peer(peer, "the invitation")
    return token


def z85_bytes(key: bytes) -> bytes:
    """Returns the 32 bytes of a key in Z85."""
    return z85.decode(key)


def _sum(packed: bytes) -> bytes:
    return xxhash.xxh32_digest(packed)

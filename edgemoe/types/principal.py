"""The origin of a request: the authenticated principal, and the user that its application names.

A principal has one name on all boxes of a cluster. A key is named by a digest of its secret. A user of a machine, or
an address without a key, carries the name of its box.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from typing import NewType

Principal = NewType("Principal", str)  # the unit by which shares, service, caches and bounds are counted
KEY, UID, ADDRESS = "key:", "uid:", "address:"
IPV6_SITE_BITS = 64  # of an IPv6 address; the rest a client chooses
SALT_BYTES = 16
USER_BYTES = 16  # of the digest that stands for a user's name


@dataclass(frozen=True, slots=True)
class Identity:
    """A principal and one of its users. `user` is unique among all principals; it is the principal where none is named.

    Only the principal is authenticated. Users divide their principal's share, however an application names them.
    """

    principal: Principal
    user: str

    @classmethod
    def of(cls, principal: Principal, named: str | None = None) -> Identity:
        """Returns the identity of an application's user. It holds a digest of `named`; the name stays on this box."""
        if not named:
            return cls(principal, principal)
        return cls(principal, f"{principal}/{_digest(named, size=USER_BYTES)}")


NOBODY = Identity(Principal(""), "")


def key_principal(secret: str) -> Principal:
    """Returns the principal of a key. Slow, so that a weak secret cannot be guessed from it."""
    return Principal(KEY + hashlib.scrypt(secret.encode(), salt=b"edgemoe", n=1 << 12, r=8, p=1, dklen=16).hex())


def uid_principal(uid: int, node: str = "") -> Principal:
    """Returns the principal of a user of the machine `node`; "" is a box on its own."""
    return _at(node, f"{UID}{uid}")


def address_principal(address: str, node: str = "") -> Principal:
    """Returns the principal of a client that has given no key: its IPv4 address, or its IPv6 network."""
    return _at(node, f"{ADDRESS}{site_of(address)}")


def site_of(address: str) -> str:
    """Returns the part of an address that its client cannot choose freely; the text itself where it is no address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, IPV6_SITE_BITS), strict=False))
        found = found.ipv4_mapped
    return str(found)


def as_told_by(node: str, principal: Principal) -> Principal:
    """Returns the principal of a request that the box `node` forwards: no box speaks for another one's users."""
    if principal.startswith((KEY, f"{node}/")):
        return principal
    return _at(node, principal)


def cache_salt_of(principal: Principal, cache_salt: str | None = None, *, shared: bool = False) -> bytes:
    """Returns the salt that begins the keys of cached blocks; b"" where all principals share blocks.

    With a `cache_salt` of the application's choice, only requests with the same one share blocks.
    """
    if shared and not cache_salt:
        return b""
    parts = ("" if shared else principal, cache_salt or "")
    return hashlib.blake2b(repr(parts).encode(), digest_size=SALT_BYTES, person=b"edgemoe salt").digest()


def _at(node: str, name: str) -> Principal:
    return Principal(f"{node}/{name}" if node else name)


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()

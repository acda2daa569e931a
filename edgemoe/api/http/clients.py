"""Tells which principal sends an HTTP request: by its key, else by its credential on the Unix socket or its address."""

from __future__ import annotations

from starlette.types import Scope

from edgemoe.api.keys import ApiKey, KeyRing
from edgemoe.types.principal import Principal, address_principal, uid_principal


def principal_of_client(scope: Scope, keys: KeyRing | None, key: ApiKey | None, node: str) -> Principal:
    """Returns the principal of a request's client, which gave `key` if any. No field or header of it is looked at."""
    if key is not None and keys is not None:
        return keys.principal(key)
    uid = scope["state"].get("peer_uid")
    if uid is not None:
        return uid_principal(uid, node)
    return address_principal(peer_address(scope), node)


def peer_address(scope: Scope) -> str:
    """Returns the address at the other end of the connection; "" of a Unix socket."""
    client = scope.get("client")
    return client[0] if client else ""

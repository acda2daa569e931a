"""Names the principal of a request: the key or the peer credential that it came with."""

from __future__ import annotations


def principal_of(user: str) -> str:
    """Returns the principal of a request's user, which is the part that a client cannot choose."""
    return user.partition("/")[0]

"""Messages by which a box learns whether another one reaches it, and what time it is there."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgemoe.cluster.rpc.protocol import Message
from edgemoe.types.bounds import Words

WallSeconds = Annotated[float, Meta(ge=0, le=1e12)]  # since 1970


class Reach(Message, frozen=True, tag="Reach"):
    """Asks a box to try the asker's ports."""

    since = 2


class Reached(Message, frozen=True, tag="Reached"):
    """Names the lanes whose ports did not answer, and the time when the question came and when it was answered."""

    since = 2
    came_s: WallSeconds
    answered_s: WallSeconds
    unreached: Words = ()

"""Messages by which a command beside a box's daemon finds the stores of other boxes.

FindStore     asked of a front, answered StoreAt (or refused): which store its engine serves, and on which port
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgemoe.cluster.rpc.protocol import Message
from edgemoe.types.bounds import Port, Text


class FindStore(Message, frozen=True, tag="FindStore"):
    """Asks which store the box's engine serves."""

    since = 2


class StoreAt(Message, frozen=True, tag="StoreAt"):
    """Names a store, and the port on which its pieces are to be had."""

    since = 2
    bulk_port: Port
    model: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # digest
    name: Text  # as clients call it
    store: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)]  # its directory's name

"""The embedded agreement's messages over the control channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.control_messages import ControlMessage, RaftPayload
from edgemoe.cluster.rpc.protocol import SPOKEN


class RaftChannel:
    """A RaftLink over a control channel. Made on the channel's loop; `send` may be called from any thread.

    Whoever serves the channel hands RaftPayloads to `deliver`, and its ups and downs to `up` and `down`.
    """

    def __init__(self, channel: Channel[ControlMessage], nodes: list[str]) -> None:
        self._channel, self._nodes = channel, nodes
        self._loop = asyncio.get_running_loop()
        self._on_message: Callable[[str, bytes], None] = lambda _n, _p: None
        self._on_up: Callable[[str], None] = lambda _n: None
        self._on_down: Callable[[str], None] = lambda _n: None

    def listen(
        self,
        on_message: Callable[[str, bytes], None],
        on_up: Callable[[str], None],
        on_down: Callable[[str], None],
    ) -> None:
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        for node in self._nodes:
            if self._channel.is_up(node):
                on_up(node)

    def send(self, node: str, payload: bytes) -> bool:
        if not self._channel.is_up(node):
            return False
        self._loop.call_soon_threadsafe(self._channel.tell, node, RaftPayload(payload))
        return True

    def readable(self, nodes: Sequence[str]) -> int:
        """Returns the version of the protocol that all of these are known to speak."""
        return min((self._channel.version(node) for node in nodes), default=SPOKEN.highest)

    def deliver(self, node: str, message: RaftPayload) -> None:
        self._on_message(node, message.data)

    def up(self, node: str) -> None:
        self._on_up(node)

    def down(self, node: str) -> None:
        self._on_down(node)

"""Real channels on loopback for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq

from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Failure, Question
from edgemoe.cluster.rpc.keys import AllowList, Peer, Secret
from edgemoe.cluster.rpc.transport import ChannelSettings, Transport
from edgemoe.wire.protocol import Message, MessageLanguage, Versions


class Echo(Message, frozen=True, tag="Echo"):
    text: str


LANGUAGE: MessageLanguage[Any] = MessageLanguage(Echo, Failure)


async def echo(question: Question[Any]) -> Answer[Any]:
    return Answer(question.message, [bytes(t) for t in question.tensors])


def secret() -> Secret:
    public, private = zmq.curve_keypair()
    return Secret(private, public)


class Box:
    """One process's Net and one channel of it."""

    def __init__(
        self,
        node: str,
        key: Secret,
        allowed: dict[str, Secret],
        serve: Any = echo,
        language: Any = LANGUAGE,
        speaks: Versions | None = None,
        **settings: Any,
    ) -> None:
        self.node, self.key = node, key
        self.allowed = AllowList({name: (s.public.decode(),) for name, s in allowed.items()})
        self.transport = Transport(node, f"boot-of-{node}", key, self.allowed, speaks)
        self.channel: Channel[Any] = Channel(self.transport, "test", language, serve, ChannelSettings(**settings))
        self.port = self.channel.bind("127.0.0.1")

    @property
    def peer(self) -> Peer:
        return Peer(self.node, f"127.0.0.1:{self.port}", self.key.public.decode())


@asynccontextmanager
async def running(*boxes: Box) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(work) for box in boxes for work in (box.transport.run(), box.channel.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for box in boxes:
            box.transport.close()

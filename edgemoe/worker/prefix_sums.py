"""Tells the front which experts the cached part of a waiting request's prompt chose.

Its offer to the leader then goes by the very tokens that need not be computed [ELDR, Prefix Cache Coherence]. One
question at a time, on a thread of its own: the compute thread does nothing for it, and the event loop little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgemoe.engine.engine import Engine
from edgemoe.ipc.messages import FromEngine, PrefixSignatureReply, PrefixSignatureRequest
from edgemoe.policy.routing.signatures import shares_of
from edgemoe.types.expert_signatures import ExpertSignature

WAITING = 64  # questions; of more the front hears that there is nothing


class PrefixSums:
    """Owns the questions that wait. One event loop."""

    def __init__(self, engine: Engine, top_k: int, post: Callable[[FromEngine], None]) -> None:
        self._engine, self._top_k, self._post = engine, top_k, post
        self._waiting: asyncio.Queue[PrefixSignatureRequest] = asyncio.Queue(WAITING)

    def ask(self, message: PrefixSignatureRequest) -> None:
        """Queues a question."""
        if self._waiting.full():
            self._post(PrefixSignatureReply(request=message.request))
        else:
            self._waiting.put_nowait(message)

    async def run(self) -> None:
        """Answers until cancelled."""
        while True:
            message = await self._waiting.get()
            self._post(await asyncio.to_thread(self._look, message))

    def _look(self, message: PrefixSignatureRequest) -> PrefixSignatureReply:
        prompt = message.prompt[: self._engine.limits.context_tokens]
        tokens, counts = self._engine.prefixes.signature(prompt, message.salt)
        found = ExpertSignature(*shares_of(counts, self._top_k)) if tokens else None
        return PrefixSignatureReply(request=message.request, signature=found)

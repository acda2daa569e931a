"""Asks our engine what the cached part of a waiting request's prompt chose, before the request is offered.

Only of prompts that begin like one that the engine has had, and for HOLD_S at most: an answer that is late is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from edgemoe.ipc.messages import PrefixSignatureReply, PrefixSignatureRequest, ToEngine
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Request

HOLD_S = 0.05  # that an offer waits for our engine's answer
MOST_ASKED = 64  # questions without an answer
Then = Callable[[ExpertSignature | None], None]


class OpenQuestion(NamedTuple):
    """A question without an answer."""

    then: Then
    late: asyncio.TimerHandle


class PrefixQuestions:
    """Owns the questions that our engine has not answered. One event loop."""

    def __init__(self, tell: Callable[[ToEngine], bool]) -> None:
        """`tell` hands a message to our engine; false where that takes none."""
        self.answered = self.late = 0
        self._tell = tell
        self._open: dict[str, OpenQuestion] = {}  # by request

    def ask(self, request: Request, then: Then) -> bool:
        """Has `then` told, once, what is known. Returns False, and tells nothing, where the engine cannot be asked."""
        name = request.id
        if name in self._open or len(self._open) >= MOST_ASKED:
            return False
        if not self._tell(PrefixSignatureRequest(request=name, prompt=request.prompt, salt=request.salt)):
            return False
        late = asyncio.get_running_loop().call_later(HOLD_S, self._give_up, name)
        self._open[name] = OpenQuestion(then, late)
        return True

    def hear(self, message: PrefixSignatureReply) -> None:
        """Takes the engine's answer."""
        if (one := self._open.pop(message.request, None)) is not None:
            self.answered += 1
            one.late.cancel()
            one.then(message.signature)

    def _give_up(self, name: str) -> None:
        self.late += 1
        self._open.pop(name).then(None)

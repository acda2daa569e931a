"""Hands this front's requests over to boxes that decode, from boxes that only prefill.

    Submit(hand_over) -> the box that prefills       LastChunk <- it, when the end of the prompt is computed
    RequestOffer(decode) -> the leader               RequestGrant <- it: who decodes; without it the least loaded
    PullPrefix -> a box that decodes                 PrefixPulled <- it, when it has every block
    Submit with the tokens so far -> it, Cancel -> the box that prefilled

Until the last line the request goes on where it is, so a hand-over that fails costs no time and no token: the request
stays there. No more is kept of a hand-over than what stands here, and that only while the request is at that place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from edgemoe.cluster.rpc.engine_messages import Cancel, Submit
from edgemoe.cluster.rpc.messages.choices import SignatureTable
from edgemoe.cluster.rpc.messages.hand_over import LastChunk, PrefixPulled, PullPrefix

log = logging.getLogger(__name__)
PULL_S = 60.0  # that a box has to fetch a prompt's blocks, the end of whose computation it waits for
MOST_ATTEMPTS = 8  # of a request; later ones stay where they are


class MovableRequests(Protocol):
    """The request log, as far as hand-overs are concerned."""

    def turned_away(self, request: str, attempt: int) -> None:
        """Submits an attempt elsewhere."""

    def place_of(self, request: str) -> tuple[str, int]:
        """Returns the engine that has the request, and its attempt there."""


class EngineWays(Protocol):
    """The ways to engines, ours and others'."""

    def choose_decoder(self, moving: HandOver, then: Callable[[str, int], None]) -> None:
        """Tells `then`, once, where a request is to go on ("": nowhere), and the number of the offer by which."""

    def is_open(self, place: str) -> bool:
        """Returns whether the engine there takes requests now."""

    def send_pull(self, place: str, message: PullPrefix) -> None:
        """Asks the engine there to fetch a prompt's blocks."""

    def recall(self, place: str, message: Cancel) -> None:
        """Has the engine there forget a request."""


@dataclass(slots=True)
class HandOver:
    """One request that is to move, and how far that is."""

    message: Submit  # by which it came to the place where it is
    place: str
    node: str  # of that place
    signature: SignatureTable | None = None  # of its prompt
    target: str = ""  # that fetches its blocks
    offer: int = 0  # by which the leader named that; 0: by none
    whole: bool = False  # it has them


class HandOvers:
    """One owner, one event loop."""

    def __init__(self, requests: MovableRequests, ways: EngineWays) -> None:
        self.done = 0
        self._requests, self._ways = requests, ways
        self._under_way: dict[str, HandOver] = {}  # by request

    def __len__(self) -> int:
        return len(self._under_way)

    def expect(self, message: Submit, place: str, node: str) -> Submit:
        """Takes note of a request that is submitted to a box that only prefills. Returns the message to submit."""
        if message.attempt > MOST_ATTEMPTS:
            return message
        self._under_way[message.request.id] = HandOver(message, place, node)
        return msgspec.structs.replace(message, hand_over=True)

    def target_of(self, message: Submit) -> tuple[str, int]:
        """Returns which engine has the request's blocks and is to have it now, by which offer; "" for others."""
        moving = self._under_way.get(message.request.id)
        return (moving.target, moving.offer) if moving is not None and moving.whole else ("", 0)

    def hear(self, node: str, message: LastChunk | PrefixPulled) -> None:
        """Acts on what the engine of that box ("": our own) says of a request of ours.

        News of another attempt, or of a box that has no part in it, are of no use.
        """
        if (moving := self._expected(message.request, message.attempt)) is None:
            return
        match message:
            case LastChunk(signature=signature) if _is_of(moving.place, node):
                moving.signature = signature
                self._ways.choose_decoder(moving, lambda target, offer: self._begin(moving, target, offer))
            case PrefixPulled(why=why) if moving.target and _is_of(moving.target, node):
                self._stay(moving, why) if why else self._move(moving)

    def failed(self, request: str, attempt: int) -> None:
        """Ends a hand-over whose PullPrefix did not arrive."""
        if (moving := self._expected(request, attempt)) is not None:
            self._stay(moving, "lost")

    def purge(self) -> None:
        """Forgets requests that have ended, or are elsewhere for another reason."""
        self._under_way = {name: moving for name, moving in self._under_way.items() if self._is_current(moving)}

    def _is_current(self, moving: HandOver) -> bool:
        return self._requests.place_of(moving.message.request.id) == (moving.place, moving.message.attempt)

    def _expected(self, request: str, attempt: int) -> HandOver | None:
        moving = self._under_way.get(request)
        if moving is None or not self._is_current(moving) or moving.message.attempt != attempt:
            return None
        return moving

    def _begin(self, moving: HandOver, target: str, offer: int) -> None:
        message = moving.message
        if self._under_way.get(message.request.id) is not moving or not self._is_current(moving):
            return
        if not target:
            self._forget(moving)
            return
        moving.target, moving.offer = target, offer
        pull = PullPrefix(
            request=message.request.id,
            attempt=message.attempt,
            node=moving.node,
            prompt=message.request.prompt + message.emitted,
            remaining_ms=min(1e3 * PULL_S, message.remaining_ms),
        )
        self._ways.send_pull(moving.target, pull)

    def _move(self, moving: HandOver) -> None:
        if not self._ways.is_open(moving.target):
            self._stay(moving, "gone")
            return
        name, attempt = moving.message.request.id, moving.message.attempt
        moving.whole = True
        self._requests.turned_away(name, attempt)
        self._ways.recall(moving.place, Cancel(request=name, attempt=attempt))
        self.done += 1
        if self._under_way.get(name) is moving:
            self._forget(moving)

    def _stay(self, moving: HandOver, why: str) -> None:
        log.info("a request stays where it was prefilled", extra={"at": moving.node, "why": why})
        self._forget(moving)

    def _forget(self, moving: HandOver) -> None:
        del self._under_way[moving.message.request.id]


def _is_of(place: str, node: str) -> bool:
    """Returns whether the engine is that box's."""
    return place.rpartition(":")[0] == node

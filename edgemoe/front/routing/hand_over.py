"""Hands this front's requests over to boxes that decode, from boxes that only prefill.

    Submit(hand_over) -> the box that prefills       LastChunkStarted <- it, when the end of the prompt is computed
    RequestOffer(decode) -> the leader               RequestGrant <- it: who decodes; without it the least loaded
    FetchPrefixKV -> a box that decodes                 PrefixKVFetched <- it, when it has every block
    Submit with the tokens so far -> it, Cancel -> the box that prefilled

Until the last line the request goes on where it is, so a hand-over that fails costs no time and no token. Where the
blocks do not come, another box with a free slot is to fetch them, and after MOST_TARGETS the request stays. A box whose
answer is of no use any more is told so at once. No more is kept of a hand-over than what stands here, and that only
while the request is at that place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from edgemoe.ipc.messages import Cancel, FetchPrefixKV, LastChunkStarted, PrefixKVFetched, Submit
from edgemoe.policy.route import node_of
from edgemoe.types.expert_signatures import ExpertSignature

log = logging.getLogger(__name__)
PULL_S = 60.0  # that a box has to fetch a prompt's blocks, the end of whose computation it waits for
ANSWER_S = 5.0  # that its answer may take beyond that
MOST_ATTEMPTS = 8  # of a request; later ones stay where they are
MOST_TARGETS = 2  # boxes that are to fetch the blocks of one attempt, one after the other


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

    def is_there(self, place: str) -> bool:
        """Returns whether there is that engine, as far as is known, whatever it takes."""

    def send_pull(self, place: str, message: FetchPrefixKV) -> None:
        """Asks the engine there to fetch a prompt's blocks."""

    def recall(self, place: str, message: Cancel, offer: int = 0) -> None:
        """Has the engine there forget a request, or fetch nothing for it, and the leader that offer."""


@dataclass(slots=True)
class HandOver:
    """One request that is to move, and how far that is."""

    message: Submit  # by which it came to the place where it is
    place: str
    node: str  # of that place
    told: bool = False  # its prompt's end
    signature: ExpertSignature | None = None  # of its prompt
    target: str = ""  # that fetches its blocks
    offer: int = 0  # by which the leader named that; 0: by none
    until_s: float = 0.0  # when the target must have answered
    failed: list[str] = field(default_factory=list)  # targets that did not get them
    whole: bool = False  # the target has them


class HandOvers:
    """One owner, one event loop."""

    def __init__(self, requests: MovableRequests, ways: EngineWays, now: Callable[[], float] = time.monotonic) -> None:
        self.done = 0
        self._requests, self._ways, self._now = requests, ways, now
        self._under_way: dict[str, HandOver] = {}  # by request

    def __len__(self) -> int:
        return len(self._under_way)

    def expect(self, message: Submit, place: str, node: str) -> Submit:
        """Takes note of a request that is submitted to a box that only prefills. Returns the message to submit."""
        if message.attempt > MOST_ATTEMPTS:
            return message
        self._under_way[message.request.id] = HandOver(message, place, node)
        return msgspec.structs.replace(message, hand_over=True)

    def pop_target(self, request: str) -> tuple[str, int]:
        """Forgets how far a request is that is submitted anew.

        Returns which engine has its blocks and is to have it now, by which offer; "" for others.
        """
        moving = self._under_way.get(request)
        if moving is not None and moving.whole:
            del self._under_way[request]
            return moving.target, moving.offer
        self.ended(request)
        return "", 0

    def awaits(self, request: str, attempt: int, place: str) -> bool:
        """Returns whether the engine there is to fetch the blocks of that attempt."""
        moving = self._expected(request, attempt)
        return moving is not None and moving.target == place

    def hear(self, node: str, message: LastChunkStarted | PrefixKVFetched) -> None:
        """Acts on what the engine of that box ("": our own) says of a request of ours.

        News of another attempt, or of a box that has no part in it, are of no use; nor is what was heard before.
        """
        if (moving := self._expected(message.request, message.attempt)) is None:
            return
        match message:
            case LastChunkStarted(signature=signature) if _is_of(moving.place, node) and not moving.told:
                moving.told, moving.signature = True, signature
                self._choose(moving)
            case PrefixKVFetched(why=why) if moving.target and _is_of(moving.target, node):
                self._try_next(moving, why) if why else self._move(moving)

    def unsent(self, request: str, attempt: int, place: str) -> None:
        """Takes note of a FetchPrefixKV that did not arrive."""
        if self.awaits(request, attempt, place):
            self._try_next(self._under_way[request], "lost")

    def ended(self, request: str) -> None:
        """Forgets a request that has ended, or is elsewhere for another reason, and what is fetched for it."""
        if (moving := self._under_way.pop(request, None)) is not None:
            self._call_off(moving)

    def look(self) -> None:
        """Gives up targets that have gone, or do not answer, and forgets requests that are elsewhere."""
        for name, moving in list(self._under_way.items()):
            if not self._is_current(moving):
                self.ended(name)
            elif moving.target and (self._now() > moving.until_s or not self._ways.is_there(moving.target)):
                self._try_next(moving, "lost")

    def _is_current(self, moving: HandOver) -> bool:
        return self._requests.place_of(moving.message.request.id) == (moving.place, moving.message.attempt)

    def _expected(self, request: str, attempt: int) -> HandOver | None:
        moving = self._under_way.get(request)
        if moving is None or not self._is_current(moving) or moving.message.attempt != attempt:
            return None
        return moving

    def _choose(self, moving: HandOver) -> None:
        self._ways.choose_decoder(moving, lambda target, offer: self._begin(moving, target, offer))

    def _begin(self, moving: HandOver, target: str, offer: int) -> None:
        message = moving.message
        if self._under_way.get(message.request.id) is not moving or not self._is_current(moving):
            return
        if not target:
            self._stay(moving)
            return
        remaining_ms = min(1e3 * PULL_S, message.remaining_ms)
        moving.target, moving.offer = target, offer
        moving.until_s = self._now() + remaining_ms / 1e3 + ANSWER_S
        pull = FetchPrefixKV(
            request=message.request.id,
            attempt=message.attempt,
            node=moving.node,
            prompt=message.request.prompt + message.emitted,
            salt=message.request.salt,
            remaining_ms=remaining_ms,
        )
        self._ways.send_pull(moving.target, pull)

    def _move(self, moving: HandOver) -> None:
        if not self._ways.is_open(moving.target):
            self._try_next(moving, "gone")
            return
        name, attempt = moving.message.request.id, moving.message.attempt
        moving.whole = True
        self._requests.turned_away(name, attempt)
        self._ways.recall(moving.place, Cancel(request=name, attempt=attempt))
        self.done += 1

    def _try_next(self, moving: HandOver, why: str) -> None:
        log.info("blocks of a request did not come", extra={"from": moving.node, "to": moving.target, "why": why})
        self._call_off(moving)
        moving.failed.append(moving.target)
        moving.target, moving.offer = "", 0
        if len(moving.failed) < MOST_TARGETS:
            self._choose(moving)
        else:
            self._stay(moving)

    def _stay(self, moving: HandOver) -> None:
        log.info("a request stays where it was prefilled", extra={"at": moving.node})
        del self._under_way[moving.message.request.id]

    def _call_off(self, moving: HandOver) -> None:
        """Has the target, if there is one, fetch nothing more, and the leader forget that it has the request."""
        if moving.target:
            message = Cancel(request=moving.message.request.id, attempt=moving.message.attempt)
            self._ways.recall(moving.target, message, moving.offer)


def _is_of(place: str, node: str) -> bool:
    """Returns whether the engine is that box's."""
    return node_of(place) == node

"""Performs the instructions of `RequestStateMachine`: delivers tokens, and sends messages to this box's engine.

`ClusterRequests` performs the instructions for other boxes and the leader; a box on its own has none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from edgemoe.api.backend import NOTHING
from edgemoe.config.settings import EngineSettings, Route
from edgemoe.errors import RequestError
from edgemoe.front import request_events as events
from edgemoe.front.engine_process import LocalConnection
from edgemoe.front.request_state import RequestStateMachine
from edgemoe.front.request_table import RoutingFacts
from edgemoe.ipc.messages import Limits, Submit
from edgemoe.policy.routing.least_loaded import TargetLoad, node_of
from edgemoe.types.request import Emission, Phases, Request

log = logging.getLogger(__name__)


class ClientSubmission:
    """The requests of one HTTP request: an async iterator over their emissions, in batches."""

    def __init__(self, cancel: Callable[[str], None], requests: Sequence[Request]) -> None:
        """Takes `cancel`, which ends a request by its id."""
        self.live = {request.id for request in requests}
        self._cancel = cancel
        self._items: list[Emission] = []
        self._error: RequestError | None = None
        self._changed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[list[Emission]]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if items := self._items:
                self._items = []
                yield items
            if self._error is not None:
                raise self._error.with_traceback(None)  # other clients may get the same one
            if not self.live and not self._items:
                return

    def cancel(self, request: str) -> None:
        """Cancels one of the requests; the others go on."""
        self._cancel(request)
        self._changed.set()

    def deliver(self, emission: Emission) -> None:
        """Hands over an emission. Called by the router."""
        self._items.append(emission)
        self._changed.set()

    def fail(self, error: RequestError) -> None:
        """Ends the iteration with `error`, after the items already received. Called by the router."""
        self._error = self._error or error
        self._changed.set()


class PeerInstructions(RoutingFacts, Protocol):
    """Performs the state machine's instructions to other boxes and the leader, and answers its questions about them."""

    def perform(self, instruction: events.RequestInstruction) -> None:
        """Sends to another box's engine, to the leader, or asks this box's engine about a prompt."""

    def on_submitted_here(self, message: Submit, offer: int) -> None:
        """Counts a request that went to this box's engine, by that offer to the leader."""


class OneBox:
    """The surroundings of a box on its own: its engine, and nobody else."""

    node = ""
    route: Route = "pull"
    leadership = ("", 0)

    def __init__(self, connection: LocalConnection) -> None:
        self._connection = connection

    def own_place(self) -> str:
        return self._connection.place

    def stands_still(self) -> Collection[str]:
        return ()

    def hosted_count(self) -> int:
        return 0

    def others(self) -> Mapping[str, str]:
        return {}

    def reported(self, place: str, node: str) -> TargetLoad:
        raise AssertionError(f"{node} is no box that this one knows")

    def role(self, node: str) -> Phases:
        return "both"

    def starts_at_once(self, request: Request) -> bool:
        return False

    def knows_prompt(self, request: Request) -> bool:
        return False

    def may_have_cached(self, request: Request) -> bool:
        return False

    def has_signature(self, request: Request) -> bool:
        return False


class RequestRouter:
    """Owns the state machine of this front's requests, and the clients that wait for them."""

    def __init__(
        self, settings: EngineSettings, connection: LocalConnection, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.connection = connection
        self.draining = False  # nothing more is taken here
        self.closed: RequestError | None = None  # why nothing is accepted
        slots = settings.max_sequences
        self.machine = RequestStateMachine(slots, slots + settings.max_queue, OneBox(connection), now)
        self._now = now
        self._peers: PeerInstructions | None = None
        self._submissions: dict[str, ClientSubmission] = {}  # by request
        self._events: deque[events.RequestEvent] = deque()
        self._todo: deque[events.RequestInstruction] = deque()
        self._is_handling = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self.machine)

    def fit(self, limits: Limits) -> None:
        """Takes the engine's own limits: it may have room for fewer sequences than the settings allow."""
        self.machine.slots, self.machine.capacity = limits.max_sequences, limits.max_sequences + limits.max_queue

    def join(self, peers: PeerInstructions) -> None:
        """Routes requests to other boxes too from now on."""
        self._peers = self.machine.surroundings = peers

    @property
    def elsewhere(self) -> Collection[str]:
        """Returns engines of other boxes that take requests."""
        return self.machine.surroundings.others()

    def describe(self) -> dict[str, int]:
        """Returns the requests alive, and the room for them, for /health."""
        return {
            "live": len(self.machine),
            "slots": self.machine.slots,
            "capacity": self.machine.room,
            "capacity_per_principal": self.machine.capacity_per_principal,
            "capacity_per_user": self.machine.capacity_per_user,
        }

    @contextmanager
    def open(
        self, requests: Sequence[Request], timeout_s: float, emitted: Mapping[str, Sequence[int]] = NOTHING
    ) -> Iterator[ClientSubmission]:
        """Accepts the requests, behind tokens `emitted` elsewhere. Leaving the block cancels the ones that still run.

        Raises QueueFull, InvalidRequest (more than would ever fit), and the error in `closed`.
        """
        if self.closed is not None:
            raise self.closed.with_traceback(None)  # raised again and again, it would keep every caller's frames
        for request in requests:
            self.machine.quarantine.check(request)
        identity = requests[0].identity
        self.machine.check_room(identity.principal, len(requests), identity.user)
        submission = ClientSubmission(self.cancel, requests)
        for request in requests:
            self._submissions[request.id] = submission
        self._idle.clear()
        self.handle(events.RequestsAccepted(requests, timeout_s, emitted))
        try:
            yield submission
        finally:
            for name in list(submission.live):
                self.cancel(name)

    def cancel(self, request: str) -> None:
        """Ends a request, for its engine too. Unknown ones have ended already."""
        self._remove(request)
        self.handle(events.RequestCancelled(request))

    def fail_all(self, error: RequestError) -> None:
        """Ends every live request with `error`."""
        self.handle(events.AllRequestsFailed(error))

    async def empty(self) -> None:
        """Waits until no request is alive."""
        await self._idle.wait()

    def handle(self, event: events.RequestEvent) -> None:
        """Hands an event to the state machine and performs its instructions; nested events' instructions come last."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events or self._todo:
                while self._todo:
                    self._perform(self._todo.popleft())
                if self._events:
                    self._todo.extend(self.machine.handle(self._events.popleft()))
        finally:
            self._is_handling = False
            if not len(self.machine):
                self._idle.set()

    def check_integrity(self) -> None:
        """Raises AssertionError where the requests contradict themselves."""
        self.machine.check_integrity()
        assert self._idle.is_set() == (not len(self.machine)), "idle, with requests alive (or the other way round)"
        assert len(self._submissions) == len(self.machine), "clients wait for requests that are not alive"
        for name, submission in self._submissions.items():
            assert name in submission.live, f"the client of {name} does not wait for it"

    def _perform(self, instruction: events.RequestInstruction) -> None:
        match instruction:
            case events.DeliverToken(emission):
                submission = self._submissions[emission.request]
                if emission.finish:
                    self._remove(emission.request)
                submission.deliver(emission)
            case events.FailRequest(request, error):
                if (waiting := self._remove(request)) is not None:
                    waiting.fail(error)
            case events.SendSubmit(place, message, offer) if not node_of(place):
                if place == self.connection.place and self.connection.send(message):
                    if self._peers is not None:
                        self._peers.on_submitted_here(message, offer)
                else:
                    self.handle(events.SubmitRefused(message.request.id, message.attempt, place))
            case events.SendCancel(place, message) if not node_of(place):
                if place == self.connection.place:
                    self.connection.send(message)
            case events.SendFetch(place, message) if not node_of(place):
                if place != self.connection.place or not self.connection.send(message):
                    self.handle(events.FetchRefused(message.request, message.attempt, place))
            case _ if self._peers is not None:
                self._peers.perform(instruction)

    def _remove(self, request: str) -> ClientSubmission | None:
        """Returns the client that waited for a request, which is over."""
        if (submission := self._submissions.pop(request, None)) is not None:
            submission.live.discard(request)
        return submission

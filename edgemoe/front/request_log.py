"""The request log: every accepted request, what it has emitted, and who waits for it. One owner, one event loop.

It makes an engine's death invisible: a request's continuation is a function of the request and the tokens emitted so
far, so `replay` submits each live one again as its next attempt, and `take` lets through only the current attempt's
next index. So no token is delivered twice, changed or left out, whatever arrives late or from a dead incarnation.

A request that kills engines must not take its neighbours along. After a death those that got no further go on alone,
the others together: a suspect is submitted once no other request has an engine, or after PATIENCE_S, one at a time,
and what comes meanwhile is held until it has proved harmless, or for PATIENCE_S. See `Attempts`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from edgemoe.errors import DeadlineExceeded, EngineCrashed, InvalidRequest, QueueFull, RequestError
from edgemoe.front.requests.engine_use import HeldRequest
from edgemoe.front.requests.logged_request import LoggedRequest
from edgemoe.front.requests.submission import LoggedSubmission
from edgemoe.ipc.messages import Cancel, Submit
from edgemoe.policy import shares
from edgemoe.types.request import Emission, Request

RATE_ALPHA = 0.1  # weight of the latest request in the mean duration and length
FIRST_GUESS_TOKENS = 256.0  # expected output before anything has finished
PATIENCE_S = 10.0  # that a suspect waits for the others to end, and that others wait for a suspect


class RequestLog:
    """Accepts, replays, delivers and forgets requests. Call from one event loop."""

    def __init__(
        self,
        capacity: int,
        submit: Callable[[Submit], str],
        cancel: Callable[[str, Cancel], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`submit` hands a message to an engine and names it, or "" where none takes it; `cancel` names the engine."""
        self.capacity = capacity  # requests alive at once, waiting ones included, as far as our engine has room
        self.room_elsewhere: Callable[[], int] = lambda: 0  # what others have of them, and room for
        self.ended: Callable[[str], None] = lambda _request: None  # is told of requests that are forgotten
        self.closed: RequestError | None = None  # why nothing is accepted
        self.stale = 0  # emissions of an earlier attempt, or of none
        self.gaps = 0  # emissions that skipped an index
        self.replayed = 0
        self.blamed = 0  # requests that were given up as what engines die of
        self._hand, self._recall = submit, cancel
        self._now = now
        self._live: dict[str, LoggedRequest] = {}
        self._counts = Counter[str]()  # of live requests, by place: each beat asks for them often
        self._suspects: deque[LoggedRequest] = deque()  # to be tried one by one
        self._on_trial = ""
        self._held: deque[LoggedRequest] = deque()  # until the one on trial has proved harmless
        self._trial_s = 0.0  # since when somebody is on trial, or the next suspect waits
        self._mean_s = 1.0  # a request's duration, lately
        self.expected_tokens = FIRST_GUESS_TOKENS  # of an answer, by those before
        self._most = capacity  # alive at once, by the room that there was when the last was taken in
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def room(self) -> int:
        """Returns how many requests may be alive at once, on all boxes."""
        return self.capacity + self.room_elsewhere()

    @property
    def capacity_per_principal(self) -> int:
        """Returns how many of them one principal gets while nobody else has any."""
        return shares.most_of(self.room)

    @property
    def capacity_per_user(self) -> int:
        """Returns how many of these one user gets while its principal has no others."""
        return shares.most_of(self.capacity_per_principal, shares.OF_USER)

    # --- what the application calls ---

    @contextmanager
    def open(self, requests: Sequence[Request], timeout_s: float) -> Iterator[LoggedSubmission]:
        """Accepts the requests; what still runs when the block is left is cancelled.

        Raises QueueFull, InvalidRequest (more than would ever fit), and whatever `closed` says.
        """
        self._check_room(requests, room := self.room)
        self._most, now = max(room, len(self._live)), self._now()
        ticket = LoggedSubmission(self.cancel, now + timeout_s)
        for request in requests:
            self._live[request.id] = live = LoggedRequest(request, ticket, now)
            self._counts[live.place] += 1
            ticket.live.add(request.id)
            self._idle.clear()
            self._submit(live)
        try:
            yield ticket
        finally:
            for name in list(ticket.live):
                self.cancel(name)

    def cancel(self, request: str) -> None:
        """Forgets a request, and has the engine forget it. Unknown ones are forgotten already."""
        if (live := self._live.get(request)) is not None:
            self._forget(live)
            if live.place:
                self._recall(live.place, Cancel(request=request, attempt=live.attempt))

    # --- what the supervisor calls ---

    def take(self, emissions: Iterable[Emission]) -> None:
        """Delivers what an engine emitted."""
        for emission in emissions:
            live = self._live.get(emission.request)
            if live is None or emission.attempt != live.attempt or emission.index < len(live.emitted):
                self.stale += 1
            elif emission.index > len(live.emitted):
                self.gaps += 1
                if live.place:
                    self._recall(live.place, Cancel(request=emission.request, attempt=live.attempt))
                if live.attempts.tokens:  # and nobody died
                    live.attempts.take_back()
                self._submit(live)
            else:
                self._deliver(live, emission)

    def request_of(self, request: str) -> Request | None:
        """Returns a live request."""
        live = self._live.get(request)
        return None if live is None else live.request

    def place_of(self, request: str) -> tuple[str, int]:
        """Returns the engine that has the request, and its attempt there; ("", 0) where it is not alive."""
        live = self._live.get(request)
        return (live.place, live.attempt) if live is not None else ("", 0)

    def count_at(self, place: str) -> int:
        """Counts the live requests that this engine has."""
        return self._counts[place]

    def held_at(self, place: str) -> Iterator[HeldRequest]:
        """Returns the live requests that this engine has."""
        for live in self._live.values():
            if live.place == place:
                request = live.request
                yield HeldRequest(len(request.prompt), len(live.emitted), request.sampling.max_tokens)

    def is_live(self, request: str) -> bool:
        """Returns whether the request is still to be answered."""
        return request in self._live

    def submit_waiting(self, request: str) -> None:
        """Submits a request, if it is still to be answered and no engine has it."""
        live = self._live.get(request)
        if live is not None and not live.place and live not in self._suspects:
            self._submit(live)

    def replay(self, places: Collection[str] = ()) -> None:
        """Submits every live request that none of these engines has to one that takes it, in order of acceptance."""
        lost = [live for live in self._live.values() if not live.place or live.place not in places]
        counts = self._counts.copy()
        for live in lost:
            if live.place:
                self.replayed += 1
                live.attempts.end_with_engine(alone=counts[live.place] == 1)
                self._put(live, "")
            if live.request.id == self._on_trial:
                self._on_trial = ""
        self._suspects.clear()
        for live in [live for live in lost if not live.attempts.allowed]:
            self._blame(live)
            lost.remove(live)
        suspects = [live for live in lost if live.attempts.suspect]
        self._suspects.extend(sorted(suspects, key=lambda live: live.attempts.allowed))
        self._trial_s = self._now()
        for live in lost:
            if live not in self._suspects:
                self._submit(live)
        self._try_next()

    def turned_away(self, request: str, attempt: int) -> None:
        """Submits an attempt that an engine would not take to another, as far as there is one."""
        live = self._live.get(request)
        if live is not None and live.attempt == attempt and live.place:
            self._put(live, "")
            live.attempts.take_back()
            self._submit(live)

    def expire(self) -> None:
        """Ends the requests whose deadline has passed. Tries the next suspect where it has waited long enough."""
        now = self._now()
        for live in [live for live in self._live.values() if live.ticket.deadline <= now]:
            self.cancel(live.request.id)
            live.ticket.fail(DeadlineExceeded("the answer was not finished in time (api.request_timeout_s)"))
        self._try_next()

    def fail_all(self, error: RequestError) -> None:
        """Ends every live request with `error`."""
        for live in list(self._live.values()):
            self.cancel(live.request.id)
            live.ticket.fail(error)

    async def empty(self) -> None:
        """Waits until no request is alive."""
        await self._idle.wait()

    def check_integrity(self) -> None:
        """Raises AssertionError where the request log contradicts itself."""
        for name, live in self._live.items():
            assert name == live.request.id, f"{name} is filed under another's name"
            assert name in live.ticket.live, f"{name} is not on its own ticket"
            assert len(live.emitted) <= live.request.sampling.max_tokens, f"{name} has emitted too much"
            assert live.attempts.fruitless <= 2 * live.attempt, f"{name} counts attempts that never were"
            assert live.ticket.live <= self._live.keys(), f"the ticket of {name} holds forgotten requests"
        held = {live.request.id for live in (*self._suspects, *self._held)}
        placed = {name for name, live in self._live.items() if live.place}
        assert not placed & held, "a request waits for a trial, and an engine has it"
        assert not self._on_trial or self._on_trial in self._live, "one is on trial that is over"
        assert self._idle.is_set() == (not self._live), "idle, with requests alive (or the other way round)"
        assert self._counts == Counter(live.place for live in self._live.values()), "requests are counted elsewhere"
        assert len(self._live) <= self._most, "more requests than there is room for"

    def _check_room(self, requests: Sequence[Request], room: int) -> None:
        wanted = len(requests)
        if self.closed is not None:
            raise self.closed.with_traceback(None)  # it is raised again and again, and would keep all who were refused
        if wanted > (most := shares.most_of(shares.most_of(room), shares.OF_USER)):
            raise InvalidRequest(f"{wanted} choices at once are more than the {most} that one user may ever have")
        free, identity = room - len(self._live), requests[0].identity
        held = Counter(
            live.identity.user for live in self._live.values() if live.identity.principal == identity.principal
        )
        left = shares.left_of(held.total(), free)
        if not shares.fits(wanted, held[identity.user], left, shares.OF_USER):
            wait_s = min(60.0, max(1.0, self._mean_s * wanted / 2))
            alive = f"{len(self._live)} requests are waiting or running, {held.total()} of them yours"
            raise QueueFull(f"{alive}; try again", retry_after_s=wait_s)

    def _submit(self, live: LoggedRequest) -> None:
        """Sends the next attempt. With no engine to take it, `replay` will; during a trial, what follows that."""
        self._put(live, "")
        if not live.attempts.allowed:
            self._blame(live)
            return
        now = self._now()
        if self._on_trial not in ("", live.request.id) and now < self._trial_s + PATIENCE_S:
            self._held.append(live)
            return
        message = Submit(
            request=live.request,
            emitted=tuple(live.emitted),
            attempt=live.attempt + 1,
            remaining_ms=max(0.0, (live.ticket.deadline - now) * 1e3),
            waited_ms=(now - live.accepted) * 1e3,
        )
        if place := self._hand(message):
            self._put(live, place)
            live.attempt += 1
            live.attempts.begin()

    def _put(self, live: LoggedRequest, place: str) -> None:
        self._counts[place] += 1
        self._leave(live)
        live.place = place

    def _leave(self, live: LoggedRequest) -> None:
        self._counts[live.place] -= 1
        if not self._counts[live.place]:
            del self._counts[live.place]  # engines come and go

    def _deliver(self, live: LoggedRequest, emission: Emission) -> None:
        if emission.token is not None:
            live.emitted.append(emission.token)
            live.attempts.add_token()
            if live.request.id == self._on_trial and not live.attempts.suspect:
                self._try_next()
        if emission.finish:
            self._mean_s += RATE_ALPHA * (self._now() - live.accepted - self._mean_s)
            self.expected_tokens += RATE_ALPHA * (len(live.emitted) - self.expected_tokens)
            self._forget(live)
        live.ticket.put(emission)

    def _blame(self, live: LoggedRequest) -> None:
        """Gives up what engines die of."""
        self.blamed += 1
        live.ticket.fail(EngineCrashed(live.attempts.charge))
        for other in self._live.values():
            other.attempts.explain(bool(other.place))
        self._forget(live)

    def _try_next(self) -> None:
        """Submits the next suspect once it can be alone, or has waited long enough, and all that need not wait."""
        now, live = self._now(), self._live.get(self._on_trial)
        if live is not None and live.attempts.suspect and live.place and now < self._trial_s + PATIENCE_S:
            return
        if self._on_trial and (live is None or not live.attempts.suspect):
            self._on_trial, self._trial_s = "", now
        self._release()
        while self._suspects and not self._on_trial:
            live = self._suspects[0]
            if live.request.id in self._live and live.attempts.suspect:
                if self._is_any_placed() and now < self._trial_s + PATIENCE_S:
                    return
                self._on_trial, self._trial_s = live.request.id, now
            self._suspects.popleft()
            if live.request.id in self._live:
                self._submit(live)

    def _release(self) -> None:
        """Submits what was held during a trial."""
        held, self._held = self._held, deque()
        for live in held:
            if self._live.get(live.request.id) is live and not live.place and live not in self._suspects:
                self._submit(live)

    def _is_any_placed(self) -> bool:
        """Returns whether any engine has a request."""
        return self._counts.total() > self._counts[""]

    def _forget(self, live: LoggedRequest) -> None:
        del self._live[live.request.id]
        self._leave(live)
        live.ticket.live.discard(live.request.id)
        self.ended(live.request.id)
        if live.request.id == self._on_trial or self._suspects:
            self._try_next()
        if not self._live:
            self._idle.set()

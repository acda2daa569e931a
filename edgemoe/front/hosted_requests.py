"""Passes other fronts' requests to this box's engine, and their tokens back. The other fronts own the requests.

At the engine a request, or a fetch of KV blocks, is named "NODE/NUMBER" by its front and order of arrival. Tokens go
back in batches, one after the other; the answer names the attempts that the front no longer wants. If a front is
unreachable for GIVEN_UP_S, or returns as another incarnation, its requests end here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from edgemoe.cluster.control.messages import ControlMessage, ForwardedEmissions, FrameAccepted
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.errors import EdgemoeError, PeerBusy, PeerError, PeerRefused, Unsendable, WireError
from edgemoe.front.request_table import HeldRequest
from edgemoe.ipc.messages import (
    Cancel,
    Emissions,
    FetchPrefixKV,
    LastChunkStarted,
    PrefixKVFetched,
    PrefixSignatureReply,
    PromptSignature,
    Submit,
    ToEngine,
    encode,
)
from edgemoe.types.bounds import USER_CHARS
from edgemoe.types.request import Emission, Principal, Request, as_told_by

log = logging.getLogger(__name__)
GIVEN_UP_S = 5.0
ASK_S, RETRY_S = 2.0, 0.1
BATCH = 2000  # emissions in one message
MAX_FETCHES = 256  # of one front: far more than its requests that may move here at once
RequestNews = LastChunkStarted | PrefixKVFetched | PromptSignature | PrefixSignatureReply


@dataclass(slots=True, eq=False)
class HostedRequest:
    """One attempt at a request of another front."""

    front: RemoteFront
    request: str  # the request's own name
    attempt: int
    name: str  # at our engine
    prompt_tokens: int
    max_tokens: int
    emitted: int


@dataclass(frozen=True, slots=True, eq=False)
class HostedFetch:
    """A fetch of KV blocks for one attempt at a request of another front."""

    front: RemoteFront
    request: str
    attempt: int


@dataclass(slots=True, eq=False)
class RemoteFront:
    """One incarnation of another front, and its requests here."""

    node: str
    boot: str
    hosted_requests: dict[str, HostedRequest] = field(default_factory=dict)  # by the request's own name
    outbox: list[Emission] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None


class HostedRequests:
    """Owns the requests of other fronts at this box's engine."""

    def __init__(
        self,
        channel: Channel[ControlMessage],
        send: Callable[[ToEngine], bool],
        spawn: Callable[..., asyncio.Task[None]],
    ) -> None:
        """Takes `send`, which sends a message to this box's engine, and `spawn`, which starts a task."""
        self.served = 0
        self._channel, self._send, self._spawn = channel, send, spawn
        self._fronts: dict[str, RemoteFront] = {}
        self._hosted_requests: dict[str, HostedRequest] = {}  # by their names at our engine
        self._fetches: dict[str, HostedFetch] = {}  # likewise
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._hosted_requests)

    def held(self) -> Iterator[HeldRequest]:
        """Yields the progress of each request."""
        for hosted in self._hosted_requests.values():
            yield HeldRequest(hosted.prompt_tokens, hosted.emitted, hosted.max_tokens)

    def submit(self, node: str, boot: str, message: Submit) -> None:
        """Submits a request of that front to the engine, unless a later attempt of it is here.

        Raises PeerBusy if the engine takes none, PeerRefused if the user's name is too long or the grammar untried.
        """
        principal, user = _identity(node, message.request)
        if not message.request.sampling.is_grammar_tried:
            raise PeerRefused("grammars that their front has not tried in bounds are not compiled here")
        front, request = self._front_of(node, boot), message.request
        before = front.hosted_requests.get(request.id)
        if before is not None and before.attempt > message.attempt:
            return
        hosted = HostedRequest(
            front,
            request.id,
            message.attempt,
            f"{node}/{next(self._numbers)}",
            len(request.prompt),
            request.sampling.max_tokens,
            len(message.emitted),
        )
        renamed = msgspec.structs.replace(request, id=hosted.name, principal=principal, user=user)
        if not self._send(msgspec.structs.replace(message, request=renamed)):
            raise PeerBusy("no engine takes requests here now")
        if before is not None:
            self._end(before)
        self.served += before is None
        front.hosted_requests[request.id] = self._hosted_requests[hosted.name] = hosted

    def cancel(self, node: str, boot: str, request: str, attempt: int) -> None:
        """Cancels an attempt that its front no longer wants, and the fetch for it."""
        front = self._fronts.get(node)
        if front is None or front.boot != boot:
            return
        hosted = front.hosted_requests.get(request)
        if hosted is not None and hosted.attempt == attempt:
            self._end(hosted)
        self._end_fetches_for(front, request, attempt)

    def find_missing(self, node: str, boot: str, requests: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """Returns the front's (request, attempt) pairs that neither run here nor have tokens in the outbox."""
        front = self._fronts.get(node)
        here: set[tuple[str, int]] = set()
        if front is not None and front.boot == boot:
            here = {(hosted.request, hosted.attempt) for hosted in front.hosted_requests.values()}
            here |= {(emission.request, emission.attempt) for emission in front.outbox}
        return tuple(one for one in requests if one not in here)

    def pass_on_emissions(self, emissions: Sequence[Emission]) -> list[Emission]:
        """Passes on the emissions for other fronts; returns this front's."""
        ours = [one for one in emissions if "/" not in one.request]
        if len(ours) < len(emissions):
            for one in emissions:
                hosted = self._hosted_requests.get(one.request)
                if hosted is not None and hosted.attempt == one.attempt:
                    self._pass_on(hosted, msgspec.structs.replace(one, request=hosted.request))
        return ours

    def fetch(self, node: str, boot: str, message: FetchPrefixKV) -> None:
        """Has the engine fetch the KV blocks of a request that may move here. Raises PeerBusy for too many fetches."""
        front, name = self._front_of(node, boot), f"{node}/{next(self._numbers)}"
        self._end_fetches_for(front, message.request, message.attempt)
        if sum(fetch.front is front for fetch in self._fetches.values()) >= MAX_FETCHES:
            raise PeerBusy(f"{MAX_FETCHES} requests of that box are being fetched already")
        if not self._send(msgspec.structs.replace(message, request=name)):
            raise PeerBusy("no engine takes requests here now")
        self._fetches[name] = HostedFetch(front, message.request, message.attempt)

    def pass_on_news(self, message: RequestNews) -> bool:
        """Passes on news of another front's request; returns False for a request of this front."""
        if "/" not in message.request:
            return False
        fetched = isinstance(message, PrefixKVFetched)
        about = self._fetches.pop(message.request, None) if fetched else self._hosted_requests.get(message.request)
        if about is not None:
            self._spawn(self._send_news(about.front, msgspec.structs.replace(message, request=about.request)))
        return True

    def forget(self, node: str) -> None:
        """Ends the requests of a front that has gone or started again."""
        if (front := self._fronts.pop(node, None)) is not None:
            if front.sending is not None:
                front.sending.cancel()
            for hosted in list(front.hosted_requests.values()):
                self._end(hosted)
            self._end_fetches(lambda fetch: fetch.front is front)

    def keep_fronts(self, boots: Mapping[str, str]) -> None:
        """Ends the requests of fronts that are no members, or have another boot id. An unknown boot id is ""."""
        for node, front in list(self._fronts.items()):
            if node not in boots or boots[node] not in ("", front.boot):
                self.forget(node)

    def on_engine_ended(self) -> None:
        """Forgets all requests; their fronts notice the engine's end and run them elsewhere."""
        for node in list(self._fronts):
            self.forget(node)

    def _front_of(self, node: str, boot: str) -> RemoteFront:
        """Returns this incarnation of a front, and forgets any other."""
        front = self._fronts.get(node)
        if front is None or front.boot != boot:
            self.forget(node)
            front = self._fronts[node] = RemoteFront(node, boot)
        return front

    def _end_fetches_for(self, front: RemoteFront, request: str, attempt: int) -> None:
        self._end_fetches(lambda fetch: (fetch.front, fetch.request, fetch.attempt) == (front, request, attempt))

    def _end_fetches(self, unwanted: Callable[[HostedFetch], bool]) -> None:
        """Cancels the unwanted fetches at the engine."""
        for name, fetch in list(self._fetches.items()):
            if unwanted(fetch):
                del self._fetches[name]
                self._send(Cancel(request=name, attempt=fetch.attempt))

    def _end(self, hosted: HostedRequest) -> None:
        """Cancels an attempt at the engine."""
        self._remove(hosted)
        self._send(Cancel(request=hosted.name, attempt=hosted.attempt))

    def _remove(self, hosted: HostedRequest) -> None:
        del self._hosted_requests[hosted.name]
        if hosted.front.hosted_requests.get(hosted.request) is hosted:
            del hosted.front.hosted_requests[hosted.request]

    def _pass_on(self, hosted: HostedRequest, emission: Emission) -> None:
        front, hosted.emitted = hosted.front, emission.index + (emission.token is not None)
        front.outbox.append(emission)
        if emission.finish:
            self._remove(hosted)
        if front.sending is None or front.sending.done():
            front.sending = self._spawn(self._deliver(front))

    async def _send_news(self, front: RemoteFront, message: RequestNews) -> None:
        """Sends news to a front until it answers, for GIVEN_UP_S."""
        frame, ends_s = encode(message), time.monotonic() + GIVEN_UP_S
        while self._fronts.get(front.node) is front:
            try:
                await self._channel.ask(front.node, ForwardedEmissions(), [frame], timeout_s=ASK_S)
                return
            except PeerError as error:
                if isinstance(error, PeerRefused) or time.monotonic() > ends_s:
                    log.info("news of a request cannot be delivered", extra={"peer": front.node, "why": str(error)})
                    return
                await asyncio.sleep(RETRY_S)

    async def _deliver(self, front: RemoteFront) -> None:
        failing_s, size = None, BATCH
        while front.outbox:
            batch = front.outbox[:size]
            try:
                frame = encode(Emissions(items=batch))
                answer = await self._channel.ask(front.node, ForwardedEmissions(), [frame], timeout_s=ASK_S)
            except (WireError, Unsendable) as error:
                if len(batch) == 1:
                    front.outbox[0] = _too_large(batch[0], error)
                size = 1
                continue
            except PeerError as error:
                failing_s = failing_s or time.monotonic()
                if time.monotonic() - failing_s > GIVEN_UP_S:
                    log.info("tokens cannot be delivered", extra={"peer": front.node, "why": str(error)})
                    front.sending = None
                    self.forget(front.node)
                    return
                await asyncio.sleep(RETRY_S)
                continue
            failing_s = None
            del front.outbox[: len(batch)]
            if isinstance(answer.message, FrameAccepted):
                for request, attempt in answer.message.unwanted:
                    self.cancel(front.node, front.boot, request, attempt)


def _identity(node: str, request: Request) -> tuple[str, str]:
    """Returns the principal and the user under which this box's engine counts a request of that box.

    A front of an earlier release sends no principal: each of its users counts alone. Raises PeerRefused if a name
    would be too long.
    """
    principal, user = "", request.user
    if request.principal:
        principal = as_told_by(node, Principal(request.principal))
    elif user:
        user = f"{node}/{user}"
    if max(len(principal), len(user)) > USER_CHARS:
        raise PeerRefused(f"a user's name of {len(user)} characters is too long: {USER_CHARS} are read here")
    return principal, user


def _too_large(emission: Emission, error: EdgemoeError) -> Emission:
    """Returns the error that replaces an emission too large for a message."""
    return Emission(
        request=emission.request,
        attempt=emission.attempt,
        index=emission.index,
        finish="error",
        error=str(error),
        error_code="answer_too_large",
    )

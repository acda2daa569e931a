"""Other boxes' requests on this box's engine. Their fronts own them: here they are passed in and their tokens out.

At the engine one is named "NODE/NUMBER", by the front that sent it and in the order of arrival. Tokens go back in
order, each batch once the one before has arrived; what that front no longer waits for, it names in its answer. If it
cannot be reached for GIVEN_UP_S, or comes back as another incarnation, its requests end here: it has forgotten them, or
has them elsewhere, or asks for them (`missing`) and runs them again.

The blocks that a front has our engine fetch for a request that is to move here are such a thing too: they have a name
of that kind, and end with that front.
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
from edgemoe.types.principal import Principal, as_told_by
from edgemoe.types.request import Emission, Request

log = logging.getLogger(__name__)
GIVEN_UP_S = 5.0
ASK_S, RETRY_S = 2.0, 0.1
BATCH = 2000  # emissions in one message
MOST_PULLS = 256  # of one front: far more than its requests that are to move here at once
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
class HostedPull:
    """Blocks that our engine fetches for one attempt at a request of another front."""

    front: RemoteFront
    request: str
    attempt: int


@dataclass(slots=True, eq=False)
class RemoteFront:
    """One front, one incarnation of it, and its requests here."""

    node: str
    boot: str
    hosted_requests: dict[str, HostedRequest] = field(default_factory=dict)  # by the request's own name
    outbox: list[Emission] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None


class HostedRequests:
    """One owner, one event loop."""

    def __init__(
        self,
        channel: Channel[ControlMessage],
        send: Callable[[ToEngine], bool],
        spawn: Callable[..., asyncio.Task[None]],
    ) -> None:
        """`send` hands a message to our engine, `spawn` starts a task."""
        self.served = 0
        self._channel, self._send, self._spawn = channel, send, spawn
        self._fronts: dict[str, RemoteFront] = {}
        self._hosted_requests: dict[str, HostedRequest] = {}  # by their names at our engine
        self._pulls: dict[str, HostedPull] = {}  # likewise
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._hosted_requests)

    def held(self) -> Iterator[HeldRequest]:
        """Returns those that run, and those that wait."""
        for hosted in self._hosted_requests.values():
            yield HeldRequest(hosted.prompt_tokens, hosted.emitted, hosted.max_tokens)

    def submit(self, node: str, boot: str, message: Submit) -> None:
        """Runs a request of that front, unless a later attempt of it is here.

        Raises PeerBusy where none can be run, PeerRefused where its user's name is too long or its grammar untried.
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
        """Cancels an attempt that its front no longer waits for, and what is fetched for it."""
        front = self._fronts.get(node)
        if front is None or front.boot != boot:
            return
        hosted = front.hosted_requests.get(request)
        if hosted is not None and hosted.attempt == attempt:
            self._end(hosted)
        self._end_pulls_for(front, request, attempt)

    def missing(self, node: str, boot: str, requests: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """Returns those of the front's requests, by (request, attempt), that neither run nor are on their way back."""
        front = self._fronts.get(node)
        here: set[tuple[str, int]] = set()
        if front is not None and front.boot == boot:
            here = {(hosted.request, hosted.attempt) for hosted in front.hosted_requests.values()}
            here |= {(emission.request, emission.attempt) for emission in front.outbox}
        return tuple(one for one in requests if one not in here)

    def take(self, emissions: Sequence[Emission]) -> list[Emission]:
        """Passes on what is for other fronts; returns the rest."""
        ours = [one for one in emissions if "/" not in one.request]
        if len(ours) < len(emissions):
            for one in emissions:
                hosted = self._hosted_requests.get(one.request)
                if hosted is not None and hosted.attempt == one.attempt:
                    self._pass_on(hosted, msgspec.structs.replace(one, request=hosted.request))
        return ours

    def pull(self, node: str, boot: str, message: FetchPrefixKV) -> None:
        """Has our engine fetch the blocks of a request that this front means to hand over. Raises PeerBusy."""
        front, name = self._front_of(node, boot), f"{node}/{next(self._numbers)}"
        self._end_pulls_for(front, message.request, message.attempt)
        if sum(pull.front is front for pull in self._pulls.values()) >= MOST_PULLS:
            raise PeerBusy(f"{MOST_PULLS} requests of that box are being fetched already")
        if not self._send(msgspec.structs.replace(message, request=name)):
            raise PeerBusy("no engine takes requests here now")
        self._pulls[name] = HostedPull(front, message.request, message.attempt)

    def tell(self, message: RequestNews) -> bool:
        """Passes on what is about a request of another front; returns False for one of our own."""
        if "/" not in message.request:
            return False
        pulled = isinstance(message, PrefixKVFetched)
        about = self._pulls.pop(message.request, None) if pulled else self._hosted_requests.get(message.request)
        if about is not None:
            self._spawn(self._tell(about.front, msgspec.structs.replace(message, request=about.request)))
        return True

    def forget(self, node: str) -> None:
        """Ends the requests of a front that has gone, or of whose incarnations another has come."""
        if (front := self._fronts.pop(node, None)) is not None:
            if front.sending is not None:
                front.sending.cancel()
            for hosted in list(front.hosted_requests.values()):
                self._end(hosted)
            self._end_pulls(lambda pull: pull.front is front)

    def keep(self, boots: Mapping[str, str]) -> None:
        """Ends the requests of fronts that are not let in, or of another incarnation; "" where it is not known yet."""
        for node, front in list(self._fronts.items()):
            if node not in boots or boots[node] not in ("", front.boot):
                self.forget(node)

    def engine_ended(self) -> None:
        """Their fronts notice by themselves, and have them run elsewhere."""
        for node in list(self._fronts):
            self.forget(node)

    def _front_of(self, node: str, boot: str) -> RemoteFront:
        """Returns that incarnation, and forgets any other."""
        front = self._fronts.get(node)
        if front is None or front.boot != boot:
            self.forget(node)
            front = self._fronts[node] = RemoteFront(node, boot)
        return front

    def _end_pulls_for(self, front: RemoteFront, request: str, attempt: int) -> None:
        self._end_pulls(lambda pull: (pull.front, pull.request, pull.attempt) == (front, request, attempt))

    def _end_pulls(self, unwanted: Callable[[HostedPull], bool]) -> None:
        """Has our engine give these up."""
        for name, pull in list(self._pulls.items()):
            if unwanted(pull):
                del self._pulls[name]
                self._send(Cancel(request=name, attempt=pull.attempt))

    def _end(self, hosted: HostedRequest) -> None:
        """Has our engine forget it."""
        self._remove(hosted)
        self._send(Cancel(request=hosted.name, attempt=hosted.attempt))

    def _remove(self, hosted: HostedRequest) -> None:
        del self._hosted_requests[hosted.name]
        if hosted.front.hosted_requests.get(hosted.request) is hosted:
            del hosted.front.hosted_requests[hosted.request]

    def _pass_on(self, hosted: HostedRequest, emission: Emission) -> None:
        front, hosted.emitted = hosted.front, emission.index + 1
        front.outbox.append(emission)
        if emission.finish:
            self._remove(hosted)
        if front.sending is None or front.sending.done():
            front.sending = self._spawn(self._deliver(front))

    async def _tell(self, front: RemoteFront, message: RequestNews) -> None:
        """Tells it until it has heard, as long as it is there."""
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
    """Returns how our engine names the principal and the user of a request of that box.

    A front of an earlier release tells no principal: each of its users counts alone. Raises PeerRefused where a name
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
    """What its front is told instead of an emission that no message can carry."""
    return Emission(
        request=emission.request,
        attempt=emission.attempt,
        index=emission.index,
        finish="error",
        error=str(error),
        error_code="answer_too_large",
    )

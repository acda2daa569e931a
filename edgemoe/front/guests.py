"""Other boxes' requests on this box's engine. Their fronts own them: here they are passed in and their tokens out.

At the engine a guest is named "NODE/BOOT/ID", by the front that sent it. Tokens go back in order, each batch once the
one before has arrived; what that front no longer waits for, it names in its answer. If it cannot be reached for
GIVEN_UP_S, or comes back as another incarnation, its requests end here: it has forgotten them, or has them elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from edgemoe.cluster.wire.control_messages import ControlMessage, Taken, Tokens
from edgemoe.cluster.wire.lane import Lane
from edgemoe.cluster.wire.messages import Cancel, Emissions, Submit, ToEngine, encode
from edgemoe.errors import PeerBusy, PeerError
from edgemoe.types import Emission

log = logging.getLogger(__name__)
GIVEN_UP_S = 5.0
ASK_S, RETRY_S = 2.0, 0.1
BATCH = 2000  # emissions in one message


@dataclass(slots=True)
class Host:
    """One front, one incarnation of it, and its requests here."""

    node: str
    boot: str
    attempts: dict[str, int] = field(default_factory=dict)  # by the request's own name
    outbox: list[Emission] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None


class Guests:
    """One owner, one event loop."""

    def __init__(
        self,
        lane: Lane[ControlMessage],
        send: Callable[[ToEngine], bool],
        spawn: Callable[..., asyncio.Task[None]],
    ) -> None:
        """`send` hands a message to our engine, `spawn` starts a task."""
        self.served = 0
        self._lane, self._send, self._spawn = lane, send, spawn
        self._hosts: dict[str, Host] = {}

    def __len__(self) -> int:
        return sum(len(host.attempts) for host in self._hosts.values())

    def submit(self, node: str, boot: str, message: Submit) -> None:
        """Runs a request of that front, unless a later attempt of it is here. Raises PeerBusy where none can be run."""
        host = self._hosts.get(node)
        if host is None or host.boot != boot:
            self.forget(node)
            host = self._hosts[node] = Host(node, boot)
        request = message.request
        if host.attempts.get(request.id, 0) > message.attempt:
            return
        renamed = msgspec.structs.replace(
            request, id=f"{node}/{boot}/{request.id}", user=f"{node}/{request.user}" if request.user else ""
        )
        if not self._send(msgspec.structs.replace(message, request=renamed)):
            raise PeerBusy("no engine takes requests here now")
        self.served += request.id not in host.attempts
        host.attempts[request.id] = message.attempt

    def cancel(self, node: str, boot: str, request: str, attempt: int) -> None:
        """The front no longer waits for this attempt."""
        host = self._hosts.get(node)
        if host is not None and host.boot == boot and host.attempts.get(request) == attempt:
            del host.attempts[request]
            self._send(Cancel(request=f"{node}/{boot}/{request}", attempt=attempt))

    def take(self, emissions: Sequence[Emission]) -> list[Emission]:
        """Passes on what is for other fronts; returns the rest."""
        ours = [one for one in emissions if "/" not in one.request]
        if len(ours) < len(emissions):
            for one in emissions:
                node, _, rest = one.request.partition("/")
                boot, _, name = rest.partition("/")
                host = self._hosts.get(node)
                if name and host is not None and host.boot == boot and host.attempts.get(name) == one.attempt:
                    self._pass_on(host, msgspec.structs.replace(one, request=name))
        return ours

    def forget(self, node: str) -> None:
        """That front has gone, or another incarnation of it has come: its requests end here."""
        if (host := self._hosts.pop(node, None)) is not None:
            if host.sending is not None:
                host.sending.cancel()
            for name, attempt in host.attempts.items():
                self._send(Cancel(request=f"{node}/{host.boot}/{name}", attempt=attempt))

    def keep(self, boots: Mapping[str, str]) -> None:
        """These are the fronts that are let in, and their incarnations; what others sent ends here."""
        for node, host in list(self._hosts.items()):
            if boots.get(node) != host.boot:
                self.forget(node)

    def engine_ended(self) -> None:
        """Their fronts notice by themselves, and have them run elsewhere."""
        for node in list(self._hosts):
            self.forget(node)

    def _pass_on(self, host: Host, emission: Emission) -> None:
        host.outbox.append(emission)
        if emission.finish:
            host.attempts.pop(emission.request, None)
        if host.sending is None or host.sending.done():
            host.sending = self._spawn(self._deliver(host))

    async def _deliver(self, host: Host) -> None:
        failing_s = None
        while host.outbox:
            batch = host.outbox[:BATCH]
            try:
                frame = encode(Emissions(items=batch))
                answer = await self._lane.ask(host.node, Tokens(), [frame], timeout_s=ASK_S)
            except PeerError as error:
                failing_s = failing_s or time.monotonic()
                if time.monotonic() - failing_s > GIVEN_UP_S:
                    log.info("tokens cannot be delivered", extra={"peer": host.node, "why": str(error)})
                    host.sending = None
                    self.forget(host.node)
                    return
                await asyncio.sleep(RETRY_S)
                continue
            failing_s = None
            del host.outbox[: len(batch)]
            if isinstance(answer.message, Taken):
                for request, attempt in answer.message.unwanted:
                    self.cancel(host.node, host.boot, request, attempt)

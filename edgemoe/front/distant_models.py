"""Forwards clients' HTTP requests for models that this box does not serve, and other boxes of its cluster do.

A box that is gone, or takes no request, is passed over for the next one that serves the model, until an answer begins.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.types import Message

from edgemoe.api.backend import State
from edgemoe.api.http.distant_answer import ForwardedBody
from edgemoe.api.resources import ListedModel, StoreFacts
from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.membership import Member
from edgemoe.cluster.control.messages import ForwardedHttp, FurtherModel, HttpPart, HttpPartQuery, HttpWithdrawal
from edgemoe.errors import EngineUnavailable, PeerBusy, PeerError, PeerRefused, PeerUnavailable
from edgemoe.front.hosted_http import MOST_HOSTED, WAIT_S
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import plain_name

log = logging.getLogger(__name__)

ASK_S = 2.0  # that an answer may take on its way
LOST_S, RETRY_S = 4.0, 0.2  # that a box may be out of reach, and between attempts
TURNED_AWAY = (429, 503)  # statuses by which a box takes no request now
STATES: tuple[State, ...] = ("ready", "unloaded", "loading", "stalled", "failed", "draining")  # the first is preferred
KNOWN: dict[str, State] = {state: state for state in STATES}  # a later release may have others


@dataclass(frozen=True, slots=True)
class DistantModel:
    """A model that other boxes serve, and these boxes, the best first."""

    name: str
    boxes: tuple[str, ...]
    card: FurtherModel  # as the first one describes it

    def listed(self) -> ListedModel:
        """Returns the model as clients are told of it."""
        card = self.card
        return ListedModel(
            name=self.name,
            state=KNOWN.get(card.state, "unloaded"),
            info=card.info,
            context_tokens=card.context_tokens,
            capabilities=card.capabilities,
            store=StoreFacts(card.disk_bytes, card.parameters),
            ram_bytes=card.ram_bytes,
            vram_bytes=card.vram_bytes,
            is_pinned=False,
            boxes=self.boxes,
        )

    def described(self) -> Json:
        """Returns the model for /health."""
        return {
            "name": self.name,
            "state": self.card.state or "unknown",
            "loading": None,
            "reason": "",
            "requests": 0,
            "memory_bytes": 0,
            "boxes": list(self.boxes),
            "ram_bytes": self.card.ram_bytes,
            "vram_bytes": self.card.vram_bytes,
            "is_pinned": False,
            "idle_s": 0.0,
            "expires_s": None,
        }


class DistantModels:
    """Lists the models of other boxes, and forwards requests for them."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._numbers = itertools.count(1)
        self._asked = Counter[str]()  # requests with each box
        self.forwarded = 0

    def boxes_of_cluster(self) -> list[str]:
        """Returns the other boxes whose engines serve the cluster's model."""
        return [member.peer.node for member in self._present() if member.beat.engine]

    def models(self) -> Mapping[str, DistantModel]:
        """Returns all models that other boxes serve by name, by their plain names."""
        found: dict[str, list[tuple[tuple[int, int, str], FurtherModel]]] = {}
        for member in self._present():
            for card in cards_of(member):
                node, rank = member.peer.node, STATES.index(KNOWN.get(card.state, "unloaded"))
                found.setdefault(plain_name(card.name), []).append(((rank, self._asked[node], node), card))
        models = {}
        for name, cards in found.items():
            cards.sort(key=lambda one: one[0])
            models[name] = DistantModel(cards[0][1].name, tuple(key[2] for key, _ in cards), cards[0][1])
        return models

    def _present(self) -> Iterator[Member]:
        members = self._plane.state.members
        for member in members:
            card = member.announcement
            if card is not None and not card.leaving and not member.refusal and members.is_alive(member.peer.node):
                yield member

    async def answer(self, model: DistantModel, asked: ForwardedBody) -> AsyncGenerator[Message, None]:
        """Yields the answer of a box that serves the model, as messages of ASGI; without an end where it breaks off.

        Raises EngineUnavailable where none takes the request, or the one that answers is lost.
        """
        failures: list[str] = []
        for node in model.boxes:
            async with aclosing(self._ask(node, asked)) as messages:
                try:
                    head = await anext(messages)
                except PeerError as error:
                    log.info("a request is not forwarded", extra={"peer": node, "why": str(error)})
                    failures.append(f"{node}: {error}")
                    continue
                if head["status"] in TURNED_AWAY and node != model.boxes[-1]:
                    failures.append(f"{node}: status {head['status']}")
                    continue
                self.forwarded += 1
                yield head
                try:
                    async for message in messages:
                        yield message
                except PeerError as error:
                    raise EngineUnavailable(f"the box {node}, which was answering, is lost: {error}") from error
                return
        raise EngineUnavailable(f"no box that serves the model {model.name!r} takes requests; {'; '.join(failures)}")

    async def _ask(self, node: str, asked: ForwardedBody) -> AsyncGenerator[Message, None]:
        """Yields one box's answer. Raises PeerError."""
        if self._asked[node] >= MOST_HOSTED:
            raise PeerBusy(f"it answers {MOST_HOSTED} requests of this box already")
        number, plane, is_over = next(self._numbers), self._plane, False
        self._asked[node] += 1
        try:
            forwarded = ForwardedHttp(number, asked.path, asked.principal, tuple(asked.headers.items()))
            await plane.parcels.forward(node, forwarded, asked.body, wanted=lambda: True)
            is_begun, parts = False, itertools.count()
            while not is_over:
                part, body = await self._part(node, number, next(parts), is_begun=is_begun)
                is_over = not part.more
                if part.status and not is_begun:
                    is_begun = True
                    headers = [(name.encode(), value.encode("latin-1")) for name, value in part.headers]
                    yield {"type": "http.response.start", "status": part.status, "headers": headers}
                if is_begun and (body or (is_over and not part.broke_off)):
                    yield {"type": "http.response.body", "body": body, "more_body": part.more or part.broke_off}
            if not is_begun:
                raise PeerRefused("it ended without an answer")
        finally:
            self._asked[node] -= 1
            if not is_over:
                plane.channel.notify_peer(node, HttpWithdrawal(number))

    async def _part(self, node: str, number: int, part: int, *, is_begun: bool) -> tuple[HttpPart, bytes]:
        """Returns a part of an answer. Once that has begun, waits for a box that is out of reach. Raises PeerError."""
        clock = asyncio.get_running_loop().time
        lost_s: float | None = None
        while True:
            try:
                question = HttpPartQuery(number, part)
                answer = await self._plane.channel.ask(node, question, timeout_s=WAIT_S + ASK_S, aside=True)
            except PeerUnavailable:
                lost_s = lost_s or clock()
                members = self._plane.state.members
                is_here = node in members and (is_begun or members.is_alive(node))
                if not is_here or clock() - lost_s > LOST_S:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            if not isinstance(answer.message, HttpPart) or len(answer.tensors) != 1:
                raise PeerRefused(f"{node} answered with something else")
            return answer.message, bytes(answer.tensors[0])


def further_model(model: ListedModel) -> FurtherModel:
    """Returns a model of this box as it is announced to the others."""
    info = model.info
    return FurtherModel(
        name=model.name,
        state=model.state,
        info=None if info is None else replace(info, layer_experts=(), layer_bytes=()),
        context_tokens=model.context_tokens,
        capabilities=tuple(model.capabilities),
        disk_bytes=model.store.disk_bytes,
        parameters=model.store.parameters,
        ram_bytes=model.ram_bytes,
        vram_bytes=model.vram_bytes,
    )


def cards_of(member: Member) -> Iterator[FurtherModel]:
    """Yields the models that a box announces; a box of an earlier release tells their names alone."""
    if (announced := member.announcement) is not None:
        described = {card.name: card for card in announced.further}
        for name in announced.models:
            yield described.get(name) or FurtherModel(name, "")

"""The leader's desk for requests: takes offers and reports, and tells fronts which engine takes what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.messages import ControlMessage, EngineStatus, OfferWithdrawal, RequestGrant, RequestOffer
from edgemoe.cluster.control.requests.expert_fitting import ExpertFitting
from edgemoe.cluster.control.requests.offer_queue import (
    Action,
    Event,
    Grants,
    Led,
    OfferQueue,
    Offers,
    Serving,
    TurnsDown,
    Uses,
    Waited,
    Withdraws,
)
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.errors import PeerBusy, PeerRefused
from edgemoe.policy.routing.told import ModelSizes
from edgemoe.ticking import until_tick

FIT_LOOK_S = 1.0  # between looks whether clusters are to be fitted


class RequestDesk:
    """One owner, one event loop. Does nothing while this box does not lead.

    What the queue cannot deal with costs what waits in it, whose fronts serve it as without a leader, and no more.
    """

    def __init__(
        self,
        state: ControlState,
        channel: Channel[ControlMessage],
        queue: OfferQueue,
        epoch: Callable[[], int],
        granted: Callable[[RequestGrant], None],
        fitting: ExpertFitting | None = None,
    ) -> None:
        """`epoch` is the one in which this box leads, or 0; `granted` tells our own front.

        `fitting` keeps clusters where the queue goes by them.
        """
        self.queue, self.fitting = queue, fitting
        self._state, self._channel = state, channel
        self._epoch, self._granted = epoch, granted
        self._led = 0
        self._served: Serving | None = None

    async def run(self) -> None:
        """Keeps clusters fitted while this box leads. Until cancelled, if at all."""
        while self.fitting is not None:
            await asyncio.sleep(until_tick(FIT_LOOK_S))
            if self._leads():
                await self._channel.mishaps.contain(self._state.node, self.fitting.look())

    def look(self) -> None:
        """Takes note of time, of who leads, and of who is here."""
        if self._leads():
            self._perform(self._handle(Waited()))

    def ask(self, node: str, offer: RequestOffer) -> RequestGrant:
        """Takes an offer in; returns where the request is to run, if that is clear. Raises PeerRefused, PeerBusy."""
        if not self._leads(node):
            raise PeerRefused("this box does not lead")
        if offer.model != self._state.model:
            raise PeerRefused(f"another model is served here: {self._state.model[:12]}")
        if offer.stage == "decode":
            return RequestGrant(offer.number, self.queue.decoder(node, offer))
        answer, others = RequestGrant(offer.number), list[Action]()
        for action in self._handle(Offers(node, offer)):
            if isinstance(action, TurnsDown):
                raise PeerBusy("too many requests of that box wait here")
            if (action.node, action.number) == (node, offer.number):
                answer = RequestGrant(action.number, action.place, action.why)
            else:
                others.append(action)
        self._perform(others)
        return answer

    def withdraw(self, node: str, message: OfferWithdrawal) -> None:
        """Takes note of offers that do not stand."""
        if self._leads(node):
            self._perform(self._handle(Withdraws(node, message.numbers)))

    def hear(self, node: str, use: EngineStatus) -> None:
        """Takes note of what an engine has to do."""
        if self._leads(node, use.engine):
            self._perform(self._handle(Uses(node, use)))
            if self.fitting is not None:
                self.fitting.hear(use.ended)

    def _leads(self, node: str = "", engine: str = "") -> bool:
        """Returns whether this box leads. Takes note of who is here, but for a message of a box, and engine, known.

        Looking at all boxes at each message of each would cost what grows with the square of their number.
        """
        epoch = self._epoch()
        if epoch not in (0, self._led) or (self._led and not epoch and self._is_deposed()):
            self._led = epoch
            self._perform(self._handle(Led(epoch)))
            self._served = None
            if self.fitting is not None:
                self.fitting.forget()
        if epoch and not self._knows(node, engine) and (serving := self._serving()) != self._served:
            self._served = serving
            actions = self._handle(serving)
            if self.fitting is not None:
                self.fitting.follow()
            self._perform(actions)
        return epoch > 0

    def _knows(self, node: str, engine: str) -> bool:
        served, place = self._served, f"{node}:{engine}"
        if served is None or node not in served.nodes:
            return False
        return not engine or place in served.places or place in served.writing

    def _is_deposed(self) -> bool:
        """Returns whether another box is obeyed: who cannot be sure of its lease for a moment may lead on."""
        return self._state.leader_tracker.leader not in ("", self._state.node)

    def _serving(self) -> Serving:
        state, members = self._state, self._state.members
        nodes = {m.peer.node for m in members if members.is_alive(m.peer.node) and m.can_take_part}
        engines = {place: members[node].announcement for place, node in members.serving(state.model).items()}
        if state.announcement.engine is not None:
            engines[f"{state.node}:{state.announcement.engine.boot}"] = state.announcement
        engine = state.serving()  # ours, where there is one: another's may err
        sizes = ModelSizes(engine.layers, engine.experts) if engine is not None else ModelSizes()
        reading = [place for place, card in engines.items() if card is not None and card.serves != "decode"]
        writing = [place for place, card in engines.items() if card is not None and card.serves != "prefill"]
        return Serving(frozenset({state.node, *nodes}), frozenset(reading or engines), sizes, frozenset(writing))

    def _handle(self, event: Event) -> list[Action]:
        try:
            return self.queue.handle(event)
        except Exception:
            self._channel.mishaps.fail(self._state.node)
            self.queue.handle(Led(self._led))
            return [TurnsDown(event.node, event.offer.number)] if isinstance(event, Offers) else []

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grants(node, number, place, why) if node == self._state.node:
                    self._granted(RequestGrant(number, place, why))
                case Grants(node, number, place, why):
                    self._channel.tell(node, RequestGrant(number, place, why))

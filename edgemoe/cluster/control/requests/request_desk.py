"""Connects the leader's `OfferQueue` with the fronts: offers and reports in, grants out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.messages import ControlMessage, LoadReport, OfferWithdrawal, RequestGrant, RequestOffer
from edgemoe.cluster.control.requests.expert_fitting import ExpertFitting, Fitter
from edgemoe.cluster.control.requests.offer_queue import (
    Action,
    EngineReported,
    Event,
    GrantOffer,
    LeadershipChanged,
    OfferQueue,
    OfferWithdrawn,
    QueueTimePassed,
    RefuseOffer,
    RequestOffered,
    ServingEngines,
)
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PeerBusy, PeerRefused
from edgemoe.policy.routing.eldr import BandRouting, LocalityBand
from edgemoe.policy.routing.gimbal import GimbalChooser
from edgemoe.policy.routing.marginal_union import UNMEASURED, UnionChooser, UnionTerm
from edgemoe.policy.routing.offers import PushRouting, RoutingPolicy
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.policy.routing.signatures import ModelSizes
from edgemoe.ticking import until_tick

FIT_LOOK_S = 1.0  # between checks whether clusters must be fitted


class RequestDesk:
    """Owns the queue; does nothing while this box does not lead.

    If the queue fails, its offers are dropped; their fronts then route without the leader.
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
        """Takes `epoch`, the epoch in which this box leads or 0, and `granted`, which passes a grant to this front.

        `fitting` fits expert clusters, if the route uses them.
        """
        self.queue, self.fitting = queue, fitting
        self._state, self._channel = state, channel
        self._epoch, self._granted = epoch, granted
        self._led = 0
        self._served: ServingEngines | None = None

    async def run(self) -> None:
        """Keeps expert clusters fitted while this box leads, until cancelled; returns if the route uses none."""
        while self.fitting is not None:
            await asyncio.sleep(until_tick(FIT_LOOK_S))
            if self._leads():
                await self._channel.mishaps.contain(self._state.node, self.fitting.refit_if_due())

    def on_time(self) -> None:
        """Lets offers expire, and follows changes of leadership and of members."""
        if self._leads():
            self._perform(self._handle(QueueTimePassed()))

    def on_offer(self, node: str, offer: RequestOffer) -> RequestGrant:
        """Takes an offer in. Returns a grant, without a place if none is decided. Raises PeerRefused, PeerBusy."""
        if not self._leads(node):
            raise PeerRefused("this box does not lead")
        if offer.model != self._state.model:
            raise PeerRefused(f"another model is served here: {self._state.model[:12]}")
        if offer.stage == "decode":
            return RequestGrant(offer.number, self.queue.decoder(node, offer))
        answer, others = RequestGrant(offer.number), list[Action]()
        for action in self._handle(RequestOffered(node, offer)):
            if isinstance(action, RefuseOffer):
                raise PeerBusy("too many requests of that box wait here")
            if (action.node, action.number) == (node, offer.number):
                answer = RequestGrant(action.number, action.place, action.why)
            else:
                others.append(action)
        self._perform(others)
        return answer

    def on_withdrawal(self, node: str, message: OfferWithdrawal) -> None:
        """Removes offers that their front withdraws."""
        if self._leads(node):
            self._perform(self._handle(OfferWithdrawn(node, message.numbers)))

    def on_engine_status(self, node: str, use: LoadReport) -> None:
        """Updates the work of an engine by its front's report."""
        if self._leads(node, use.engine):
            self._perform(self._handle(EngineReported(node, use)))
            if self.fitting is not None:
                self.fitting.add_ended(use.ended)

    def _leads(self, node: str = "", engine: str = "") -> bool:
        """Returns whether this box leads. Looks at all members, unless the message's box and engine are known.

        Looking at all boxes at each message of each box would cost the square of their number.
        """
        epoch = self._epoch()
        if epoch not in (0, self._led) or (self._led and not epoch and self._is_deposed()):
            self._led = epoch
            self._perform(self._handle(LeadershipChanged(epoch)))
            self._served = None
            if self.fitting is not None:
                self.fitting.forget()
        if epoch and not self._knows(node, engine) and (serving := self._serving()) != self._served:
            self._served = serving
            actions = self._handle(serving)
            if self.fitting is not None:
                self.fitting.update_band()
            self._perform(actions)
        return epoch > 0

    def _knows(self, node: str, engine: str) -> bool:
        served, place = self._served, f"{node}:{engine}"
        if served is None or node not in served.nodes:
            return False
        return not engine or place in served.places or place in served.writing

    def _is_deposed(self) -> bool:
        """Returns whether another box leads. A box that is unsure of its lease for a moment may go on leading."""
        return self._state.leader_tracker.leader not in ("", self._state.node)

    def _serving(self) -> ServingEngines:
        state, members = self._state, self._state.members
        nodes = {m.peer.node for m in members if members.is_alive(m.peer.node) and m.can_take_part}
        engines = {place: members[node].announcement for place, node in members.serving(state.model).items()}
        if state.announcement.engine is not None:
            engines[f"{state.node}:{state.announcement.engine.boot}"] = state.announcement
        engine = state.serving()  # this box's engine if there is one: another box's report may be wrong
        sizes = ModelSizes(engine.layers, engine.experts) if engine is not None else ModelSizes()
        reading = [place for place, card in engines.items() if card is not None and card.serves != "decode"]
        writing = [place for place, card in engines.items() if card is not None and card.serves != "prefill"]
        return ServingEngines(frozenset({state.node, *nodes}), frozenset(reading or engines), sizes, frozenset(writing))

    def _handle(self, event: Event) -> list[Action]:
        try:
            return self.queue.handle(event)
        except Exception:
            self._channel.mishaps.fail(self._state.node)
            self.queue.handle(LeadershipChanged(self._led))
            return [RefuseOffer(event.node, event.offer.number)] if isinstance(event, RequestOffered) else []

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case GrantOffer(node, number, place, why) if node == self._state.node:
                    self._granted(RequestGrant(number, place, why))
                case GrantOffer(node, number, place, why):
                    self._channel.notify_peer(node, RequestGrant(number, place, why))


def make_policy(settings: ClusterSettings, band: LocalityBand) -> RoutingPolicy:
    """Returns the policy by which this box decides while it leads; `pull` for routes that need no leader."""
    if settings.route == "gimbal":
        return PushRouting(GimbalChooser())
    pull = PullRouting(PullLimits(), UnionTerm(UNMEASURED))
    return BandRouting(band, pull) if settings.route == "eldr" else pull


def make_queue(
    settings: ClusterSettings, fit: Fitter, clock: Callable[[], float]
) -> tuple[OfferQueue, ExpertFitting | None]:
    """Returns the leader's queue, and the fitting of expert clusters if the route uses them."""
    band = LocalityBand(UnionChooser(UNMEASURED))
    queue = OfferQueue(lambda: make_policy(settings, band), band, clock)
    return queue, ExpertFitting(queue, band, fit, clock) if settings.route == "eldr" else None

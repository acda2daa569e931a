"""The routing policies that `cluster.route` names."""

from __future__ import annotations

from collections.abc import Callable

from edgemoe.cluster.control.requests.expert_fitting import ExpertFitting, Fitter
from edgemoe.cluster.control.requests.offer_queue import OfferQueue
from edgemoe.config.settings import ClusterSettings
from edgemoe.policy.routing.baselines import Push
from edgemoe.policy.routing.by_experts import UNMEASURED, UnionChoice, UnionTerm
from edgemoe.policy.routing.gimbal import GimbalChoice
from edgemoe.policy.routing.locality_band import BandRouting, LocalityBand
from edgemoe.policy.routing.offers import RoutingPolicy
from edgemoe.policy.routing.pull import Pull, PullLimits


def make_policy(settings: ClusterSettings, band: LocalityBand) -> RoutingPolicy:
    """Returns the policy by which this box decides while it leads; pull where its own requests ask nobody."""
    if settings.route == "gimbal":
        return Push(GimbalChoice())
    pull = Pull(PullLimits(), UnionTerm(UNMEASURED))
    return BandRouting(band, pull) if settings.route == "eldr" else pull


def make_queue(
    settings: ClusterSettings, fit: Fitter, clock: Callable[[], float]
) -> tuple[OfferQueue, ExpertFitting | None]:
    """Returns the leader's queue, and what keeps clusters fitted where it goes by them."""
    band = LocalityBand(UnionChoice(UNMEASURED))
    queue = OfferQueue(lambda: make_policy(settings, band), band, clock)
    return queue, ExpertFitting(queue, band, fit, clock) if settings.route == "eldr" else None

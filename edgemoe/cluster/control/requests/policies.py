"""The routing policies that `cluster.route` names."""

from __future__ import annotations

from edgemoe.config.settings import ClusterSettings
from edgemoe.policy.routing.baselines import Push
from edgemoe.policy.routing.by_experts import UNMEASURED, UnionTerm
from edgemoe.policy.routing.gimbal import GimbalChoice, GimbalThresholds
from edgemoe.policy.routing.offers import RoutingPolicy
from edgemoe.policy.routing.pull import Pull, PullLimits


def make_policy(settings: ClusterSettings) -> RoutingPolicy:
    """Returns the policy by which this box decides while it leads; pull where its own requests ask nobody."""
    if settings.route in ("gimbal", "published"):
        thresholds = GimbalThresholds(
            settings.route_kv_usage, settings.route_kv_difference, settings.route_load_tokens, settings.route_affinity_s
        )
        return Push(GimbalChoice(thresholds, published=settings.route == "published"))
    return Pull(PullLimits(), UnionTerm(UNMEASURED))

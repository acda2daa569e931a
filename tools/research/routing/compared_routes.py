"""Choices of engines for comparison: chance, two choices, labels, vLLM's router, and Gimbal's pseudo-code."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from edgemoe.policy.routing.gimbal import DEFAULTS, GimbalChooser, GimbalThresholds
from edgemoe.policy.routing.offers import RoutingTarget, WaitingRequest, fewest
from edgemoe.types.step import BLOCK_TOKENS

WAITING_WEIGHT = 4  # vllm/v1/engine/core_client.py, DPLBAsyncMPClient.get_core_engine_for_request


class Anywhere:
    """Chooses by chance."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        return self._random.choice(open_)


class BetterOfTwo:
    """Chooses two by chance and takes the one with fewer requests: power of two choices."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        return fewest(offered, self._random.sample(open_, min(2, len(open_))), now_s)


class ByLabel:
    """Sends each request to the engines of its label, the one with fewer requests: the domain oracle.

    `engines_of` gives the places that a request's label has; where they are full, any is taken.
    """

    def __init__(self, engines_of: dict[str, frozenset[str]]) -> None:
        self._engines_of = engines_of  # request -> places

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        own = [view for view in open_ if view.place in self._engines_of.get(offered.request, ())]
        return fewest(offered, own or open_, now_s)


def least_requests(offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
    """Returns the engine with the least score, in which a waiting request weighs four times: vLLM's own router."""
    return min(open_, key=lambda view: (WAITING_WEIGHT * view.waiting + view.running, view.place))


class PseudoCodeGimbal(GimbalChooser):
    """Chooses as the pseudo-code of [Gimbal, Algorithm 1], which differs from its text.

    It looks at load only when some engine's KV usage is over the threshold, and counts resident tokens as load.
    """

    def __init__(self, thresholds: GimbalThresholds = DEFAULTS) -> None:
        super().__init__(thresholds)
        self._kv_usage = thresholds.kv_usage

    def _by_need(self, open_: Sequence[RoutingTarget]) -> RoutingTarget | None:
        if max(view.kv_usage for view in open_) < self._kv_usage:
            return None
        return super()._by_need(open_)

    def _load(self, view: RoutingTarget) -> int:
        """Counts the tokens in KV blocks and the tokens to compute."""
        return (view.blocks - view.free_blocks) * BLOCK_TOKENS + view.prefill_tokens

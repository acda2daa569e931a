"""Turns offers and engines' reports into views for routing policies, and remembers fields that later reports omit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from edgemoe.cluster.control.messages import PREFIX_TOKENS, LoadReport, RequestOffer
from edgemoe.policy.routing.marginal_union import PromptForecast
from edgemoe.policy.routing.offers import RoutingTarget, WaitingRequest
from edgemoe.policy.routing.signatures import MOST_S, ModelSizes, counts_of, experts_of, resident_of, union_of
from edgemoe.types.arrays import FloatArray
from edgemoe.types.expert_signatures import ExpertDemand

MAX_KEYS = 4096  # of prompts; the longest unused go first, as they do in the engine's cache
TOKENS_PER_S = 1000.0  # prefill speed of an engine without a measurement
NO_DEMAND = ExpertDemand(b"", b"", (), 0.0, 0.0)


class PromptMemory:
    """One engine's prompts by keyed hashes, the latest last, and its last reported expert demand."""

    def __init__(self) -> None:
        self._demand = NO_DEMAND
        self._experts = 0.0  # that a step loads there
        self._sizes = ModelSizes()
        self._tables: tuple[FloatArray | None, FloatArray | None] = None, None  # resident, union: of the last report
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._prefixes: frozenset[int] = frozenset()

    def note(self, prefix: Iterable[int]) -> None:
        """Adds the prompts of requests granted to the engine."""
        known, new = self._keys, False
        for key in prefix:
            new |= key not in known
            known[key] = None
            known.move_to_end(key)
        while len(known) > MAX_KEYS:
            known.popitem(last=False)
        if new:
            self._prefixes = frozenset(known)

    def on_report(self, place: str, use: LoadReport, sizes: ModelSizes, now_s: float) -> RoutingTarget:
        """Merges the engine's report. Returns the view of the engine."""
        self.note(keys_of(use.prefixes))
        if use.choices is not None:
            self._demand, self._experts = use.choices, experts_of(use.choices.absent)
        demand = self._demand
        if use.choices is not None or sizes != self._sizes:
            self._sizes = sizes
            self._tables = resident_of(demand.far, demand.far_s, sizes), union_of(demand.absent, sizes)
        resident, union = self._tables
        return RoutingTarget(
            place,
            use.slots,
            use.capacity,
            use.blocks,
            use.free_blocks,
            running=use.running,
            waiting=use.waiting,
            prefill_tokens=use.prefill_tokens,
            remaining_tokens=float(use.remaining_tokens),
            tokens_per_s=max(use.tokens_per_s, 1.0) if use.tokens_per_s else TOKENS_PER_S,
            prefixes=self._prefixes,
            taken=frozenset(f"{node}:{number}" for node, number in use.taken),
            reported_s=now_s,
            resident=resident,
            union=union,
            step_s=min(demand.step_s, MOST_S),
            expert_s=min(demand.expert_s, MOST_S),
            decode_s=min(demand.step_s + demand.expert_s * self._experts, MOST_S),
        )


def offered_as(name: str, offer: RequestOffer, sizes: ModelSizes, now_s: float, home: str) -> WaitingRequest:
    """Returns the policy's view of an offer, without a forecast if that cannot be of this model's experts."""
    told = offer.signature
    counts = None if told is None else counts_of(told.tokens, told.chosen, sizes)
    return WaitingRequest(
        name,
        offer.prompt_tokens,
        now_s - offer.waited_ms / 1e3,
        max_tokens=offer.max_tokens,
        expected_tokens=float(min(offer.expected_tokens, offer.max_tokens)),
        user=str(offer.user) if offer.user else "",
        principal=str(offer.principal or offer.user or ""),
        home=home,
        prefix=tuple(keys_of(offer.prefix)),
        key_tokens=PREFIX_TOKENS,
        signature=counts,
        chance=None if told is None or counts is None else _chance(counts, told.tokens),
    )


def keys_of(prefix: bytes) -> list[int]:
    """Splits the hashes; an incomplete one at the end is dropped."""
    keys: list[int] = np.frombuffer(prefix[: len(prefix) // 8 * 8], "<u8").tolist()
    return keys


def _chance(counts: FloatArray, tokens: int) -> FloatArray:
    """Returns the probability [L, E] that a request's token chooses each expert."""
    return PromptForecast(max(1, round(float(counts.sum()) / (len(counts) * tokens)))).chance(counts)

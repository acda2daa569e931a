"""Reads what boxes offer into what routing policies go by."""

from __future__ import annotations

import numpy as np

from edgemoe.cluster.control.messages import PREFIX_TOKENS, RequestOffer
from edgemoe.policy.routing.by_experts import PromptForecast
from edgemoe.policy.routing.offers import Offered
from edgemoe.policy.routing.told import ModelSizes, counts_of
from edgemoe.types.arrays import FloatArray


def offered_as(name: str, offer: RequestOffer, sizes: ModelSizes, now_s: float, home: str) -> Offered:
    """Returns what a policy may know of the request; nothing of its experts where they cannot be this model's."""
    told = offer.signature
    counts = None if told is None else counts_of(told.tokens, told.chosen, sizes)
    return Offered(
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
    """Returns the hashes; a piece of one at the end is none."""
    keys: list[int] = np.frombuffer(prefix[: len(prefix) // 8 * 8], "<u8").tolist()
    return keys


def _chance(counts: FloatArray, tokens: int) -> FloatArray:
    """Returns how likely a request's tokens choose each expert."""
    return PromptForecast(max(1, round(float(counts.sum()) / (len(counts) * tokens)))).chance(counts)

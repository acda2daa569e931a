"""What boxes report, as the arrays that placement policies work on. What does not fit the model counts as not said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.cluster.control.messages import Report
from edgemoe.types.arrays import IntArray
from edgemoe.types.placement import ACTIVITY_HALF_LIFE_S, ACTIVITY_UNIT

CALL_S = 1e-3  # of a call to another box, where none has been measured
BYTES_PER_S = 100e6  # of a link, likewise
LEAST_CALL_S = 1e-6
PAIR = 4  # numbers
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """States what requests chose of late. Counts are in shares of the tokens a second of the box that has most."""

    activations: Values  # [N, L, E] 0 of who reports nothing
    computed: Values  # [N, L, E] once for a step; as `activations` of a box that does not say
    steps_per_token: Values  # [N] 1 of a box that does not say
    pairs: tuple[IntArray, ...]  # of each node, [P, 4]: layer, both experts, how often they were chosen together
    call_s: Values  # [N] what a call to another box takes
    expert_share: float  # of that, what the other box takes for one expert; 0 where it was not measured
    top_k: int  # experts that a token chooses of a layer; 0 where nothing is known
    per_s: float  # that a count of one happens, times a second
    bytes_per_s: Values  # [N] that a box's links carry


def observe(reports: Sequence[Report | None], layers: int, experts: int) -> Observation:
    """Returns what the boxes' reports say of a model of L layers of E experts."""
    fits = [each and len(each.chosen) == 2 * layers * experts and tokens_per_s(each) > 0 for each in reports]
    fitting = [each if fit else None for each, fit in zip(reports, fits, strict=True)]
    rates = [tokens_per_s(each) if each else 0.0 for each in fitting]
    most = max(rates, default=0.0)
    activations, steps_per_token = np.zeros((len(reports), layers, experts)), np.ones(len(reports))
    computed = activations.copy()
    pairs, chosen = [np.zeros((0, PAIR), np.int64)] * len(reports), 0.0
    for node, report in enumerate(fitting):
        if report is not None:
            share = rates[node] / most
            shares = np.frombuffer(report.chosen, "<u2").reshape(layers, experts)
            chosen = max(chosen, float(shares.sum(axis=1).max()) / ACTIVITY_UNIT)
            activations[node] = computed[node] = shares * share
            if report.steps_per_token and len(report.computed) == len(report.chosen):
                steps_per_token[node] = min(report.steps_per_token, 1.0)
                of_steps = np.frombuffer(report.computed, "<u2").reshape(layers, experts)
                computed[node] = of_steps * (share * steps_per_token[node])
            pairs[node] = _pairs(report, share, activations.shape)
    links = [link for each in reports if each for link in each.links if link.unit_s]
    calls = [
        float(np.mean([link.latency_s + link.unit_s for link in each.links])) if each and each.links else CALL_S
        for each in reports
    ]
    return Observation(
        activations,
        computed,
        steps_per_token,
        tuple(pairs),
        np.maximum(calls, LEAST_CALL_S),
        float(np.mean([link.unit_s / (link.latency_s + link.unit_s) for link in links])) if links else 0.0,
        min(round(chosen), experts),
        most / ACTIVITY_UNIT,
        np.array([bytes_per_s(each) for each in reports]),
    )


def bytes_per_s(report: Report | None) -> float:
    """Returns what a box's links carry, by its own report."""
    measured = [link.bytes_per_s for link in report.links if link.bytes_per_s] if report else []
    return float(np.mean(measured)) if measured else BYTES_PER_S


def tokens_per_s(report: Report) -> float:
    """Returns a box's tokens a second; of one that does not say, those that its count comes to in the end."""
    return report.tokens_per_s or report.tokens * math.log(2) / ACTIVITY_HALF_LIFE_S


def _pairs(report: Report, weight: float, shape: tuple[int, ...]) -> IntArray:
    """A box's pairs by layer."""
    _, layers, experts = shape
    pairs = _rows(report.pairs, (layers, experts, experts))
    pairs = pairs[pairs[:, 1] != pairs[:, 2]]
    pairs[:, 3] = np.rint(pairs[:, 3] * weight)
    pairs = pairs[pairs[:, 3] > 0]  # with next to no requests: 0 would say that they are never together
    return np.asarray(pairs[np.argsort(pairs[:, 0], kind="stable")], np.int64)


def successions(reports: Sequence[Report | None], seen: Observation) -> Values:
    """Returns how often tokens chose an expert, and then one of the next layer, [L - 1, E, E], in the counts of `seen`.

    Those that are not listed share what is left of the count in the way that chance would.
    """
    _, layers, experts = seen.activations.shape
    passed = np.zeros((max(0, layers - 1), experts, experts))
    for report, asked in zip(reports, seen.activations, strict=True):
        if report is not None and asked.any():
            tokens = asked.sum(axis=1).max() / seen.top_k
            chance = asked[:-1, :, None] * asked[1:, None, :] / tokens
            listed = np.zeros_like(chance)
            rows = _rows(report.passed, chance.shape)
            listed[tuple(rows[:, :3].T)] = rows[:, 3] * (tokens / ACTIVITY_UNIT)
            unlisted = np.where(listed > 0, 0.0, chance)
            left = np.maximum(0.0, chance.sum(axis=(1, 2)) - listed.sum(axis=(1, 2)))
            share = left / np.maximum(unlisted.sum(axis=(1, 2)), 1e-300)
            passed += listed + unlisted * share[:, None, None]
    return passed


def _rows(table: bytes, below: tuple[int, ...]) -> IntArray:
    """A table's rows whose first three numbers are below these."""
    whole = table[: len(table) // (2 * PAIR) * 2 * PAIR]
    rows = np.frombuffer(whole, "<u2").reshape(-1, PAIR).astype(np.int64)
    return np.asarray(rows[(rows[:, :3] < below).all(axis=1)], np.int64)

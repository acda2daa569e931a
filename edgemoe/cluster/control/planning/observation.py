"""Turns the boxes' reports into the arrays of placement policies. A report that does not fit the model is ignored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.cluster.control.messages import BoxReport
from edgemoe.types.arrays import IntArray
from edgemoe.types.placement import ACTIVITY_HALF_LIFE_S, ACTIVITY_UNIT

EXPERT_CALL_S = 1e-3  # of a call to another box, until one has been measured
BYTES_PER_S = 100e6  # of a link, until measured
LEAST_EXPERT_CALL_S = 1e-6
PAIR = 4  # numbers in a row
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ActivityObservation:
    """The experts that requests chose of late. Counts are shares of the token rate of the busiest box."""

    activations: Values  # [N, L, E], 0 for a box without a report
    computed: Values  # [N, L, E] as `activations`, counted once a step; equal to them if not reported
    steps_per_token: Values  # [N], 1 if not reported
    pairs: tuple[IntArray, ...]  # of each node, [P, 4]: layer, two experts, times chosen together
    call_s: Values  # [N] of a call to another box
    expert_share: float  # of `call_s`, for computing one expert there; 0 until measured
    top_k: int  # experts that a token chooses in a layer; 0 without reports
    per_s: float  # events per second that a count of one stands for
    bytes_per_s: Values  # [N] of a box's links


def observe(reports: Sequence[BoxReport | None], layers: int, experts: int) -> ActivityObservation:
    """Returns the reports' observation of a model of L layers of E experts."""
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
        float(np.mean([link.latency_s + link.unit_s for link in each.links])) if each and each.links else EXPERT_CALL_S
        for each in reports
    ]
    return ActivityObservation(
        activations,
        computed,
        steps_per_token,
        tuple(pairs),
        np.maximum(calls, LEAST_EXPERT_CALL_S),
        float(np.mean([link.unit_s / (link.latency_s + link.unit_s) for link in links])) if links else 0.0,
        min(round(chosen), experts),
        most / ACTIVITY_UNIT,
        np.array([bytes_per_s(each) for each in reports]),
    )


def bytes_per_s(report: BoxReport | None) -> float:
    """Returns the mean throughput of a box's links, by its own report."""
    measured = [link.bytes_per_s for link in report.links if link.bytes_per_s] if report else []
    return float(np.mean(measured)) if measured else BYTES_PER_S


def tokens_per_s(report: BoxReport) -> float:
    """Returns a box's tokens a second; if not reported, the rate that its decayed count implies."""
    return report.tokens_per_s or report.tokens * math.log(2) / ACTIVITY_HALF_LIFE_S


def _pairs(report: BoxReport, weight: float, shape: tuple[int, ...]) -> IntArray:
    """Returns a box's pairs [P, 4], in order of layers."""
    _, layers, experts = shape
    pairs = _rows(report.pairs, (layers, experts, experts))
    pairs = pairs[pairs[:, 1] != pairs[:, 2]]
    pairs[:, 3] = np.rint(pairs[:, 3] * weight)
    pairs = pairs[pairs[:, 3] > 0]  # a rounded 0 would mean: never chosen together
    return np.asarray(pairs[np.argsort(pairs[:, 0], kind="stable")], np.int64)


def successions(reports: Sequence[BoxReport | None], seen: ActivityObservation) -> Values:
    """Returns how often a token chose one expert and then another in the next layer [L - 1, E, E], in counts of `seen`.

    Pairs that a report does not list share the rest of the count in proportion to chance.
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
    """Returns the rows [P, 4] of a table with the first three numbers below these bounds."""
    whole = table[: len(table) // (2 * PAIR) * 2 * PAIR]
    rows = np.frombuffer(whole, "<u2").reshape(-1, PAIR).astype(np.int64)
    return np.asarray(rows[(rows[:, :3] < below).all(axis=1)], np.int64)

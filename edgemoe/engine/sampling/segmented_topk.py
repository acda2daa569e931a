"""Selects from long rows of numbers: the largest, the k largest, or a random one. Exact; `crossing` sees one row.

Each row is cut into runs of 64. One number per run (its maximum, or its sum) selects the runs that matter, and only
these are searched. With a vocabulary of 152 thousand this is 7 to 20 times faster than torch's argmax, topk and cumsum.
"""

from __future__ import annotations

import torch

RUN = 64
DIGIT_BITS = 10


def runs(rows: torch.Tensor, fill: float = -torch.inf) -> torch.Tensor:
    """Returns `rows` [R, V] as [R, n, 64], padded with `fill`; a view where no padding is needed."""
    missing = -rows.shape[1] % RUN
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=fill)
    return rows.view(len(rows), -1, RUN)


def largest(rows: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Returns the index [R] of the largest of each row [R, n, 64], the first of equals.

    `peaks` [R, n] are the maxima of the runs.
    """
    run = peaks.argmax(dim=-1)
    return run * RUN + _of(rows, run).argmax(dim=-1)


def richest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the runs [R, min(count, n)] that contain the `count` largest of each row, in ascending order."""
    return rows.amax(dim=-1).topk(min(count, rows.shape[1])).indices.sort(dim=-1).values


def top(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` largest of each row [R, n, 64] in descending order, and their indices."""
    rich = richest(rows, count)
    found = gather(rows, rich).flatten(1).topk(count)
    return found.values, rich.gather(1, found.indices // RUN) * RUN + found.indices % RUN


def gather(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns the chosen runs [R, m] of each row: [R, m, 64]."""
    return rows[torch.arange(len(rows), device=rows.device)[:, None], chosen]


def pick(weights: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Returns the index [R] at which the cumulated `weights` [R, n, 64] exceed the share `point` [R, 1] of their sum.

    The weight at that index is above 0.
    """
    sums = weights.sum(dim=-1).double()
    cumulated = sums.cumsum(dim=-1)
    target = _below(point * cumulated[:, -1:], cumulated)
    run = torch.searchsorted(cumulated, target, right=True)
    inside = _of(weights, run[:, 0]).double().cumsum(dim=-1)
    rest = target - (cumulated - sums).gather(1, run)
    return run[:, 0] * RUN + torch.searchsorted(inside, _below(rest, inside), right=True)[:, 0]


def crossing(row: torch.Tensor, amounts: torch.Tensor, goal: float) -> tuple[float, float]:
    """Returns the least number of a row [V] above which less than `goal` lies, and how much lies above it.

    Each number counts for its amount [V], float64. Numbers must be at least 0 and below 2: these are ordered as their
    30 lower bits are, so that histograms of ten bits at a time find the number, and nothing is sorted. Returns 0 where
    all of the row is less than `goal`.
    """
    bits, found, above = row.view(torch.int32).long(), 0, 0.0
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        digits = bits >> shift & (1 << DIGIT_BITS) - 1
        held = torch.bincount(digits, amounts, minlength=1 << DIGIT_BITS)
        over = above + held.flip(0).cumsum(0).flip(0) - held
        digit = min(int((over >= goal).sum()), len(over) - 1)
        found, above, inside = found << DIGIT_BITS | digit, float(over[digit]), digits == digit
        bits, amounts = bits[inside], amounts[inside]
    return float(torch.tensor(found, dtype=torch.int32).view(torch.float32)), above


def _of(rows: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    """Returns one run of each row, [R, 64]."""
    return rows[torch.arange(len(rows), device=rows.device), run]


def _below(target: torch.Tensor, cumulated: torch.Tensor) -> torch.Tensor:
    """Returns `target`, at most the float just below the last cumulated value."""
    end = cumulated[:, -1:]
    return torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))

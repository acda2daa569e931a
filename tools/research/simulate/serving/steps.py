"""The steps of one simulated engine: continuous batching, prompts in chunks, KV in blocks. Compiled.

A step gives every decoding sequence one token and the rest of its tokens to prompts, in order of admission. When blocks
run out the sequence admitted last is put out, and is computed again. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
BLOCK = 16
FREE_SLOT = -1
BUSY, FIRST, DONE, OUT, UNDER = 0, 1, 2, 4, 8  # why a run of steps stopped, as bits; BUSY: its time was up
_compiled: Any = numba.njit(nogil=True, error_model="numpy")


class StepCosts(NamedTuple):
    """Seconds of a step: fixed, for each token of prompt, each decoding sequence, each token that it looks back at."""

    fixed_s: float
    prefill_s: float
    decode_s: float
    context_s: float


class Batch(NamedTuple):
    """What runs on an engine; S slots."""

    request: Ints  # [S] FREE_SLOT: none
    todo: Ints  # [S] tokens of its prompt to compute yet
    context: Ints  # [S] tokens computed
    emitted: Ints  # [S]
    output: Ints  # [S] tokens that it will emit
    blocks: Ints  # [S] that are its own
    order: Ints  # [S] of admission
    free: Ints  # [1] blocks
    now_s: Numbers  # [1]
    stamp_s: Numbers  # [S] when its first token, or its end, was
    active: Numbers  # [2] steps, and seconds in them


def batch_of(slots: int, blocks: int) -> Batch:
    """Returns an engine where nothing runs."""
    request = np.full(slots, FREE_SLOT, np.int64)
    todo, context, emitted, output, own, order = np.zeros((6, slots), np.int64)
    blocks_free, now_s, stamp_s, active = np.array([blocks]), np.zeros(1), np.zeros(slots), np.zeros(2)
    return Batch(request, todo, context, emitted, output, own, order, blocks_free, now_s, stamp_s, active)


@_compiled
def nothing_more(batch: Batch, data: Any) -> float:
    """Seconds that a step takes beside its costs: none."""
    return 0.0


@_compiled
def _grow(batch: Batch) -> int:
    """Gives each decoding sequence a place for its next token; returns a slot to put out, or FREE_SLOT."""
    for s in range(len(batch.request)):
        if batch.request[s] != FREE_SLOT and not batch.todo[s] and batch.context[s] % BLOCK == 0:
            if not batch.free[0]:
                last = s
                for t in range(len(batch.request)):
                    if batch.request[t] != FREE_SLOT and batch.order[t] > batch.order[last]:
                        last = t
                return last
            batch.free[0] -= 1
            batch.blocks[s] += 1
    return FREE_SLOT


@_compiled
def _chunks(batch: Batch, budget: int) -> int:
    """Computes prompts, those admitted first first; returns how many tokens. Those that end wait with todo = -1."""
    given = 0
    while given < budget:
        first = FREE_SLOT
        for s in range(len(batch.request)):
            waits = batch.request[s] != FREE_SLOT and batch.todo[s] > 0
            if waits and (first == FREE_SLOT or batch.order[s] < batch.order[first]):
                first = s
        if first == FREE_SLOT:
            break
        tokens = min(budget - given, batch.todo[first])
        batch.todo[first] -= tokens
        batch.context[first] += tokens
        given += tokens
        if not batch.todo[first]:
            batch.todo[first] = -1
    return given


@_compiled
def _backlog(batch: Batch) -> int:
    tokens = 0
    for s in range(len(batch.request)):
        if batch.request[s] != FREE_SLOT:
            tokens += max(0, batch.todo[s])
    return tokens


@_compiled
def run(
    batch: Batch,
    costs: StepCosts,
    step_tokens: int,
    ahead: int,
    until_s: float,
    more_s: Callable[..., float],
    data: Any,
) -> tuple[int, int]:
    """Runs steps that begin before `until_s`, until one ends in what others must know: why, and the slot of OUT.

    FIRST: a first token was given; DONE: a sequence ended; UNDER: less than `ahead` is left to prefill; OUT: a sequence
    has to make room, and the step has not run. `more_s(batch, data)` is what a step takes beside `costs`.
    """
    while batch.now_s[0] < until_s:
        out = _grow(batch)
        if out != FREE_SLOT:
            return OUT, out
        decoding = context = 0
        for s in range(len(batch.request)):
            if batch.request[s] != FREE_SLOT and not batch.todo[s]:
                decoding += 1
                context += batch.context[s]
        before = _backlog(batch)
        if not decoding and not before:
            return BUSY, FREE_SLOT
        prefill = _chunks(batch, max(1, step_tokens - decoding))
        step_s = costs.fixed_s + costs.prefill_s * prefill + costs.decode_s * decoding + costs.context_s * context
        step_s += more_s(batch, data)
        batch.now_s[0] += step_s
        batch.active[0] += 1
        batch.active[1] += step_s
        why = _emit(batch)
        if before >= ahead > before - prefill:
            why |= UNDER
        if why:
            return why, FREE_SLOT
    return BUSY, FREE_SLOT


@_compiled
def _emit(batch: Batch) -> int:
    """Gives a token to each sequence whose prompt is computed; returns FIRST and DONE as they apply."""
    why = 0
    for s in range(len(batch.request)):
        if batch.request[s] == FREE_SLOT or batch.todo[s] > 0:
            continue
        if batch.todo[s] == 0:
            batch.context[s] += 1
        else:
            why |= FIRST
            batch.todo[s] = 0
        batch.emitted[s] += 1
        batch.stamp_s[s] = batch.now_s[0]
        if batch.emitted[s] >= batch.output[s]:
            why |= DONE
    return why

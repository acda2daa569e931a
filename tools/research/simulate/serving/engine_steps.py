"""The steps of one simulated engine: continuous batching, prompts in chunks, KV in blocks. Compiled.

A step gives every decoding sequence one token, and the rest of its tokens to prompts, in order of admission. If blocks
run out, the last admitted sequence is removed and computed again. Times are seconds.
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
BUSY, FIRST, DONE, OUT, UNDER = 0, 1, 2, 4, 8  # reasons why a run of steps stopped, as bits; BUSY: its time was up
_compiled: Any = numba.njit(nogil=True, error_model="numpy")


class StepCosts(NamedTuple):
    """Seconds of a step: fixed, for each token of prompt, each decoding sequence, each token of context."""

    fixed_s: float
    prefill_s: float
    decode_s: float
    context_s: float


class Batch(NamedTuple):
    """Running requests of an engine; S slots."""

    request: Ints  # [S] FREE_SLOT: none
    todo: Ints  # [S] tokens of its prompt to compute yet
    context: Ints  # [S] tokens computed
    emitted: Ints  # [S]
    output: Ints  # [S] tokens that it will emit
    blocks: Ints  # [S] that are its own
    order: Ints  # [S] of admission
    free: Ints  # [1] blocks
    now_s: Numbers  # [1]
    stamp_s: Numbers  # [S] time of its first token, or of its end
    active: Numbers  # [2] steps, and seconds in them


def batch_of(slots: int, blocks: int) -> Batch:
    """Returns an idle engine's batch."""
    request = np.full(slots, FREE_SLOT, np.int64)
    todo, context, emitted, output, own, order = np.zeros((6, slots), np.int64)
    blocks_free, now_s, stamp_s, active = np.array([blocks]), np.zeros(1), np.zeros(slots), np.zeros(2)
    return Batch(request, todo, context, emitted, output, own, order, blocks_free, now_s, stamp_s, active)


@_compiled
def nothing_more(batch: Batch, data: Any) -> float:
    """Returns no additional seconds for a step."""
    return 0.0


@_compiled
def _grow(batch: Batch) -> int:
    """Gives each decoding sequence a place for its next token; returns a slot to remove, or FREE_SLOT."""
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
    """Computes prompts in order of admission; returns the tokens. Complete prompts wait with todo = -1."""
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
    """Runs steps that begin before `until_s`, until one matters to others. Returns the reason, and the slot of OUT.

    FIRST: a first token. DONE: a sequence ended. UNDER: less than `ahead` is left to prefill. OUT: a sequence must make
    room, and the step has not run. `more_s(batch, data)` is a step's time beside `costs`.
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
    """Gives a token to each sequence with a complete prompt; returns FIRST and DONE as they apply."""
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

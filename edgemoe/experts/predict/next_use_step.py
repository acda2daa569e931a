"""Follows the layers of the running step, compiled: updates the ranks, and aligns sequences with the routing memory.

A layer is visited here or by `next_use_work`, whichever comes first; a lock for each layer keeps the two apart.
Steps are numbered from 0. At most two are under way: the running one, and the one before it, which is being finished.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgemoe.experts.predict.forecast_blend import BINS as SHARES
from edgemoe.experts.predict.forecast_blend import HORIZONS, NEXT_STEP, fuse
from edgemoe.experts.predict.online_mlp import DECAY, FEATURES, FLAT, HORIZON_STEPS, LEARNER, OWN, add, describe, score
from edgemoe.experts.predict.routing_memory import LOOKS, MEMORY, NONE, add_matches, append, pack, recall, shift
from edgemoe.jit.intrinsics import (
    INT,
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    carray,
    f32_at,
    give_way,
    i16_at,
    i64_at,
    jit,
    pause,
    record,
    u8_at,
    u64_at,
    view,
    wake,
)
from edgemoe.jit.object_cache import code
from edgemoe.types.arrays import fields, place_of

TRACKS = 16  # sequences that are aligned with the memory at once
NEIGHBOURS = 32  # tokens of the past that are asked, in all
WIDEST = 4 * NEIGHBOURS  # tokens of the past that are kept for one sequence
TRIES = 4000  # for a layer's lock: some tens of microseconds
LOG_DECAY = np.float32(np.log(DECAY))

# One step.
# * `ids` [L, tokens, k] int16, -1 until the layer has run
# * `rows` [sequences] the tokens that are learned from
# * `tracks` and `fresh` of the first `tracked` sequences: the track of each, and whether it is new
STEP = fields("ids", "tokens", "k", "sequences", "rows", "tracked", "tracks", "fresh", "failed")
# The predictor; arrays are addresses, see `NextUsePredictor`. The fields of the flow:
# * `begun`, `ended`, `finished` the latest such step
# * `looking` the number of looks of the running step, `allowed` of the next one; `looked` are done
# * `seen` layers are in the match
# * `adopted` the latest step whose sequences are known to the alignment
# * `told` prompts were announced, `taken` of them are in the memory
STATE = fields(
    *("layers", "experts", "stride", "memory", "learner", "steps", "match_step"),
    *("scores", "ranks", "known", "history", "visited", "locks", "later", "odds", "same"),
    *("scratch", "near", "near_weights", "near_n", "stats", "counts", "running", "latest", "half", "token", "match"),
    *("probs", "trust", "shares", "etas", "awaited_keys", "awaited_horizon", "awaited_values"),
    *("semaphore", "deadline", "waits", "result"),
    *("begun", "ended", "finished", "followed", "current", "marks", "handled", "idle", "stop", "nudged", "heard"),
    *("allowed", "looking", "looked", "seen", "adopted", "listened", "awaited", "prompts", "told", "taken"),
)
STEP_BYTES = STEP.itemsize


def offset(name: str) -> int:
    return 8 * place_of(STATE, name)


BEGUN, ENDED, DONE, FOLLOWED, CURRENT = (offset(name) for name in ("begun", "ended", "finished", "followed", "current"))
MARKS, HANDLED, AT_REST = offset("marks"), offset("handled"), offset("idle")
STOP, NUDGED, HEARD, ADOPTED = offset("stop"), offset("nudged"), offset("heard"), offset("adopted")


@code(INT, INT, INT)
def MARK(state: int, place: int, value: int) -> None:
    """Stores a value at a place in the STATE record, and wakes the thread beside the engine."""
    atomic_store(state + place, value)
    _wake(state)


@jit
def _wake(state: int) -> None:
    atomic_add(state + MARKS, 1)
    wake(record(state, STATE).semaphore)


@jit
def step_of(state: int, number: int) -> int:
    """Returns the STEP record of a step."""
    return record(state, STATE).steps + number % 2 * STEP_BYTES  # type: ignore[no-any-return]


@jit
def _has_run(step: int, layer: int) -> bool:
    """Whether the whole routing of the layer is there."""
    p = record(step, STEP)
    ids, rows = i16_at(p.ids), i64_at(p.rows)
    for row in range(p.sequences):
        for rank in range(p.k):
            if ids[(layer * p.tokens + rows[row]) * p.k + rank] < 0:
                return False
    return True


@jit
def _visit(state: int, number: int, layer: int) -> None:
    """Adds a layer's needs in a step to its experts' history, and computes their features."""
    s, p = record(state, STATE), record(step_of(state, number), STEP)
    experts = s.experts
    needed = carray(u8_at(record(s.learner, LEARNER).needed), (HORIZON_STEPS + 2, s.layers, experts))
    needs = needed[number % (HORIZON_STEPS + 2), layer]
    ids, rows = i16_at(p.ids), i64_at(p.rows)
    for row in range(p.sequences):
        for rank in range(p.k):
            needs[ids[(layer * p.tokens + rows[row]) * p.k + rank]] = 1
    add(s.history, layer, needs, number)
    describe(s.history, layer, own_features(state, layer), number)
    i64_at(s.visited)[layer] = number


@view
def own_features(state: int, layer: int) -> Any:
    """Returns a layer's features from its experts' own history, [OWN features, E]."""
    s = record(state, STATE)
    return carray(f32_at(s.known), (s.layers, FEATURES, s.experts))[layer, 1 : 1 + OWN]


@jit
def _refresh(state: int, number: int, layer: int) -> None:
    """Recomputes scores and ranks of the experts of one layer."""
    s = record(state, STATE)
    experts = s.experts
    ran = i64_at(s.visited)[layer] == number
    buffer = atomic_load(state + CURRENT)
    scratch = carray(f32_at(s.scratch), (s.layers, 3, experts))[layer]
    never = scratch[0]
    never[:] = 1
    slots = carray(i64_at(s.near), (2, TRACKS, WIDEST))[buffer]
    weights = carray(f32_at(s.near_weights), (2, TRACKS, WIDEST))[buffer]
    n = carray(i64_at(s.near_n), (2, TRACKS))[buffer]
    for i in range(TRACKS):
        if n[i]:
            recall(never, s.memory, slots[i, : n[i]], weights[i, : n[i]], layer * experts, not ran, scratch[1])
    same = carray(f32_at(s.same), (s.layers, 3))[layer]
    stats = carray(f32_at(s.stats), (2, 2))[buffer]
    same[0], same[1], same[2] = stats[0], stats[1], np.float32(1) if ran else np.float32(0)
    phase = f32_at(s.later)[layer] + (LOG_DECAY if ran else np.float32(0))
    scores = carray(f32_at(s.scores), (s.layers, experts))[layer]
    score(
        scores,
        carray(f32_at(s.known), (s.layers, FEATURES, experts))[layer],
        same,
        phase,
        carray(f32_at(record(s.learner, LEARNER).weights), (FLAT,)),
        carray(f32_at(s.odds), (256,)),
        scratch,
    )
    ranks = carray(f32_at(s.ranks), (s.layers, experts))[layer]
    horizon = NEXT_STEP if ran else horizon_of(state)
    eta = f32_at(s.etas)[horizon] * f32_at(s.trust)[0]
    if atomic_load(state + HEARD) != number or eta <= 0:
        for expert in range(experts):
            ranks[expert] = scores[expert]
        return
    share = carray(f32_at(s.shares), (HORIZONS, SHARES))[horizon]
    probs = carray(f32_at(s.probs), (2, s.layers, experts))[1 if ran else 0, layer]
    for expert in range(experts):
        _, odds = fuse(scores[expert] - phase, probs[expert], share, eta)
        ranks[expert] = odds + phase


@jit
def horizon_of(state: int) -> int:
    """Returns the horizon within this step, by the share of its layers that have run."""
    s = record(state, STATE)
    return min(LOOKS - 1, LOOKS * atomic_load(state + FOLLOWED) // s.layers)  # type: ignore[no-any-return]


@jit
def follow(state: int, number: int, refresh: bool) -> None:
    """Visits and refreshes the layers of a step that have run and were not visited yet; gives up at a held lock."""
    s, step = record(state, STATE), step_of(state, number)
    layer = atomic_load(state + FOLLOWED)
    while layer < s.layers and _has_run(step, layer):
        lock, tries = s.locks + 8 * layer, 0
        while not atomic_replace(lock, 0, 1):
            tries += 1
            if tries > TRIES:
                return
            pause()
        if i64_at(s.visited)[layer] != number:
            _visit(state, number, layer)
            if refresh:
                _refresh(state, number, layer)
        atomic_store(lock, 0)
        atomic_replace(state + FOLLOWED, layer, layer + 1)
        layer = atomic_load(state + FOLLOWED)


@code(INT)
def FOLLOW(state: int) -> None:
    """Brings the ranks of the layers that have run up to date, unless the step before is not finished yet."""
    number = atomic_load(state + BEGUN)
    if atomic_load(state + DONE) != number - 1:
        return
    follow(state, number, True)
    if due(state):
        _wake(state)


@jit
def due(state: int) -> bool:
    """Whether the running step has reached the layer of its next look, or a forecast has come."""
    s = record(state, STATE)
    if s.looking == 0:
        return False
    number = s.finished + 1
    if atomic_load(state + HEARD) == number and s.listened != number:
        return True
    at = (s.layers * s.looked + s.looking - 1) // s.looking
    return s.looked < s.looking and atomic_load(state + FOLLOWED) >= at  # type: ignore[no-any-return]


@jit
def refresh_all(state: int, number: int) -> None:
    s = record(state, STATE)
    for layer in range(s.layers):
        lock = s.locks + 8 * layer
        while not atomic_replace(lock, 0, 1):
            give_way()
        _refresh(state, number, layer)
        atomic_store(lock, 0)


@code(INT)
def START(state: int) -> None:
    """Describes and scores all experts, before the first step and after a restore."""
    s = record(state, STATE)
    for layer in range(s.layers):
        describe(s.history, layer, own_features(state, layer), s.finished)
    refresh_all(state, s.finished + 1)


PROMPTS = 16  # parts of prompts that wait at once
MOST = 4  # of the memory, a part of a prompt gets one such share at most
ALIGNED_TOKENS = 3  # the last ones of a prompt; earlier ones add nothing to the match

# A part of a prompt: `ids` [L, tokens, k] int16; its track, and whether that is new. Accepted drafts are one, too. They
# stand behind the token of the step `after`, which is -1 for prompts, and continue its alignment.
PROMPT = fields("ids", "tokens", "k", "track", "fresh", "after")
PROMPT_BYTES = PROMPT.itemsize
TOLD, TAKEN = offset("told"), offset("taken")


@view
def match_of(state: int, track: int, running: bool) -> Any:
    """Returns the match of a track's running token, or of its latest whole one, with each slot."""
    s = record(state, STATE)
    half = i64_at(s.half)[track] if running else 1 - i64_at(s.half)[track]
    return carray(f32_at(s.match), (TRACKS, 2, record(s.memory, MEMORY).slots))[track, half]


@jit
def begin_token(state: int, track: int) -> None:
    """Begins a token of the track."""
    m = record(record(state, STATE).memory, MEMORY)
    before, filled = carray(i64_at(m.before), (m.slots,)), min(m.written, m.slots)
    shift(match_of(state, track, True), match_of(state, track, False), before, filled)


@jit
def begin_sequence(state: int, track: int) -> None:
    """Assigns the track to another sequence."""
    i64_at(record(state, STATE).latest)[track] = NONE
    match_of(state, track, False)[:] = 0


@jit
def remember(state: int, track: int) -> None:
    """Appends the track's running token, which is whole, to the memory."""
    s = record(state, STATE)
    m = record(s.memory, MEMORY)
    words, latest = carray(u64_at(s.token), (TRACKS, m.layers, m.words)), i64_at(s.latest)
    latest[track] = slot = append(s.memory, words[track], latest[track])
    i64_at(s.half)[track] = 1 - i64_at(s.half)[track]
    for other in range(TRACKS):
        match_of(state, other, True)[slot] = match_of(state, other, False)[slot] = 0
        if other != track and latest[other] == slot:
            latest[other] = NONE


@jit
def add_prompts(state: int) -> None:
    """Appends the waiting prompts' routing to the memory; their sequences continue from there."""
    s = record(state, STATE)
    while s.taken < atomic_load(state + TOLD):
        prompt = s.prompts + s.taken % PROMPTS * PROMPT_BYTES
        if record(prompt, PROMPT).after > atomic_load(state + DONE):
            return
        _add_prompt(state, prompt)
        atomic_store(state + TAKEN, s.taken + 1)


@jit
def _add_prompt(state: int, prompt: int) -> None:
    s, p = record(state, STATE), record(prompt, PROMPT)
    m = record(s.memory, MEMORY)
    chosen = carray(u64_at(m.chosen), (m.layers, m.words, m.slots))
    words = carray(u64_at(s.token), (TRACKS, m.layers, m.words))[p.track]
    ids = carray(i16_at(p.ids), (m.layers, p.tokens, p.k))
    if p.fresh:
        begin_sequence(state, p.track)
    first = max(0, p.tokens - m.slots // MOST)
    aligned = max(first, p.tokens - ALIGNED_TOKENS)
    for token in range(first, p.tokens):
        if token == aligned and p.after < 0:
            match_of(state, p.track, False)[:] = 0
        if token >= aligned:
            begin_token(state, p.track)
        for layer in range(m.layers):
            pack(words[layer], ids[layer, token])
            if token >= aligned and layer % s.stride == 0:
                filled = min(m.written, m.slots)
                add_matches(
                    match_of(state, p.track, True), chosen[layer], words[layer], filled, f32_at(s.match_step)[0]
                )
        remember(state, p.track)
    running = i64_at(s.running)
    for i in range(running[TRACKS]):
        if running[i] == p.track and p.after < 0:  # else the end of the step does
            begin_token(state, p.track)
    if atomic_load(state + ADOPTED) <= s.finished:
        s.looked = 0  # the look before the next step knew nothing of this

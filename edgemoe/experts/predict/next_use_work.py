"""The predictor's work beside the engine, compiled: `WORK` scores the experts in the running step, and finishes it.

It aligns the sequences with the memory, remembers and learns. It sleeps on a semaphore between the marks that the
engine leaves. It returns when a step is finished and it has looked at the next one.
"""

from __future__ import annotations

import math

import numpy as np

from edgemoe.experts.predict.forecast_blend import NEXT_STEP, SAMPLE
from edgemoe.experts.predict.next_use_step import (
    AT_REST,
    BEGUN,
    CURRENT,
    DONE,
    ENDED,
    FOLLOWED,
    HANDLED,
    HEARD,
    LOG_DECAY,
    MARKS,
    NEIGHBOURS,
    NUDGED,
    STATE,
    STEP,
    STOP,
    TRACKS,
    WIDEST,
    add_prompts,
    begin_sequence,
    begin_token,
    due,
    follow,
    horizon_of,
    match_of,
    refresh_all,
    remember,
    step_of,
)
from edgemoe.experts.predict.online_mlp import FEATURES, HORIZON_STEPS, LEARNER, draw, learn, note_examples
from edgemoe.experts.predict.routing_memory import (
    BINS,
    LOOKS,
    MEMORY,
    SHARE_OF_PAST,
    TEMPERATURE,
    add_matches,
    move_on,
    pack,
    select,
)
from edgemoe.jit.intrinsics import (
    INT,
    atomic_load,
    atomic_store,
    carray,
    f32_at,
    i16_at,
    i64_at,
    jit,
    record,
    u8_at,
    u64_at,
    wait_until,
)
from edgemoe.jit.object_cache import code

FEWEST = 8  # tokens of the past that are asked for one sequence
UPDATES = 1  # minibatches per step
AWAITED = LOOKS + 1  # looks of one step whose forecasts are learned from
IDLE, FINISHED = 0, 1  # results


@code(INT)
def WORK(state: int) -> None:
    """Handles marks until a step is finished, or until the deadline without work."""
    s = record(state, STATE)
    s.result = IDLE
    while True:
        marks = atomic_load(state + MARKS)
        number = s.finished + 1
        add_prompts(state)
        if atomic_load(state + ENDED) >= number:
            _finish(state, number)
            s.result = FINISHED
            return
        if atomic_load(state + BEGUN) >= number and due(state):
            _adopt(state, number)
            follow(state, number, True)
            _rescore(state, number)
            continue
        stopped = atomic_load(state + STOP) or atomic_load(state + NUDGED)
        if stopped or s.waits == 0:
            return
        atomic_store(state + HANDLED, marks)
        atomic_store(state + AT_REST, 1)
        late = wait_until(s.semaphore, s.deadline)
        atomic_store(state + AT_REST, 0)
        if late:
            return


@jit
def _adopt(state: int, number: int) -> None:
    """Aligns the sequences that the step has, where they are others than was presumed."""
    s, p = record(state, STATE), record(step_of(state, number), STEP)
    if s.adopted >= number:
        return
    s.adopted = number
    running, tracks, fresh = i64_at(s.running), i64_at(p.tracks), i64_at(p.fresh)
    same = running[TRACKS] == p.tracked
    running[TRACKS] = p.tracked
    for i in range(p.tracked):
        same = same and running[i] == tracks[i] and not fresh[i]
        running[i] = tracks[i]
        if fresh[i]:
            begin_sequence(state, tracks[i])
    if not same:
        for i in range(p.tracked):
            begin_token(state, tracks[i])


@jit
def _add_routing(state: int, number: int, last: int) -> None:
    """Adds the routing of the layers up to `last` to the running tokens, and to their matches."""
    s, p = record(state, STATE), record(step_of(state, number), STEP)
    m = record(s.memory, MEMORY)
    chosen = carray(u64_at(m.chosen), (m.layers, m.words, m.slots))
    words = carray(u64_at(s.token), (TRACKS, m.layers, m.words))
    ids = carray(i16_at(p.ids), (s.layers, p.tokens, p.k))
    filled = min(m.written, m.slots)
    for layer in range(s.seen, last):
        for i in range(p.tracked):
            track = i64_at(p.tracks)[i]
            pack(words[track, layer], ids[layer, i64_at(p.rows)[i]])
            if layer % s.stride == 0:
                share = f32_at(s.match_step)[0]
                add_matches(match_of(state, track, True), chosen[layer], words[track, layer], filled, share)
    s.seen = last


@jit
def _rescore(state: int, number: int) -> None:
    """Aligns every sequence again, and scores all experts."""
    s = record(state, STATE)
    if atomic_load(state + BEGUN) >= number:
        _add_routing(state, number, atomic_load(state + FOLLOWED))
    known = np.float32(SHARE_OF_PAST + (1 - SHARE_OF_PAST) * s.seen / s.layers)  # of a perfect match
    buffer = 1 - s.current
    slots = carray(i64_at(s.near), (2, TRACKS, WIDEST))[buffer]
    weights = carray(f32_at(s.near_weights), (2, TRACKS, WIDEST))[buffer]
    n = carray(i64_at(s.near_n), (2, TRACKS))[buffer]
    stats = carray(f32_at(s.stats), (2, 2))[buffer]
    counts = carray(i64_at(s.counts), (BINS,))
    running = i64_at(s.running)
    sequences = max(1, running[TRACKS])
    wanted = max(FEWEST, NEIGHBOURS // sequences)
    temperature = np.float32(TEMPERATURE) * known
    n[:], best, spread = 0, np.float32(0), np.float32(0)
    for i in range(running[TRACKS]):
        match = match_of(state, running[i], True)
        n[i], top, count = select(s.memory, match, wanted, temperature, slots[i], weights[i], counts)
        best += top / known
        spread += count
    stats[0] = np.float32(3) * (best / np.float32(sequences) - np.float32(0.5))
    count = max(np.float32(1), spread / np.float32(sequences))
    stats[1] = np.float32(0.4) * np.float32(math.log(count)) - np.float32(0.6)
    atomic_store(state + CURRENT, buffer)
    refresh_all(state, number)
    if draw(s.learner, 2) == 0:
        known_now = carray(f32_at(s.known), (s.layers, FEATURES, s.experts))
        note_examples(s.learner, known_now, number, carray(i64_at(s.visited), (s.layers,)))
    if s.seen * s.looking >= s.layers * s.looked:  # else a forecast was the reason
        s.looked += 1
    if atomic_load(state + HEARD) == number and atomic_load(state + BEGUN) >= number:
        _await_forecast(state, number)


@jit
def _await_forecast(state: int, number: int) -> None:
    """Stores the current forecasts of some experts, to compare with the outcome."""
    s = record(state, STATE)
    s.listened = number
    if s.awaited == AWAITED:
        return
    keys, horizons = carray(i64_at(s.awaited_keys), (AWAITED, SAMPLE))[s.awaited], i64_at(s.awaited_horizon)
    values = carray(f32_at(s.awaited_values), (AWAITED, 2, SAMPLE))[s.awaited]
    probs, scores = carray(f32_at(s.probs), (2, s.layers * s.experts)), f32_at(s.scores)
    for i in range(SAMPLE):
        key = draw(s.learner, s.layers * s.experts)
        layer = key // s.experts
        ran = i64_at(s.visited)[layer] == number
        phase = f32_at(s.later)[layer] + (LOG_DECAY if ran else np.float32(0))
        keys[i], values[0, i], values[1, i] = key, scores[key] - phase, probs[1 if ran else 0, key]
        horizons[s.awaited * SAMPLE + i] = NEXT_STEP if ran else horizon_of(state)
    s.awaited += 1


@jit
def _finish(state: int, number: int) -> None:
    """Finishes a step: remembers it, rescores for the next one, which may have begun, and learns."""
    s, p = record(state, STATE), record(step_of(state, number), STEP)
    for _ in range(s.layers):
        follow(state, number, s.allowed == 0)
    _adopt(state, number)
    if not p.failed and atomic_load(state + FOLLOWED) == s.layers:
        _add_routing(state, number, s.layers)
        for i in range(i64_at(s.running)[TRACKS]):
            remember(state, i64_at(s.running)[i])
    needed = carray(u8_at(record(s.learner, LEARNER).needed), (HORIZON_STEPS + 2, s.layers * s.experts))
    needed[(number + 1) % (HORIZON_STEPS + 2)] = 0
    scores, ranks = f32_at(s.scores), f32_at(s.ranks)
    for key in range(s.layers * s.experts):  # all layers are still to run again
        scores[key] -= LOG_DECAY
        ranks[key] -= LOG_DECAY
    s.looked, s.seen, s.looking = 0, 0, s.allowed
    atomic_store(state + FOLLOWED, 0)
    atomic_store(state + DONE, number)
    add_prompts(state)
    if atomic_load(state + BEGUN) > number:
        _adopt(state, number + 1)
    for i in range(i64_at(s.running)[TRACKS]):
        begin_token(state, i64_at(s.running)[i])
    if s.looking:
        _rescore(state, number + 1)
    else:
        _move_on(state)
    learn(s.learner, number, UPDATES)


@jit
def _move_on(state: int) -> None:
    """Moves the aligned tokens on by one, without a new alignment."""
    s = record(state, STATE)
    m = record(s.memory, MEMORY)
    slots, n = carray(i64_at(s.near), (2, TRACKS, WIDEST))[s.current], carray(i64_at(s.near_n), (2, TRACKS))[s.current]
    for i in range(TRACKS):
        move_on(slots[i], n[i], carray(i64_at(m.after), (m.slots,)))
    if draw(s.learner, 2) == 0:
        note_examples(
            s.learner,
            carray(f32_at(s.known), (s.layers, FEATURES, s.experts)),
            s.finished,
            carray(i64_at(s.visited), (s.layers,)),
        )

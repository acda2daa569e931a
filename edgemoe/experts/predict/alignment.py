"""How sequences are aligned with the memory, token by token, and what prompts chose becomes a part of it. Compiled.

A sequence has a track: its match with each slot of the memory, of the running token and of its latest whole one, the
running token's choices, and the slot of the latest.
"""

from __future__ import annotations

from typing import Any

from edgemoe.experts.predict.next_use_step import ADOPTED, STATE, TRACKS, offset
from edgemoe.experts.predict.routing_memory import MEMORY, NONE, append, pack, see, shift
from edgemoe.jit.intrinsics import (
    atomic_load,
    atomic_store,
    carray,
    f32_at,
    fields,
    i16_at,
    i64_at,
    jit,
    record,
    u64_at,
)

PROMPTS = 16  # parts of prompts that wait at once
MOST = 4  # of the memory, a part of a prompt gets one such share at most
ALIGNED_TOKENS = 3  # of a prompt, the last ones: what an earlier one adds to the match is nothing

# A part of a prompt: `ids` [L, tokens, k] int16; its sequence's track, and whether that is new.
PROMPT = fields("ids", "tokens", "k", "track", "fresh")
PROMPT_BYTES = PROMPT.itemsize
TOLD, TAKEN = offset("told"), offset("taken")


@jit
def match_of(state: int, track: int, running: bool) -> Any:
    """The match of a track's running token, or of its latest whole one, with each slot."""
    s = record(state, STATE)
    half = i64_at(s.half)[track] if running else 1 - i64_at(s.half)[track]
    return carray(f32_at(s.match), (TRACKS, 2, record(s.memory, MEMORY).slots))[track, half]


@jit
def begin_token(state: int, track: int) -> None:
    """A token of the track begins."""
    m = record(record(state, STATE).memory, MEMORY)
    before, filled = carray(i64_at(m.before), (m.slots,)), min(m.written, m.slots)
    shift(match_of(state, track, True), match_of(state, track, False), before, filled)


@jit
def begin_sequence(state: int, track: int) -> None:
    """The track is another sequence's from here on."""
    i64_at(record(state, STATE).latest)[track] = NONE
    match_of(state, track, False)[:] = 0


@jit
def remember(state: int, track: int) -> None:
    """The track's running token is whole: it becomes a part of the memory."""
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
def take_prompts(state: int) -> None:
    """What prompts chose that were told of becomes a part of the memory, and their sequences go on from there."""
    s = record(state, STATE)
    while s.taken < atomic_load(state + TOLD):
        _take(state, s.prompts + s.taken % PROMPTS * PROMPT_BYTES)
        atomic_store(state + TAKEN, s.taken + 1)


@jit
def _take(state: int, prompt: int) -> None:
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
        if token == aligned:
            match_of(state, p.track, False)[:] = 0
        if token >= aligned:
            begin_token(state, p.track)
        for layer in range(m.layers):
            pack(words[layer], ids[layer, token])
            if token >= aligned and layer % s.stride == 0:
                filled = min(m.written, m.slots)
                see(match_of(state, p.track, True), chosen[layer], words[layer], filled, f32_at(s.match_step)[0])
        remember(state, p.track)
    running = i64_at(s.running)
    for i in range(running[TRACKS]):
        if running[i] == p.track:
            begin_token(state, p.track)
    if atomic_load(state + ADOPTED) <= s.finished:
        s.looked = 0  # the look before the next step knew nothing of this

"""Chooses which expert to evict when a slot is needed: by the policy's rank, and by what the policy cannot know.

Experts loaded for prefill only are evicted first, those whose layers run last first of all. A prefetched expert keeps
the utility of its request until its layer has run. Experts that the running layer-step still needs are evicted last.
Former homes go only where nothing else can. Pinned experts, and those at home here, are not evicted. Of equals the one
in the lower slot goes. Compiled; arguments are addresses of the STATE and of a POOL record.
"""

from __future__ import annotations

import numpy as np

from edgemoe.experts.tiers.records import FORMER, HOME, NONE, POOL, SHORTLIST, STATE, TRANSIENT, UNUSED
from edgemoe.kernels.cpu.intrinsics import f32_at, i64_at, jit, record

ALWAYS = np.inf  # utility of a demand, which replaces anything that is not needed now
LAST = np.finfo(np.float32).max  # utility of a former home, which only a home replaces
TRANSIENT_KEY = np.float32(-1e30)  # of prefill-only experts, below every rank of a policy


@jit
def take(state: int, pool: int, n: int, ranks: int, into: int) -> int:
    """Writes up to `n` empty slots to `into`: free ones, then those of the lowest utility, whose experts it evicts.

    Returns their number. `ranks` [L * E] are not read where enough slots are free.
    """
    p, slots = record(pool, POOL), i64_at(into)
    count = min(n, p.free_count)
    for i in range(count):
        p.free_count -= 1
        slots[i] = i64_at(p.free)[p.free_count]
    if count < n:
        found = _lowest(state, pool, ranks, n - count, p.victims, p.victim_keys)
        for i in range(found):
            slots[count + i] = i64_at(p.victims)[i]
            _evict(state, pool, i64_at(p.victims)[i])
        count += found
    return count  # type: ignore[no-any-return]


@jit
def take_below(state: int, pool: int, utility: float, ranks: int) -> int:
    """Returns a free slot, or evicts the expert of lowest utility if that is below `utility`; else NONE."""
    s, p = record(state, STATE), record(pool, POOL)
    if p.free_count > 0:
        p.free_count -= 1
        return i64_at(p.free)[p.free_count]  # type: ignore[no-any-return]
    if needs_ranks(state, pool, utility):  # ranking all for every prefetch request would cost too much
        p.least_count = _lowest(state, pool, ranks, SHORTLIST, p.least, p.least_keys)
        p.least_next, p.least_at = 0, s.clock
        for i in range(p.least_count):
            i64_at(p.least_owners)[i] = i64_at(p.owner)[i64_at(p.least)[i]]
    while p.least_next < p.least_count and f32_at(p.least_keys)[p.least_next] < utility:
        slot, owner = i64_at(p.least)[p.least_next], i64_at(p.least_owners)[p.least_next]
        p.least_next += 1
        if p.least_next == p.least_count:
            p.least_at = NONE  # used up: between layer-steps there may be many requests
        if i64_at(p.owner)[slot] == owner and _may_go(state, pool, slot):
            _evict(state, pool, slot)
            return slot  # type: ignore[no-any-return]
    return NONE


@jit
def needs_ranks(state: int, pool: int, utility: float) -> bool:
    """Returns whether `take_below` reads the ranks."""
    p = record(pool, POOL)
    return p.free_count == 0 and utility != -np.inf and p.least_at != record(state, STATE).clock


@jit
def release(pool: int, slot: int) -> None:
    """Makes an empty slot free."""
    p = record(pool, POOL)
    i64_at(p.free)[p.free_count] = slot
    p.free_count += 1


@jit
def _lowest(state: int, pool: int, ranks: int, n: int, slots_at: int, keys_at: int) -> int:
    """Writes the `n` slots of the lowest utility that may be evicted, ascending, and their utilities.

    Returns their number.
    """
    p, slots, keys, found = record(pool, POOL), i64_at(slots_at), f32_at(keys_at), 0
    for slot in range(p.slots):
        owner = i64_at(p.owner)[slot]
        if owner < 0:
            continue
        if found == n and i64_at(p.flags)[slot] == 0 and not f32_at(ranks)[owner] < keys[n - 1]:
            continue  # most: without flags, no utility is below the rank
        if not _may_go(state, pool, slot):
            continue
        key = _utility(state, pool, slot, ranks)
        if found == n and not key < keys[n - 1]:
            continue
        i = min(found, n - 1)
        found = i + 1
        while i > 0 and key < keys[i - 1]:
            slots[i], keys[i] = slots[i - 1], keys[i - 1]
            i -= 1
        slots[i], keys[i] = slot, key
    return found


@jit
def _utility(state: int, pool: int, slot: int, ranks: int) -> np.float32:
    """Returns the utility of keeping the slot's expert."""
    s, p = record(state, STATE), record(pool, POOL)
    key, flags = i64_at(p.owner)[slot], i64_at(p.flags)[slot]
    if i64_at(s.needed)[key] == s.clock:
        return np.float32(np.inf)
    if p.index == 0 and i64_at(s.kept)[key] == FORMER:
        return np.float32(LAST)
    utility = f32_at(ranks)[key]
    if flags == 0:
        return utility  # type: ignore[no-any-return]
    layer = key // s.experts
    if flags & TRANSIENT and not _decode_has_a_copy(state, pool, key):
        distance = (layer - s.layer - 1) % s.layers
        utility = np.float32(TRANSIENT_KEY * (1.0 + distance / s.layers))
    if flags & UNUSED and i64_at(s.visited)[layer] <= i64_at(p.born)[slot]:
        utility = max(utility, f32_at(p.utility)[slot])
    return utility  # type: ignore[no-any-return]


@jit
def _may_go(state: int, pool: int, slot: int) -> bool:
    """Returns whether nothing pins the slot's expert or the copy that goes with it, and it is not at home here."""
    s, p = record(state, STATE), record(pool, POOL)
    if i64_at(p.pins)[slot] != 0:
        return False
    if p.index != 0:
        return True
    key = i64_at(p.owner)[slot]
    if i64_at(s.kept)[key] == HOME:
        return False
    top, copy = _copy_of(state, key)
    return copy < 0 or i64_at(record(top, POOL).pins)[copy] == 0  # type: ignore[no-any-return]


@jit
def _decode_has_a_copy(state: int, pool: int, key: int) -> bool:
    """Returns whether decode uses the copy of an expert in RAM that goes with it."""
    if record(pool, POOL).index != 0:
        return False
    top, copy = _copy_of(state, key)
    return copy >= 0 and i64_at(record(top, POOL).flags)[copy] & TRANSIENT == 0  # type: ignore[no-any-return]


@jit
def _copy_of(state: int, key: int) -> tuple[int, int]:
    """Returns the device's pool, and the slot of the copy there that goes when the expert is dropped from RAM; NONE."""
    s = record(state, STATE)
    if s.devices == 0 or s.containment == 0:
        return 0, NONE
    top = i64_at(s.pools)[1 + i64_at(s.device_of)[key]]
    return top, i64_at(record(top, POOL).where)[key]


@jit
def _evict(state: int, pool: int, slot: int) -> None:
    """Evicts the expert of an unpinned slot, which the caller then owns, and with it the copy that goes."""
    if record(pool, POOL).index == 0:
        top, copy = _copy_of(state, i64_at(record(pool, POOL).owner)[slot])
        if copy >= 0:
            _forget(top, copy)
            release(top, copy)
    _forget(pool, slot)


@jit
def _forget(pool: int, slot: int) -> None:
    p = record(pool, POOL)
    i64_at(p.where)[i64_at(p.owner)[slot]] = NONE
    i64_at(p.owner)[slot] = NONE
    p.wasted += i64_at(p.flags)[slot] & UNUSED
    i64_at(p.flags)[slot] = 0

"""Chooses the expert to evict when a slot is needed, by rank and by flags. Compiled.

The order is in docs/design/residency.md. A rank that is no number counts as lowest; of equals the lower slot goes. A
slot is claimed from its own size class only. Arguments are addresses of the STATE and of a POOL record, and a class
number.
"""

from __future__ import annotations

import numpy as np

from edgemoe.experts.tiers.residency_records import CLASS, FORMER, HOME, NONE, POOL, SHORTLIST, STATE, TRANSIENT, UNUSED
from edgemoe.jit.intrinsics import f32_at, i64_at, jit, record

LAST = np.finfo(np.float32).max  # utility of a former home expert, which only a home expert replaces
TRANSIENT_KEY = np.float32(-1e30)  # utility of prefill-only experts, below every rank of a policy


@jit
def class_at(pool: int, size_class: int) -> int:
    """Returns the address of the CLASS record of a class in the pool."""
    return i64_at(record(pool, POOL).classes)[size_class]  # type: ignore[no-any-return]


@jit
def claim_slots(state: int, pool: int, size_class: int, n: int, ranks: int, into: int) -> int:
    """Claims up to `n` slots: free ones, then slots of the lowest utility, by evicting their experts.

    Writes them to `into`, and returns their number. `ranks` [L * E] are not read if enough slots are free.
    """
    p, c, slots = record(pool, POOL), record(class_at(pool, size_class), CLASS), i64_at(into)
    count = min(n, c.free_count)
    for i in range(count):
        c.free_count -= 1
        slots[i] = i64_at(c.free)[c.free_count]
    if count < n:
        found = _lowest(state, pool, size_class, ranks, n - count, p.victims, p.victim_keys)
        for i in range(found):
            slots[count + i] = i64_at(p.victims)[i]
            evict(state, pool, i64_at(p.victims)[i])
        count += found
    return count  # type: ignore[no-any-return]


@jit
def claim_slot_below(state: int, pool: int, size_class: int, utility: float, ranks: int) -> int:
    """Claims a free slot, or the slot of the lowest utility if that is below `utility`; returns NONE otherwise."""
    s, p, c = record(state, STATE), record(pool, POOL), record(class_at(pool, size_class), CLASS)
    if c.free_count > 0:
        c.free_count -= 1
        return i64_at(c.free)[c.free_count]  # type: ignore[no-any-return]
    if needs_ranks(state, pool, size_class, utility):  # ranking all for every prefetch request would cost too much
        c.least_count = _lowest(state, pool, size_class, ranks, SHORTLIST, c.least, c.least_keys)
        c.least_next, c.least_at = 0, s.clock
        for i in range(c.least_count):
            i64_at(c.least_owners)[i] = i64_at(p.owner)[i64_at(c.least)[i]]
    while c.least_next < c.least_count and f32_at(c.least_keys)[c.least_next] < utility:
        slot, owner = i64_at(c.least)[c.least_next], i64_at(c.least_owners)[c.least_next]
        c.least_next += 1
        if c.least_next == c.least_count:
            c.least_at = NONE  # used up: many requests may come between two layer-steps
        if i64_at(p.owner)[slot] == owner and may_evict(state, pool, slot):
            evict(state, pool, slot)
            return slot  # type: ignore[no-any-return]
    return NONE


@jit
def needs_ranks(state: int, pool: int, size_class: int, utility: float) -> bool:
    """Returns whether `claim_slot_below` reads the ranks."""
    c = record(class_at(pool, size_class), CLASS)
    return c.free_count == 0 and utility != -np.inf and c.least_at != record(state, STATE).clock


@jit
def free_slot(pool: int, slot: int) -> None:
    """Makes an empty slot free."""
    c = record(class_at(pool, i64_at(record(pool, POOL).class_of)[slot]), CLASS)
    i64_at(c.free)[c.free_count] = slot
    c.free_count += 1


@jit
def drop_load(pool: int, slot: int) -> None:
    """Drops a load that ends without its expert. The slot becomes free at its last unpin."""
    p = record(pool, POOL)
    i64_at(p.coming)[i64_at(p.owner)[slot]] = NONE
    i64_at(p.owner)[slot] = NONE
    i64_at(p.flags)[slot] = 0
    i64_at(p.pins)[slot] -= 1
    if i64_at(p.pins)[slot] == 0:
        free_slot(pool, slot)
    else:
        p.orphans += 1


@jit
def _lowest(state: int, pool: int, size_class: int, ranks: int, n: int, slots_at: int, keys_at: int) -> int:
    """Writes the `n` slots of the lowest utility that may be evicted, ascending, and their utilities.

    Returns their number. Until the end they are a heap with the last to go at its root, initially full of placeholders.
    """
    p, c, slots, keys = record(pool, POOL), record(class_at(pool, size_class), CLASS), i64_at(slots_at), f32_at(keys_at)
    for i in range(n):
        slots[i], keys[i] = p.slots, np.float32(np.inf)
    for slot in range(c.first, c.end):
        owner = i64_at(p.owner)[slot]
        if owner < 0:
            continue
        if i64_at(p.flags)[slot] == 0 and _goes_after(f32_at(ranks)[owner], slot, keys[0], slots[0]):
            continue  # most: without flags, no utility is below the rank
        if may_evict(state, pool, slot):
            key = _utility(state, pool, slot, ranks)
            if _goes_after(keys[0], slots[0], key, slot):
                _sink(slots_at, keys_at, n, slot, key)
    for last in range(n - 1, 0, -1):
        slot, key = slots[last], keys[last]
        slots[last], keys[last] = slots[0], keys[0]
        _sink(slots_at, keys_at, last, slot, key)
    found = n
    while found > 0 and slots[found - 1] == p.slots:
        found -= 1
    return found


@jit
def _sink(slots_at: int, keys_at: int, count: int, slot: int, key: np.float32) -> None:
    """Replaces the root of a heap by a slot that goes earlier."""
    slots, keys, i = i64_at(slots_at), f32_at(keys_at), 0
    while 2 * i + 1 < count:
        child = 2 * i + 1
        if child + 1 < count and _goes_after(keys[child + 1], slots[child + 1], keys[child], slots[child]):
            child += 1
        if not _goes_after(keys[child], slots[child], key, slot):
            break
        slots[i], keys[i] = slots[child], keys[child]
        i = child
    slots[i], keys[i] = slot, key


@jit
def _goes_after(key: np.float32, slot: int, other: np.float32, other_slot: int) -> bool:
    """Returns whether the slot is evicted after the other one."""
    return key > other or (key == other and slot > other_slot)  # type: ignore[return-value]


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
    if np.isnan(utility):
        utility = np.float32(-np.inf)
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
def may_evict(state: int, pool: int, slot: int) -> bool:
    """Whether the slot's expert may be evicted: it is no home expert, and neither it nor its device copy is pinned."""
    p = record(pool, POOL)
    if i64_at(p.pins)[slot] != 0:
        return False
    if p.index != 0:
        return True
    if i64_at(record(state, STATE).kept)[i64_at(p.owner)[slot]] == HOME:
        return False
    return is_unpinned(state, pool, slot)  # type: ignore[no-any-return]


@jit
def is_unpinned(state: int, pool: int, slot: int) -> bool:
    """Whether neither the slot's expert nor the device copy that goes with it is pinned."""
    p = record(pool, POOL)
    if p.index != 0 or i64_at(p.pins)[slot] != 0:
        return i64_at(p.pins)[slot] == 0  # type: ignore[no-any-return]
    top, copy = _copy_of(state, i64_at(p.owner)[slot])
    return copy < 0 or i64_at(record(top, POOL).pins)[copy] == 0  # type: ignore[no-any-return]


@jit
def _decode_has_a_copy(state: int, pool: int, key: int) -> bool:
    """Whether decode uses the device copy of an expert in RAM."""
    if record(pool, POOL).index != 0:
        return False
    top, copy = _copy_of(state, key)
    return copy >= 0 and i64_at(record(top, POOL).flags)[copy] & TRANSIENT == 0  # type: ignore[no-any-return]


@jit
def _copy_of(state: int, key: int) -> tuple[int, int]:
    """Returns the device's pool, and the slot of the copy there that is evicted with the expert in RAM; or NONE."""
    s = record(state, STATE)
    if s.devices == 0 or s.containment == 0:
        return 0, NONE
    top = i64_at(s.pools)[1 + i64_at(s.device_of)[key]]
    return top, i64_at(record(top, POOL).where)[key]


@jit
def evict(state: int, pool: int, slot: int) -> None:
    """Evicts the expert of an unpinned slot, and its device copy with containment. The caller owns the slot."""
    if record(pool, POOL).index == 0:
        top, copy = _copy_of(state, i64_at(record(pool, POOL).owner)[slot])
        if copy >= 0:
            clear_slot(top, copy)
            free_slot(top, copy)
    clear_slot(pool, slot)


@jit
def clear_slot(pool: int, slot: int) -> None:
    """Empties an unpinned slot, without making it free."""
    p = record(pool, POOL)
    i64_at(p.where)[i64_at(p.owner)[slot]] = NONE
    i64_at(p.owner)[slot] = NONE
    record(class_at(pool, i64_at(p.class_of)[slot]), CLASS).wasted += i64_at(p.flags)[slot] & UNUSED
    i64_at(p.flags)[slot] = 0

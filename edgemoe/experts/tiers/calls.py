"""What Python calls of compiled residency. Each call is one change, whole: it keeps the GIL, which is the lock.

Whoever changes what is where does so in one of these calls, so that no thread ever sees half of a change, and none
waits for another's lock. A call takes a few microseconds. To let go of the GIL for that long costs more than it gives:
another thread of Python may take it, and keeps it for 5 ms. A lock beside the GIL would be worse: who holds it can lose
the GIL meanwhile, and then the compute thread waits for both. Figures: tools/bench/results/residency.md.
"""

from __future__ import annotations

import numpy as np

from edgemoe.experts.tiers.dealing import GIVE
from edgemoe.experts.tiers.eviction import abandon, class_at, needs_ranks, release, take_below
from edgemoe.experts.tiers.extents import ADD_EXTENT, REMOVE_EXTENT
from edgemoe.experts.tiers.fetches import fetch_from_disk, fetch_through_ram, join, mark, place, size_class
from edgemoe.experts.tiers.records import CLASS, FORMER, HOME, NONE, POOL, REQUEST, STATE
from edgemoe.jit.intrinsics import INT, code, f32_at, i64_at, jit, record, u8_at

RANKS, RAM_RANKS = 1, 2  # asked for by ACQUIRE
ASKS = -2  # for ranks, by RESERVE


@code(INT, INT, result=INT)
def BEGIN(state: int, layer: int) -> int:
    """Opens a layer-step."""
    s = record(state, STATE)
    s.clock += 1
    s.layer = layer
    i64_at(s.visited)[layer] = s.clock
    return s.clock  # type: ignore[no-any-return]


@code(INT, result=INT)
def PIN_ALL(request: int) -> int:
    """Opens a layer-step of ours, and pins the experts if all are in the pool. Returns whether they are."""
    r = record(request, REQUEST)
    s, pool = record(r.state, STATE), i64_at(record(r.state, STATE).pools)[r.pool]
    if r.ours:
        s.clock += 1
        s.layer = r.layer
        i64_at(s.visited)[r.layer] = s.clock
    p, base = record(pool, POOL), r.layer * s.experts
    for i in range(r.count):
        slot = i64_at(p.where)[base + i64_at(r.ids)[i]]
        if slot < 0:
            return 0
        i64_at(r.slots)[i] = slot
    for i in range(r.count):
        _pin(request, pool, i, i64_at(r.slots)[i])
    s.changes += 1
    return 1


@code(INT, result=INT)
def PIN(request: int) -> int:
    """Pins those of the experts that are in the pool. Returns their number."""
    r = record(request, REQUEST)
    s, pool = record(r.state, STATE), i64_at(record(r.state, STATE).pools)[r.pool]
    count, base = 0, r.layer * s.experts
    for i in range(r.count):
        slot = i64_at(record(pool, POOL).where)[base + i64_at(r.ids)[i]]
        i64_at(r.slots)[i] = slot
        if slot >= 0:
            _pin(request, pool, i, slot)
            count += 1
    s.changes += 1
    return count


@code(INT, INT, result=INT)
def HOLD(state: int, key: int) -> int:
    """Pins an expert in RAM. Returns its slot; NONE where it is not there."""
    s = record(state, STATE)
    p = record(i64_at(s.pools)[0], POOL)
    slot = i64_at(p.where)[key]
    if slot >= 0:
        i64_at(p.pins)[slot] += 1
        s.changes += 1
    return slot  # type: ignore[no-any-return]


@code(INT, result=INT)
def ACQUIRE(request: int) -> int:
    """Pins the experts that are in the pool, and slots for as many others as there is room.

    Returns 0; or, with nothing changed, which ranks it needs: RANKS, RAM_RANKS, or both.
    """
    r = record(request, REQUEST)
    s, pool = record(r.state, STATE), i64_at(record(r.state, STATE).pools)[r.pool]
    asked = _asked(request, pool)
    if asked != 0:
        return asked  # type: ignore[no-any-return]
    p, base, wanted = record(pool, POOL), r.layer * s.experts, 0
    r.start_count = 0
    for i in range(r.count):
        key = base + i64_at(r.ids)[i]
        slot, coming = i64_at(p.where)[key], i64_at(p.coming)[key]
        i64_at(s.needed)[key] = s.clock
        i64_at(r.slots)[i] = slot
        u8_at(r.ready)[i] = slot >= 0
        if slot >= 0:
            _pin(request, pool, i, slot)
        elif coming >= 0:
            join(request, pool, i, coming)
        elif wanted < r.limit:
            i64_at(r.wanted)[wanted] = i
            wanted += 1
    if r.pool == 0:
        fetch_from_disk(request, pool, wanted)
    else:
        fetch_through_ram(request, pool, wanted)
    s.changes += 1
    r.seen = s.version
    return 0


@jit
def _asked(request: int, pool: int) -> int:
    """Returns the ranks that `ACQUIRE` needs and lacks."""
    r = record(request, REQUEST)
    s, p, which = record(r.state, STATE), record(pool, POOL), size_class(request)
    ram, base, wanted, unread, asked = record(i64_at(s.pools)[0], POOL), r.layer * s.experts, 0, 0, 0
    for i in range(r.count):
        key = base + i64_at(r.ids)[i]
        if i64_at(p.where)[key] < 0 and i64_at(p.coming)[key] < 0 and wanted < r.limit:
            wanted += 1
            unread += i64_at(ram.where)[key] < 0 and i64_at(ram.coming)[key] < 0
    if wanted > record(class_at(pool, which), CLASS).free_count and r.ranks == 0:
        asked |= RANKS
    if r.pool != 0 and unread > record(class_at(i64_at(s.pools)[0], which), CLASS).free_count and r.ram_ranks == 0:
        asked |= RAM_RANKS
    return asked


@jit
def _pin(request: int, pool: int, i: int, slot: int) -> None:
    """Pins expert i in its slot. A demand of decode clears the prefill-only flag; a peer's leaves flags alone."""
    r, p = record(request, REQUEST), record(pool, POOL)
    i64_at(p.pins)[slot] += 1
    if r.ours:
        i64_at(p.flags)[slot] &= mark(request, i)
    i64_at(record(r.state, STATE).served)[p.tier] += 1


@code(INT, result=INT)
def UNPIN(request: int) -> int:
    """Drops one pin of each of the distinct slots of the pool. What a failed load has left becomes free."""
    r = record(request, REQUEST)
    s, pool = record(r.state, STATE), i64_at(record(r.state, STATE).pools)[r.pool]
    p = record(pool, POOL)
    for i in range(r.count):
        slot = i64_at(r.slots)[i]
        i64_at(p.pins)[slot] -= 1
        if i64_at(p.pins)[slot] == 0 and i64_at(p.owner)[slot] == NONE:
            release(pool, slot)
            p.orphans -= 1
    s.changes += 1
    s.version += 1
    return r.count  # type: ignore[no-any-return]


@code(INT, result=INT)
def RESERVE(request: int) -> int:
    """Begins the load of a prefetch request. Returns its slot; NONE where it is refused; ASKS for `ranks`.

    What has no number for its utility is worth what it ranks at now.
    """
    r = record(request, REQUEST)
    s, pool = record(r.state, STATE), i64_at(record(r.state, STATE).pools)[r.pool]
    p, ram = record(pool, POOL), record(i64_at(s.pools)[0], POOL)
    key, utility = r.layer * s.experts + i64_at(r.ids)[0], f32_at(r.worths)[0]
    source = NONE if r.pool == 0 else i64_at(ram.where)[key]
    i64_at(r.slots)[0] = source
    if i64_at(p.where)[key] >= 0 or i64_at(p.coming)[key] >= 0 or (r.pool != 0 and source < 0):
        return NONE
    if r.pool != 0 and 1 + i64_at(s.device_of)[key] != r.pool:
        return NONE  # it was given to another device meanwhile
    as_it_ranks = np.isnan(utility)
    if r.ranks == 0 and (as_it_ranks or needs_ranks(r.state, pool, size_class(request), utility)):
        return ASKS
    score = f32_at(r.worths)[1]
    if as_it_ranks:
        utility = score = f32_at(r.ranks)[key]
    s.changes += 1
    if source >= 0:
        i64_at(ram.pins)[source] += 1
    slot = take_below(r.state, pool, size_class(request), utility, r.ranks)
    if slot < 0:
        if source >= 0:
            i64_at(ram.pins)[source] -= 1
        return NONE
    place(r.state, pool, slot, key, r.flags)
    i64_at(p.source)[slot], f32_at(p.utility)[slot] = source, score
    return slot  # type: ignore[no-any-return]


@code(INT, INT, INT, result=INT)
def ARRIVE(state: int, pool: int, slot: int) -> int:
    """Makes the expert of an ended load resident, and pins the slot of RAM for the copy that waits for it.

    Returns the slot of that copy plus 1, or 0, times two; plus whether the load was demanded.
    """
    s = record(state, STATE)
    p = record(i64_at(s.pools)[pool], POOL)
    key, demanded = i64_at(p.owner)[slot], i64_at(p.demanded)[slot]
    i64_at(p.coming)[key], i64_at(p.where)[key] = NONE, slot
    i64_at(p.pins)[slot] -= 1
    c = record(class_at(i64_at(s.pools)[pool], i64_at(p.class_of)[slot]), CLASS)
    c.moved += 1
    c.prefetched += 1 - demanded
    s.changes += 1
    s.version += 1
    copy = _waiting_copy(state, pool, key)
    if copy >= 0:
        i64_at(p.pins)[slot] += 1
        i64_at(record(i64_at(s.pools)[1 + i64_at(s.device_of)[key]], POOL).source)[copy] = slot
    return 2 * (copy + 1) + demanded  # type: ignore[no-any-return]


@code(INT, INT, INT, result=INT)
def FAIL(state: int, pool: int, slot: int) -> int:
    """Drops a failed load, and the copy that waits for it. Slots become free as soon as they are not pinned.

    Returns what ARRIVE does.
    """
    s = record(state, STATE)
    p = record(i64_at(s.pools)[pool], POOL)
    key, demanded = i64_at(p.owner)[slot], i64_at(p.demanded)[slot]
    copy = _waiting_copy(state, pool, key)
    abandon(i64_at(s.pools)[pool], slot)
    if copy >= 0:
        abandon(i64_at(s.pools)[1 + i64_at(s.device_of)[key]], copy)
    s.changes += 1
    s.version += 1
    return 2 * (copy + 1) + demanded  # type: ignore[no-any-return]


@code(INT, INT, INT, result=INT)
def WITHDRAW(state: int, pool: int, slot: int) -> int:
    """Drops a prefetch to a device unless somebody demands it. Returns whether it did."""
    s = record(state, STATE)
    p = record(i64_at(s.pools)[pool], POOL)
    if i64_at(p.demanded)[slot]:
        return 0
    record(class_at(i64_at(s.pools)[pool], i64_at(p.class_of)[slot]), CLASS).withdrawn += 1
    abandon(i64_at(s.pools)[pool], slot)
    s.changes += 1
    s.version += 1
    return 1


@jit
def _waiting_copy(state: int, pool: int, key: int) -> int:
    """Returns the device's slot of the copy that waits for a read into RAM; NONE where none does."""
    s = record(state, STATE)
    if pool != 0 or s.devices == 0:
        return NONE
    top = record(i64_at(s.pools)[1 + i64_at(s.device_of)[key]], POOL)
    copy = i64_at(top.coming)[key]
    return copy if copy >= 0 and i64_at(top.source)[copy] == NONE else NONE


@code(INT, INT, result=INT)
def KEEP(state: int, homes: int) -> int:
    """Sets which experts are at home in RAM, [L * E] uint8. Those that were and are there become former homes."""
    s = record(state, STATE)
    ram = record(i64_at(s.pools)[0], POOL)
    for key in range(s.layers * s.experts):
        former = i64_at(s.kept)[key] != 0 and i64_at(ram.where)[key] >= 0
        i64_at(s.kept)[key] = HOME if u8_at(homes)[key] else FORMER if former else 0
    _forget_shortlists(state)
    return 0


@code(INT, result=INT)
def FORGET_FORMER(state: int) -> int:
    """Ranks former homes by the policy again."""
    s = record(state, STATE)
    for key in range(s.layers * s.experts):
        if i64_at(s.kept)[key] == FORMER:
            i64_at(s.kept)[key] = 0
    _forget_shortlists(state)
    return 0


@jit
def _forget_shortlists(state: int) -> None:
    s = record(state, STATE)
    for which in range(s.classes):
        record(class_at(i64_at(s.pools)[0], which), CLASS).least_at = NONE


CODES = (
    *(BEGIN, PIN_ALL, PIN, HOLD, ACQUIRE, UNPIN, RESERVE, ARRIVE, FAIL, WITHDRAW, KEEP, FORGET_FORMER),
    *(REMOVE_EXTENT, ADD_EXTENT, GIVE),
)

"""Compiled operations of residency. Each is one whole change, made while its caller holds the GIL, which is the lock.

An operation takes a few microseconds. Releasing the GIL for that long costs more: another Python thread may take it
and keep it for 5 ms. A second lock would be worse: its holder can lose the GIL, and the compute thread waits for both.
Figures: tools/bench/results/residency.md. `request` is the address of a REQUEST record, `pool` of a POOL record.
"""

from __future__ import annotations

import numpy as np

from edgemoe.experts.tiers.eviction import claim_slot_below, claim_slots, class_at, drop_load, free_slot, needs_ranks
from edgemoe.experts.tiers.residency_records import (
    CLASS,
    NONE,
    NVME,
    POOL,
    RAM,
    REQUEST,
    STATE,
    TRANSIENT,
    UNUSED,
)
from edgemoe.jit.intrinsics import INT, f32_at, i64_at, jit, record, u8_at
from edgemoe.jit.object_cache import code


@jit
def demand_flags(request: int, i: int) -> int:
    """Returns the flags that remain after a demand of expert i: TRANSIENT if only prefill needs it."""
    r = record(request, REQUEST)
    return TRANSIENT if r.marked and u8_at(r.prefill)[i] else 0


@jit
def size_class(request: int) -> int:
    """Returns the size class of the layer's experts."""
    r = record(request, REQUEST)
    return i64_at(record(r.state, STATE).class_of)[r.layer]  # type: ignore[no-any-return]


@jit
def begin_load(state: int, pool: int, slot: int, key: int, flags: int) -> None:
    """Begins a load of the expert into an empty slot, which it pins."""
    p = record(pool, POOL)
    i64_at(p.owner)[slot], i64_at(p.pins)[slot], i64_at(p.flags)[slot] = key, 1, flags
    i64_at(p.born)[slot], i64_at(p.coming)[key] = record(state, STATE).clock, slot
    i64_at(p.source)[slot], i64_at(p.cold)[slot], i64_at(p.demanded)[slot] = NONE, p.index == 0, 0


@jit
def join_load(request: int, pool: int, i: int, slot: int) -> None:
    """Adds the demand of expert i to the load in the slot, which it pins."""
    r, p = record(request, REQUEST), record(pool, POOL)
    i64_at(p.pins)[slot] += 1
    _promote(pool, slot)
    if r.ours:
        i64_at(p.flags)[slot] &= demand_flags(request, i)
    i64_at(record(r.state, STATE).served)[NVME if i64_at(p.cold)[slot] else RAM] += 1
    i64_at(r.slots)[i] = slot


@jit
def _promote(pool: int, slot: int) -> None:
    """Marks a load as demanded. A prefetch counts as promoted, once."""
    p = record(pool, POOL)
    is_hoped = (i64_at(p.flags)[slot] & UNUSED) * (1 - i64_at(p.demanded)[slot])
    record(class_at(pool, i64_at(p.class_of)[slot]), CLASS).promoted += is_hoped
    i64_at(p.demanded)[slot] = 1


@jit
def fetch_from_disk(request: int, pool: int, n: int) -> None:
    """Begins loads of the first `n` wanted experts into RAM, the fastest tier, as far as there is room."""
    r = record(request, REQUEST)
    for j in range(claim_slots(r.state, pool, size_class(request), n, r.ranks, r.taken)):
        i, slot = i64_at(r.wanted)[j], i64_at(r.taken)[j]
        begin_load(r.state, pool, slot, _key(request, i), demand_flags(request, i))
        join_load(request, pool, i, slot)
        _start(request, 0, i, slot, NONE)


@jit
def fetch_through_ram(request: int, pool: int, n: int) -> None:
    """Begins loads of the first `n` wanted experts into a device, as far as there is room.

    An expert in RAM is copied from there at once. Another one is read into RAM first; the copy waits for the read.
    Experts in RAM are the first to get a slot.
    """
    r = record(request, REQUEST)
    ram = i64_at(record(r.state, STATE).pools)[0]
    p = record(ram, POOL)
    in_ram = _sort_by_source(request, ram, n)
    for j in range(in_ram):
        i64_at(p.pins)[i64_at(p.where)[_key(request, i64_at(r.wanted)[j])]] += 1
    room, unread = claim_slots(r.state, pool, size_class(request), n, r.ranks, r.taken), 0
    for j in range(in_ram, room):
        unread += i64_at(p.coming)[_key(request, i64_at(r.wanted)[j])] < 0
    reads, read, used = claim_slots(r.state, ram, size_class(request), unread, r.ram_ranks, r.reads), 0, 0
    for j in range(n):
        i = i64_at(r.wanted)[j]
        key = _key(request, i)
        source, coming = i64_at(p.where)[key], i64_at(p.coming)[key]
        if used == room or (source < 0 and coming < 0 and read == reads):
            if source >= 0:
                i64_at(p.pins)[source] -= 1
            continue
        if source < 0 and coming < 0:
            coming = i64_at(r.reads)[read]
            read += 1
            begin_load(r.state, ram, coming, key, demand_flags(request, i))
            _start(request, 0, i, coming, NONE)
        _copy(request, pool, i, i64_at(r.taken)[used], source, coming)
        used += 1
    for j in range(used, room):
        free_slot(pool, i64_at(r.taken)[j])


@jit
def _copy(request: int, pool: int, i: int, slot: int, source: int, coming: int) -> None:
    """Begins the copy of expert i from RAM slot `source`, or, without one, from slot `coming` after its read."""
    r, top = record(request, REQUEST), record(pool, POOL)
    ram = i64_at(record(r.state, STATE).pools)[0]
    p = record(ram, POOL)
    begin_load(r.state, pool, slot, _key(request, i), demand_flags(request, i))
    if source >= 0:
        i64_at(top.source)[slot] = source
        _start(request, r.pool, i, slot, source)
    else:
        _promote(ram, coming)
        i64_at(top.cold)[slot] = 1
    if r.ours:
        i64_at(p.flags)[source if source >= 0 else coming] &= demand_flags(request, i)
    join_load(request, pool, i, slot)


@jit
def _sort_by_source(request: int, ram: int, n: int) -> int:
    """Moves the wanted experts that are in RAM to the front, in order. Returns their number."""
    r, p, first, others = record(request, REQUEST), record(ram, POOL), 0, 0
    wanted, rest = i64_at(r.wanted), i64_at(r.reads)
    for j in range(n):
        if i64_at(p.where)[_key(request, wanted[j])] >= 0:
            wanted[first] = wanted[j]
            first += 1
        else:
            rest[others] = wanted[j]
            others += 1
    for j in range(others):
        wanted[first + j] = rest[j]
    return first


@jit
def _start(request: int, pool: int, i: int, slot: int, source: int) -> None:
    """Adds a load that can start now to the results."""
    r = record(request, REQUEST)
    row = i64_at(r.starts + 32 * r.start_count)
    row[0], row[1], row[2], row[3] = pool, i64_at(r.ids)[i], slot, source
    r.start_count += 1


@jit
def _key(request: int, i: int) -> int:
    """Returns the key of expert i of the request."""
    r = record(request, REQUEST)
    return r.layer * record(r.state, STATE).experts + i64_at(r.ids)[i]  # type: ignore[no-any-return]


RANKS, RAM_RANKS = 1, 2  # bits: the ranks that ACQUIRE asks for
ASKS = -2  # RESERVE asks for ranks


@code(INT, INT, result=INT)
def BEGIN_LAYER(state: int, layer: int) -> int:
    """Begins a layer-step of a layer: advances the clock."""
    s = record(state, STATE)
    s.clock += 1
    s.layer = layer
    i64_at(s.visited)[layer] = s.clock
    return s.clock  # type: ignore[no-any-return]


@code(INT, INT, INT, INT, result=INT)
def COUNT_STEP(state: int, pool: int, needed: int, outside: int) -> int:
    """Counts a step of all layers that decoded without `ACQUIRE`. Returns the clock.

    It demanded the experts `needed` [L * E] uint8. Experts that are also in `outside` were read from RAM, the others
    from the pool.
    """
    s = record(state, STATE)
    ram, top = record(i64_at(s.pools)[0], POOL), record(i64_at(s.pools)[pool], POOL)
    for layer in range(s.layers):
        s.clock += 1
        s.layer = layer
        i64_at(s.visited)[layer] = s.clock
        for key in range(layer * s.experts, (layer + 1) * s.experts):
            if u8_at(needed)[key] == 0:
                continue
            here = ram if u8_at(outside)[key] else top
            i64_at(s.served)[here.tier] += 1
            slot = i64_at(here.where)[key]
            if slot >= 0:
                i64_at(here.flags)[slot] = 0
    s.changes += 1
    return s.clock  # type: ignore[no-any-return]


@code(INT, result=INT)
def PIN_ALL(request: int) -> int:
    """Begins a layer-step of ours, and pins the experts if all are in the pool. Returns 1 if they are."""
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
    """Pins the experts that are in the pool. Returns their number."""
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
def PIN_IN_RAM(state: int, key: int) -> int:
    """Pins an expert in RAM. Returns its slot; NONE if it is not there."""
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

    Returns 0; or, with nothing changed, the ranks it needs: RANKS, RAM_RANKS, or both.
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
            join_load(request, pool, i, coming)
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
        i64_at(p.flags)[slot] &= demand_flags(request, i)
    i64_at(record(r.state, STATE).served)[p.tier] += 1


@code(INT, result=INT)
def UNPIN(request: int) -> int:
    """Drops one pin of each of the distinct slots of the pool. An unpinned slot of a failed load becomes free."""
    r = record(request, REQUEST)
    s, pool = record(r.state, STATE), i64_at(record(r.state, STATE).pools)[r.pool]
    p = record(pool, POOL)
    for i in range(r.count):
        slot = i64_at(r.slots)[i]
        i64_at(p.pins)[slot] -= 1
        if i64_at(p.pins)[slot] == 0 and i64_at(p.owner)[slot] == NONE:
            free_slot(pool, slot)
            p.orphans -= 1
    s.changes += 1
    s.version += 1
    return r.count  # type: ignore[no-any-return]


@code(INT, result=INT)
def RESERVE(request: int) -> int:
    """Begins the load of a prefetch request. Returns its slot; NONE if refused; ASKS to ask for `ranks`.

    If the utility is no number, the expert's current rank takes its place.
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
    slot = claim_slot_below(r.state, pool, size_class(request), utility, r.ranks)
    if slot < 0:
        if source >= 0:
            i64_at(ram.pins)[source] -= 1
        return NONE
    begin_load(r.state, pool, slot, key, r.flags)
    i64_at(p.source)[slot], f32_at(p.utility)[slot] = source, score
    return slot  # type: ignore[no-any-return]


@code(INT, INT, INT, result=INT)
def ARRIVE(state: int, pool: int, slot: int) -> int:
    """Makes the expert of an ended load resident, and pins the RAM slot for the copy that waits for it.

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
    """Drops a failed load, and the copy that waits for it. Their slots become free at the last unpin.

    Returns the same as ARRIVE.
    """
    s = record(state, STATE)
    p = record(i64_at(s.pools)[pool], POOL)
    key, demanded = i64_at(p.owner)[slot], i64_at(p.demanded)[slot]
    copy = _waiting_copy(state, pool, key)
    drop_load(i64_at(s.pools)[pool], slot)
    if copy >= 0:
        drop_load(i64_at(s.pools)[1 + i64_at(s.device_of)[key]], copy)
    s.changes += 1
    s.version += 1
    return 2 * (copy + 1) + demanded  # type: ignore[no-any-return]


@code(INT, INT, INT, result=INT)
def WITHDRAW(state: int, pool: int, slot: int) -> int:
    """Drops a prefetch to a device unless it is demanded. Returns 1 if dropped."""
    s = record(state, STATE)
    p = record(i64_at(s.pools)[pool], POOL)
    if i64_at(p.demanded)[slot]:
        return 0
    record(class_at(i64_at(s.pools)[pool], i64_at(p.class_of)[slot]), CLASS).withdrawn += 1
    drop_load(i64_at(s.pools)[pool], slot)
    s.changes += 1
    s.version += 1
    return 1


@jit
def _waiting_copy(state: int, pool: int, key: int) -> int:
    """Returns the device slot of the copy that waits for a read into RAM; NONE if there is none."""
    s = record(state, STATE)
    if pool != 0 or s.devices == 0:
        return NONE
    top = record(i64_at(s.pools)[1 + i64_at(s.device_of)[key]], POOL)
    copy = i64_at(top.coming)[key]
    return copy if copy >= 0 and i64_at(top.source)[copy] == NONE else NONE


CODES = (*(BEGIN_LAYER, COUNT_STEP, PIN_ALL, PIN, PIN_IN_RAM, ACQUIRE, UNPIN, RESERVE, ARRIVE, FAIL, WITHDRAW),)

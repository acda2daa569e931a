"""Places the loads of experts that are demanded and absent: into RAM, or through RAM into a device.

Compiled; `request` is the address of a REQUEST record, `wanted` in it the places of the absent experts among its own.
"""

from __future__ import annotations

from edgemoe.experts.tiers.eviction import class_at, release, take
from edgemoe.experts.tiers.records import CLASS, NONE, NVME, POOL, RAM, REQUEST, STATE, TRANSIENT, UNUSED
from edgemoe.jit.intrinsics import i64_at, jit, record, u8_at


@jit
def mark(request: int, i: int) -> int:
    """Returns the flags that a demand of expert i leaves: TRANSIENT where only prefill needs it."""
    r = record(request, REQUEST)
    return TRANSIENT if r.marked and u8_at(r.prefill)[i] else 0


@jit
def size_class(request: int) -> int:
    """Returns the size class of the layer's experts."""
    r = record(request, REQUEST)
    return i64_at(record(r.state, STATE).class_of)[r.layer]  # type: ignore[no-any-return]


@jit
def place(state: int, pool: int, slot: int, key: int, flags: int) -> None:
    """Begins a load of the expert into an empty slot, which it pins."""
    p = record(pool, POOL)
    i64_at(p.owner)[slot], i64_at(p.pins)[slot], i64_at(p.flags)[slot] = key, 1, flags
    i64_at(p.born)[slot], i64_at(p.coming)[key] = record(state, STATE).clock, slot
    i64_at(p.source)[slot], i64_at(p.cold)[slot], i64_at(p.demanded)[slot] = NONE, p.index == 0, 0


@jit
def join(request: int, pool: int, i: int, slot: int) -> None:
    """Adds the demand of expert i to the load in the slot, which it pins."""
    r, p = record(request, REQUEST), record(pool, POOL)
    i64_at(p.pins)[slot] += 1
    _promote(pool, slot)
    if r.ours:
        i64_at(p.flags)[slot] &= mark(request, i)
    i64_at(record(r.state, STATE).served)[NVME if i64_at(p.cold)[slot] else RAM] += 1
    i64_at(r.slots)[i] = slot


@jit
def _promote(pool: int, slot: int) -> None:
    """Makes a load a demanded one. A prefetch counts as promoted, once."""
    p = record(pool, POOL)
    is_hoped = (i64_at(p.flags)[slot] & UNUSED) * (1 - i64_at(p.demanded)[slot])
    record(class_at(pool, i64_at(p.class_of)[slot]), CLASS).promoted += is_hoped
    i64_at(p.demanded)[slot] = 1


@jit
def fetch_from_disk(request: int, pool: int, n: int) -> None:
    """Places loads of the first `n` wanted experts into RAM, which is the fastest tier, as far as there is room."""
    r = record(request, REQUEST)
    for j in range(take(r.state, pool, size_class(request), n, r.ranks, r.taken)):
        i, slot = i64_at(r.wanted)[j], i64_at(r.taken)[j]
        place(r.state, pool, slot, _key(request, i), mark(request, i))
        join(request, pool, i, slot)
        _start(request, 0, i, slot, NONE)


@jit
def fetch_through_ram(request: int, pool: int, n: int) -> None:
    """Places loads of the first `n` wanted experts into a device, as far as there is room.

    An expert in RAM is copied from there at once. Another one is read into RAM first; the copy waits for the read.
    Experts in RAM are the first to get a slot.
    """
    r = record(request, REQUEST)
    ram = i64_at(record(r.state, STATE).pools)[0]
    p = record(ram, POOL)
    in_ram = _sort_by_source(request, ram, n)
    for j in range(in_ram):
        i64_at(p.pins)[i64_at(p.where)[_key(request, i64_at(r.wanted)[j])]] += 1
    room, unread = take(r.state, pool, size_class(request), n, r.ranks, r.taken), 0
    for j in range(in_ram, room):
        unread += i64_at(p.coming)[_key(request, i64_at(r.wanted)[j])] < 0
    reads, read, used = take(r.state, ram, size_class(request), unread, r.ram_ranks, r.reads), 0, 0
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
            place(r.state, ram, coming, key, mark(request, i))
            _start(request, 0, i, coming, NONE)
        _copy(request, pool, i, i64_at(r.taken)[used], source, coming)
        used += 1
    for j in range(used, room):
        release(pool, i64_at(r.taken)[j])


@jit
def _copy(request: int, pool: int, i: int, slot: int, source: int, coming: int) -> None:
    """Places the copy of expert i: from the slot `source` of RAM, or, without one, from where it is `coming` to."""
    r, top = record(request, REQUEST), record(pool, POOL)
    ram = i64_at(record(r.state, STATE).pools)[0]
    p = record(ram, POOL)
    place(r.state, pool, slot, _key(request, i), mark(request, i))
    if source >= 0:
        i64_at(top.source)[slot] = source
        _start(request, r.pool, i, slot, source)
    else:
        _promote(ram, coming)
        i64_at(top.cold)[slot] = 1
    if r.ours:
        i64_at(p.flags)[source if source >= 0 else coming] &= mark(request, i)
    join(request, pool, i, slot)


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
    """Notes a load that can start now."""
    r = record(request, REQUEST)
    row = i64_at(r.starts + 32 * r.start_count)
    row[0], row[1], row[2], row[3] = pool, i64_at(r.ids)[i], slot, source
    r.start_count += 1


@jit
def _key(request: int, i: int) -> int:
    """Returns the key of expert i of the request."""
    r = record(request, REQUEST)
    return r.layer * record(r.state, STATE).experts + i64_at(r.ids)[i]  # type: ignore[no-any-return]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.model_memory import MemoryHolder, ModelMemory, models_to_unload, total_of

ROOM = ModelMemory(10, 10)


def held(name: str, ram: int, used_s: float = 0.0, *, vram: int = 0, is_unloadable: bool = True) -> MemoryHolder:
    return MemoryHolder(name, ModelMemory(ram, vram), used_s, is_unloadable)


@pytest.mark.parametrize(
    ("wanted", "holders", "gone"),
    [
        (ModelMemory(10), [], []),
        (ModelMemory(11), [], None),
        (ModelMemory(4), [held("a", 3), held("b", 3)], []),
        (ModelMemory(5), [held("a", 3, 2.0), held("b", 3, 1.0)], ["b"]),
        (ModelMemory(5), [held("a", 3, 2.0), held("b", 3, 1.0, is_unloadable=False)], ["a"]),
        (ModelMemory(5), [held("a", 6, is_unloadable=False)], None),
        (ModelMemory(10), [held("a", 3, 2.0), held("b", 3, 1.0)], ["b", "a"]),
        (ModelMemory(9), [held("small", 1, 1.0), held("large", 9, 2.0)], ["large"]),
        (ModelMemory(1, 8), [held("a", 1, 1.0), held("b", 1, 2.0, vram=4)], ["b"]),
    ],
)
def test_the_least_recently_used_idle_models_make_room(
    wanted: ModelMemory, holders: list[MemoryHolder], gone: list[str] | None
) -> None:
    assert models_to_unload(wanted, ROOM, holders) == gone


HOLDERS = st.lists(
    st.builds(held, st.uuids().map(str), st.integers(0, 10), st.floats(0, 9), is_unloadable=st.booleans())
)


@given(st.integers(0, 12), HOLDERS)
def test_as_few_go_as_make_room_and_none_that_has_to_stay(wanted: int, holders: list[MemoryHolder]) -> None:
    gone = models_to_unload(ModelMemory(wanted), ROOM, holders)
    stays = [holder for holder in holders if not holder.is_unloadable]
    if gone is None:
        assert total_of(stays).ram_bytes + wanted > ROOM.ram_bytes
        return
    kept = [holder for holder in holders if holder.name not in gone]
    free = ROOM.ram_bytes - total_of(kept).ram_bytes - wanted
    assert free >= 0 or not gone
    assert all(holder in kept for holder in stays)
    assert all(holder.memory.ram_bytes > free for holder in holders if holder.name in gone)

"""What a front remembers of prompts' experts, by whom it takes them for alike."""

from __future__ import annotations

from collections.abc import Iterable

from edgemoe.front.requests.prefix_keys import PrefixKeys
from edgemoe.front.requests.signatures import ENTRY_BYTES, MAX_BYTES, Signatures
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Request, Sampling

KEYS = PrefixKeys()


def prefix(prompt: Iterable[int]) -> bytes:
    return KEYS.prefix(Request(id="r", prompt=tuple(prompt), sampling=Sampling(), seed=1))


FIRST = prefix(range(200))  # a turn
NEXT = prefix(range(500))  # the one after it
OTHER = prefix([*range(64), *range(900, 1200)])  # of another conversation with the same opening


def table(mark: int, size: int = 8) -> ExpertSignature:
    return ExpertSignature(10, bytes([mark]) * size)


def test_a_conversations_next_turn_is_taken_for_the_one_before_whoever_asks() -> None:
    known = Signatures(KEYS)
    known.note(7, FIRST, table(1))
    known.note(9, OTHER, table(2))
    assert known.of(9, NEXT) == table(1)
    assert known.of(0, NEXT) == table(1)


def test_another_prompt_is_taken_for_its_users_last_and_an_opening_alone_says_nothing() -> None:
    known = Signatures(KEYS)
    known.note(7, FIRST, table(1))
    known.note(7, b"", table(3))
    assert known.of(7, OTHER) == table(3)
    assert known.of(8, OTHER) is None
    assert known.of(0, b"") is None


def test_what_is_remembered_is_bounded_and_the_longest_unused_goes_first() -> None:
    known, size = Signatures(KEYS), MAX_BYTES // 4 - ENTRY_BYTES
    for user in range(1, 5):
        known.note(user, b"", table(user, size))
    assert known.of(1, b"") == table(1, size)
    known.note(5, b"", table(5, size))
    assert [user for user in range(1, 6) if known.of(user, b"")] == [1, 3, 4, 5]
    known.note(5, b"", table(6, size))
    assert known.of(5, b"") == table(6, size)
    assert known.of(3, b"")
    known.note(1, b"", table(1, MAX_BYTES - ENTRY_BYTES))
    assert known.of(1, b"")
    assert known.of(5, b"") is None


def test_tables_of_nothing_take_room_too() -> None:
    known, room = Signatures(KEYS), MAX_BYTES // ENTRY_BYTES
    for user in range(1, room + 2):
        known.note(user, b"", table(1, 0))
    assert [user for user in (1, 2, room + 1) if known.of(user, b"")] == [2, room + 1]


def test_another_secret_makes_all_of_it_unknown() -> None:
    keys = PrefixKeys()
    known = Signatures(keys)
    known.note(7, b"", table(1))
    keys.secret = bytes(16)
    assert known.of(7, b"") is None
    known.note(7, b"", table(2))
    assert known.of(7, b"") == table(2)

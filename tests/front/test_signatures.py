"""A front's memory of prompts' experts, and the prompts that it regards as similar."""

from __future__ import annotations

from collections.abc import Iterable

from edgemoe.front.prompt_hints import ENTRY_BYTES, MAX_SIGNATURE_BYTES, PrefixKeys, PromptSignatures
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Request, Sampling

KEYS = PrefixKeys()


def by(user: int, prompt: Iterable[int] = ()) -> Request:
    """Builds a request of that user; of no user, if that is 0."""
    return Request(id="r", prompt=tuple(prompt), sampling=Sampling(), seed=1, user=str(user) if user else "")


FIRST = range(200)  # a turn
NEXT = range(500)  # the one after it
OTHER = [*range(64), *range(900, 1200)]  # of another conversation with the same opening


def table(mark: int, size: int = 8) -> ExpertSignature:
    return ExpertSignature(10, bytes([mark]) * size)


def test_a_conversations_next_turn_resembles_the_one_before_for_any_user() -> None:
    known = PromptSignatures(KEYS)
    known.note(by(7, FIRST), table(1))
    known.note(by(9, OTHER), table(2))
    assert known.of(by(9, NEXT)) == table(1)
    assert known.of(by(0, NEXT)) == table(1)


def test_another_prompt_is_taken_for_its_users_last_and_an_opening_alone_says_nothing() -> None:
    known = PromptSignatures(KEYS)
    known.note(by(7, FIRST), table(1))
    known.note(by(7), table(3))
    assert known.of(by(7, OTHER)) == table(3)
    assert known.of(by(8, OTHER)) is None
    assert known.of(by(0)) is None


def test_memory_is_bounded_and_the_longest_unused_entry_goes_first() -> None:
    known, size = PromptSignatures(KEYS), MAX_SIGNATURE_BYTES // 4 - ENTRY_BYTES
    for user in range(1, 5):
        known.note(by(user), table(user, size))
    assert known.of(by(1)) == table(1, size)
    known.note(by(5), table(5, size))
    assert [user for user in range(1, 6) if known.of(by(user))] == [1, 3, 4, 5]
    known.note(by(5), table(6, size))
    assert known.of(by(5)) == table(6, size)
    assert known.of(by(3))
    known.note(by(1), table(1, MAX_SIGNATURE_BYTES - ENTRY_BYTES))
    assert known.of(by(1))
    assert known.of(by(5)) is None


def test_tables_of_nothing_take_room_too() -> None:
    known, room = PromptSignatures(KEYS), MAX_SIGNATURE_BYTES // ENTRY_BYTES
    for user in range(1, room + 2):
        known.note(by(user), table(1, 0))
    assert [user for user in (1, 2, room + 1) if known.of(by(user))] == [2, room + 1]


def test_another_secret_makes_all_of_it_unknown() -> None:
    keys = PrefixKeys()
    known = PromptSignatures(keys)
    known.note(by(7), table(1))
    keys.secret = bytes(16)
    assert known.of(by(7)) is None
    known.note(by(7), table(2))
    assert known.of(by(7)) == table(2)

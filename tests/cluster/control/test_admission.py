"""Boxes let in by this box's list, and by the lists of boxes on it."""

from __future__ import annotations

import msgspec
import pytest
from support.boxes import secret

from edgemoe.cluster.control.admission import fill_addresses, is_same_box, read_seeds, select_peers
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.types.bounds import MAX_NODES

KEYS = [secret().public.decode() for _ in range(4)]
B = Peer("b", "192.0.2.2:1", KEYS[0], vouches=True)
C = Peer("c", "192.0.2.3:1", KEYS[1], voter=False)
D = Peer("d", "192.0.2.4:1", KEYS[2], voter=False)
LISTED = {"b": B}
SILENT = {"b": B.to_announce}


def test_only_the_word_of_a_box_that_this_one_lists_lets_others_in() -> None:
    vouched = {"b": (B, C), "c": (D,), "nobody": (D,)}
    assert select_peers("a", LISTED, vouched, joining=False) == {"b": B, "c": C}


def test_no_word_lets_anybody_in_unless_the_list_says_so() -> None:
    assert select_peers("a", SILENT, {"b": (C,)}, joining=False) == SILENT


def test_a_word_makes_nobody_trusted_or_vouching() -> None:
    praised = msgspec.structs.replace(C, trusted=True, vouches=True)
    for listed, joining in ((LISTED, False), (SILENT, True)):
        assert select_peers("a", listed, {"b": (praised,)}, joining=joining) == listed | {"c": C}


def test_this_box_s_opinion_of_others_is_not_announced_and_changing_it_cuts_nobody_off() -> None:
    assert fill_addresses(LISTED, {}) == (B.to_announce,)
    assert is_same_box(B.to_announce, B)
    assert is_same_box(msgspec.structs.replace(B, trusted=True), B)
    assert is_same_box(msgspec.structs.replace(B, voter=False), B)
    assert not is_same_box(msgspec.structs.replace(B, key=KEYS[1]), B)


@pytest.mark.parametrize(
    "wrong",
    [
        {"voter": True},
        {"node": "a"},
        {"node": "b"},
        {"node": "not a name"},
        {"address": ""},
        {"address": "nowhere"},
        {"key": KEYS[0]},
        {"new_key": KEYS[0]},
        {"key": "short"},
    ],
    ids=lambda wrong: " ".join(f"{name}={value}" for name, value in wrong.items()).replace(
        KEYS[0], "a key that is there"
    ),
)
def test_nobody_is_let_in_by_anothers_word_who_votes_is_known_already_or_cannot_be(wrong: dict[str, object]) -> None:
    other = msgspec.structs.replace(C, **wrong)
    assert select_peers("a", LISTED, {"b": (other, D)}, joining=False) == {"b": B, "d": D}


def test_a_joining_box_adopts_the_voters_of_the_box_that_it_joins() -> None:
    voter = msgspec.structs.replace(C, voter=True)
    assert select_peers("a", SILENT, {"b": (voter,)}, joining=True) == SILENT | {"c": voter}


def test_no_word_lets_in_more_boxes_than_there_may_be() -> None:
    many = tuple(msgspec.structs.replace(C, node=f"n{n}", key=secret().public.decode()) for n in range(MAX_NODES))
    found = select_peers("a", LISTED, {"b": many}, joining=False)
    assert [*found] == ["b", *(f"n{n}" for n in range(MAX_NODES - 2))]


def test_a_joining_box_goes_by_the_words_of_boxes_that_its_seeds_list() -> None:
    words = {"b": (C,), "c": (D,), "nobody": (msgspec.structs.replace(D, node="e", key="e" * 40),)}
    assert select_peers("a", LISTED, words, joining=True) == {"b": B, "c": C, "d": D}


def test_several_seeds_are_named_in_one_setting() -> None:
    text = f"b,192.0.2.2:1,{KEYS[0]} c,192.0.2.3:1,{KEYS[1]}"
    assert read_seeds(text) == {"b": B.to_announce, "c": msgspec.structs.replace(C, voter=True)}

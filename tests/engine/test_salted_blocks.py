"""No request finds blocks under another salt, whether they were computed, fetched, parked or handed over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engine_kit import Drive, Model, plain_model, prompt
from support.states_kit import stateful_model

from edgemoe.types.step import EntryKind

LENGTH, TOKENS = 70, 24  # four whole blocks
TEXT = prompt(LENGTH, 1, 96)
BOB, MALLORY = b"b" * 16, b"m" * 16
SALTS = [(BOB, BOB, True), (b"", b"", True), (BOB, MALLORY, False), (BOB, b"", False), (b"", MALLORY, False)]


@pytest.fixture(params=[plain_model, stateful_model])
def model(request: pytest.FixtureRequest) -> Callable[[], Model]:
    made: Callable[[], Model] = request.param
    return made


def answered(drive: Drive, name: str, salt: bytes, emitted: list[int] | None = None) -> int:
    """Runs a request; returns the cached tokens of its prompt, as the client gets the number."""
    drive.submit(TEXT, name, salt=salt, principal=name, user=name, emitted=emitted or (), max_tokens=TOKENS)
    drive.run()
    return sum(one.cached_tokens for one in drive.emitted if one.request == name)


def copied(source: Drive, target: Drive, salt: bytes) -> int:
    """Copies blocks from another engine by this salt's keys. Returns the number of blocks that arrived."""
    giving, taking = source.engine.prefixes, target.engine.prefixes
    keys = taking.keys(TEXT, salt)
    for n, key in enumerate(keys):
        entry = giving.read(key, EntryKind.BLOCK)
        if entry is None or not taking.take_in(keys[: n + 1], entry.data, EntryKind.BLOCK):
            break
    for n in taking.needed_windows(taking.known(keys)):
        if (window := giving.read(keys[n], EntryKind.WINDOW)) is not None:
            assert taking.take_in(keys[: n + 1], window.data, EntryKind.WINDOW)
    if (state := giving.read(keys[-1], EntryKind.STATE)) is not None:
        assert taking.take_in(keys, state.data, EntryKind.STATE)
    return taking.known(keys)


@pytest.mark.parametrize(("theirs", "ours", "found"), SALTS)
def test_computed_blocks_are_found_by_their_salt_alone(
    model: Callable[[], Model], theirs: bytes, ours: bytes, found: bool
) -> None:
    drive = Drive(model=model())
    assert answered(drive, "first", theirs) == 0
    assert (drive.engine.prefixes.signature(TEXT, ours)[0] > 0) == found, "what is told to routing, too"
    assert (answered(drive, "next", ours) > 0) == found
    assert drive.tokens("next") == drive.tokens("first")


@pytest.mark.parametrize(("theirs", "ours", "found"), SALTS)
def test_fetched_blocks_are_found_by_their_salt_alone(
    model: Callable[[], Model], theirs: bytes, ours: bytes, found: bool
) -> None:
    source, target = Drive(model=model()), Drive(model=model())
    answered(source, "first", theirs)
    assert (copied(source, target, ours) > 0) == found, "asked by another salt it has nothing"
    assert copied(source, target, theirs) == 4
    assert (answered(target, "next", ours, source.tokens("first")[:7]) > 0) == found


@pytest.mark.parametrize("way", ["park", "recompute"])
@pytest.mark.parametrize(("theirs", "ours", "found"), SALTS)
def test_parked_blocks_are_found_by_their_salt_alone(way: str, theirs: bytes, ours: bytes, found: bool) -> None:
    drive = Drive(blocks=8, output_reserve=0.0, preemption=way)
    drive.submit(TEXT, "first", salt=theirs, principal="p", user="p", max_tokens=30)
    drive.submit(prompt(20, 2, 96), "other", salt=b"o", principal="o", user="o", max_tokens=60)
    drive.run()
    assert drive.engine.scheduler.paused_total.total() > 0
    hit = answered(drive, "next", ours)
    assert found or hit == 0


@pytest.mark.parametrize(("theirs", "ours", "found"), SALTS)
def test_a_replay_after_an_engines_death_finds_its_own_salt_alone(
    model: Callable[[], Model], theirs: bytes, ours: bytes, found: bool
) -> None:
    before = Drive(model=model())
    answered(before, "dies", theirs)
    whole, after = before.tokens("dies"), Drive(model=model())
    assert answered(after, "again", theirs, whole[:9]) == 0, "the new engine has nothing"
    assert after.tokens("again") == whole[9:]
    assert (answered(after, "next", ours) > 0) == found


@pytest.mark.parametrize("own_tokens", [0, 33])
def test_blocks_that_were_fetched_for_one_request_and_those_behind_them_serve_no_other(
    model: Callable[[], Model], own_tokens: int
) -> None:
    """The leading blocks that this engine had computed by itself stay shared."""
    source, target, clean = (Drive(model=model()) for _ in range(3))
    answered(source, "first", BOB)
    answered(clean, "first", BOB)
    if own_tokens:
        target.submit(TEXT[:own_tokens], "own", salt=BOB, max_tokens=1)
        target.run()
    giving, taking = source.engine.prefixes, target.engine.prefixes
    shared, kept = taking.keys(TEXT, BOB), taking.private_keys(TEXT, BOB, b"only for this one")
    own = taking.known(kept)
    assert shared[:own] == kept[:own]
    assert set(shared[own:]).isdisjoint(kept[own:])
    for n in range(own, len(shared)):
        entry = giving.read(shared[n], EntryKind.BLOCK)
        assert entry is not None
        assert taking.take_in(kept[: n + 1], entry.data, EntryKind.BLOCK)
    if (state := giving.read(shared[-1], EntryKind.STATE)) is not None:
        assert taking.take_in(kept, state.data, EntryKind.STATE)
    target.submit(TEXT, "it", salt=BOB, private_salt=b"only for this one", max_tokens=TOKENS)
    target.run()
    hits = {one.cached_tokens for one in target.emitted if one.request == "it"}
    assert max(hits) == 64
    assert answered(target, "another", BOB) <= own * 16
    assert target.tokens("it") == target.tokens("another") == clean.tokens("first")
    whole = [*TEXT, *target.tokens("it")]
    assert taking.known(taking.keys(whole, BOB)) > 4, "the other request's own blocks are shared"
    assert not set(taking.keys(whole, BOB)[own:]) & set(kept)


def test_two_principals_that_ask_the_same_at_once_each_compute_it() -> None:
    drive = Drive()
    for name, salt in (("b", BOB), ("m", MALLORY)):
        drive.submit(TEXT, name, salt=salt, principal=name, user=name)
    drive.run()
    assert drive.engine.scheduler.prefix_tokens == {"miss": 2 * LENGTH, "hit": 0}
    assert drive.tokens("b") == drive.tokens("m")

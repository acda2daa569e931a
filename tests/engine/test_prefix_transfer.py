"""Blocks and states of one engine's prefix cache in another: the same tokens at any cut, and no block held
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engine_kit import Drive, Model, plain_model, prompt
from support.kv_kinds import KV_KINDS, kv_kind

from edgemoe.types.step import EntryKind

LENGTH, TOKENS = 70, 24  # four whole blocks


@pytest.fixture(scope="module", params=KV_KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Model]]:
    with kv_kind(request.param, tmp_path_factory.mktemp("kv")) as make:
        yield make


def asked(model: Model, name: str = "r", emitted: list[int] | None = None, drive: Drive | None = None) -> Drive:
    """Returns an engine that has answered the prompt, or has continued the answer after the tokens `emitted`."""
    drive = drive or Drive(model=model)
    drive.submit(prompt(LENGTH, 1, 96), name, emitted=emitted or (), max_tokens=TOKENS)
    drive.run()
    return drive


def hand_over(source: Drive, target: Drive, blocks: int = 4) -> int:
    """Copies `blocks` leading blocks, and window and state if there are such. Returns how many blocks arrived."""
    giving, taking = source.engine.prefixes, target.engine.prefixes
    keys = taking.keys(prompt(LENGTH, 1, 96), b"")[:blocks]
    for n in range(len(keys)):
        entry = giving.read(keys[n], EntryKind.BLOCK)
        if entry is None or not taking.take_in(keys[: n + 1], entry.data, EntryKind.BLOCK):
            break
    for n in taking.needed_windows(taking.known(keys)):
        if (window := giving.read(keys[n], EntryKind.WINDOW)) is not None:
            assert taking.take_in(keys[: n + 1], window.data, EntryKind.WINDOW)
    if keys and (state := giving.read(keys[-1], EntryKind.STATE)) is not None:
        assert taking.take_in(keys, state.data, EntryKind.STATE)
    target.engine.check_integrity()
    return taking.known(keys)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (15, 0), (16, 0), (17, 1), (31, 1), (32, 1), (33, 2)])
def test_reusable_prefixes_are_whole_blocks_without_the_last_token(tokens: int, blocks: int) -> None:
    assert len(Drive(model=plain_model()).engine.prefixes.keys(prompt(tokens, 1, 96), b"")) == blocks


def test_the_tokens_are_the_same_after_a_hand_over_at_any_block_and_any_token(make: Callable[[], Model]) -> None:
    source = asked(make())
    whole = source.tokens()
    has_states = source.engine.prefixes.entry_bytes[EntryKind.STATE] > 0
    for blocks in range(5):
        for emitted in (0, 1, 17):
            target = Drive(model=make())
            assert hand_over(source, target, blocks) == blocks
            asked(target.model, "on", whole[:emitted], target)
            assert target.tokens("on") == whole[emitted:]
            reused = blocks * 16 if not has_states or blocks in (0, 4) else 0
            assert target.engine.scheduler.prefix_tokens["hit"] == reused
            assert target.engine.blocks.free == target.engine.blocks.count
    assert source.engine.blocks.free == source.engine.blocks.count


def test_signatures_come_with_the_blocks() -> None:
    source, target = asked(plain_model()), Drive()
    hand_over(source, target)
    for key in source.engine.prefixes.keys(prompt(LENGTH, 1, 96), b""):
        there, here = source.engine.blocks.find(key), target.engine.blocks.find(key)
        assert there is not None
        assert here is not None
        mine = target.engine.blocks.signatures[here[0]]
        np.testing.assert_array_equal(mine, source.engine.blocks.signatures[there[0]])
        assert mine.sum() == 16 * mine.shape[0] * 2


def test_a_block_whose_parent_is_not_here_is_not_taken_in() -> None:
    source, target = asked(plain_model()), Drive()
    keys = target.engine.prefixes.keys(prompt(LENGTH, 1, 96), b"")
    entry = source.engine.prefixes.read(keys[1], EntryKind.BLOCK)
    assert entry is not None
    assert not target.engine.prefixes.take_in(keys[:2], entry.data, EntryKind.BLOCK)
    assert target.engine.prefixes.known(keys) == 0
    assert target.engine.prefixes.read(keys[1], EntryKind.BLOCK) is None


def test_no_room_means_fewer_blocks_and_the_same_tokens(make: Callable[[], Model]) -> None:
    source = asked(make())
    target = Drive(model=make(), blocks=9)
    target.submit(prompt(100, 5, 96), "other", max_tokens=4)
    target.step()
    target.step()
    assert hand_over(source, target) < 4
    asked(target.model, "on", source.tokens()[:3], target)
    assert target.tokens("on") == source.tokens()[3:]
    assert target.engine.blocks.free == target.engine.blocks.count


def test_imported_blocks_are_reused_in_an_order_that_keeps_ancestors() -> None:
    """A chain loses its last blocks first, whichever request takes their memory."""
    source, target = asked(plain_model()), Drive(blocks=8)
    hand_over(source, target, 2)
    target.submit(prompt(60, 9), "other", max_tokens=1)
    target.run()
    hand_over(source, target, 4)
    keys = target.engine.prefixes.keys(prompt(LENGTH, 1, 96), b"")
    before = target.engine.prefixes.known(keys)
    for n in range(6):
        target.submit(prompt(17 + 5 * n, 20 + n), f"r{n}", max_tokens=1)
        target.run()
        here = [target.engine.blocks.find(key) is not None for key in keys]
        assert here == sorted(here, reverse=True)
    assert target.engine.prefixes.known(keys) < before


def test_a_copy_of_a_block_that_is_taken_meanwhile_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    source = asked(plain_model(), drive=Drive(blocks=8))
    (key, *_) = source.engine.prefixes.keys(prompt(LENGTH, 1, 96), b"")
    before = source.engine.prefixes.read(key, EntryKind.BLOCK)
    assert before is not None
    cache = source.engine.runner._model.kv
    gather = cache.gather

    def meanwhile(blocks: list[int]) -> object:
        copied = gather(blocks)
        source.submit(prompt(120, 9), "other", max_tokens=1)
        source.run()
        return copied

    monkeypatch.setattr(cache, "gather", meanwhile)
    assert source.engine.prefixes.read(key, EntryKind.BLOCK) is None
    monkeypatch.undo()
    asked(source.model, "again", drive=source)
    after = source.engine.prefixes.read(key, EntryKind.BLOCK)
    assert after is not None
    assert after.generation > before.generation


def test_another_model_or_encoding_has_another_digest(tmp_path: Path) -> None:
    digests = [Drive().engine.prefixes.encoding("b")]
    for kind in KV_KINDS:
        with kv_kind(kind, tmp_path / kind) as make:
            digests.append(Drive(model=make()).engine.prefixes.encoding("a"))
    assert len(set(digests)) == 1 + len(KV_KINDS)
    assert digests[1] == Drive().engine.prefixes.encoding("a")


def test_the_cached_part_of_a_prompt_has_the_signature_of_its_own_blocks(make: Callable[[], Model]) -> None:
    source, whole = asked(make()), prompt(LENGTH, 1, 96)
    blocks = source.engine.blocks
    rows = [found[0] for key in source.engine.prefixes.keys(whole, b"") if (found := blocks.find(key)) is not None]
    for cut, known in ((LENGTH, 4), (65, 4), (64, 3), (17, 1), (16, 0), (1, 0)):
        tokens, counts = source.engine.prefixes.signature(whole[:cut], b"")
        assert tokens == 16 * known
        np.testing.assert_array_equal(counts, blocks.signatures[rows[:known]].sum(axis=0, dtype=np.int64))
    other = [*whole[:40], 95 - whole[40], *whole[41:]]
    assert source.engine.prefixes.signature(other, b"")[0] == 32
    assert Drive(model=make()).engine.prefixes.signature(whole, b"")[0] == 0


def test_a_block_taken_for_others_while_signatures_are_summed_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = asked(plain_model(), drive=Drive(blocks=8))
    blocks, total = source.engine.blocks, source.engine.blocks.total

    def meanwhile(rows: list[int]) -> object:
        summed = total(rows)
        monkeypatch.undo()
        source.submit(prompt(120, 9), "other", max_tokens=1)
        source.run()
        return summed

    monkeypatch.setattr(blocks, "total", meanwhile)
    tokens, counts = source.engine.prefixes.signature(prompt(LENGTH, 1, 96), b"")
    assert (tokens, counts.sum()) == (0, 0)

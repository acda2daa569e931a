"""A short run of the fuzzers of files; `tools/fuzz` makes long ones."""

from __future__ import annotations

import pytest

from tools.fuzzing import fuzz_settings, gguf, recordings, store
from tools.fuzzing.__main__ import DOORS

COUNTS = {store: 120, fuzz_settings: 60, gguf: 300, recordings: 60}
PARTS = [(door, part) for door in COUNTS for part in door.WHATS]


@pytest.mark.parametrize(("door", "what"), PARTS, ids=[f"{door.__name__}-{part}" for door, part in PARTS])
def test_no_file_however_wrong_does_more_than_raise_our_errors(door: object, what: str) -> None:
    seen = door.fuzz(what, COUNTS[door], seed=1)  # type: ignore[attr-defined, index]
    assert seen["ok"], seen
    assert len(seen["outcomes"]) > 1


def test_every_fuzzer_can_be_called() -> None:
    assert {door.__name__ for door in COUNTS} <= set(DOORS.values())

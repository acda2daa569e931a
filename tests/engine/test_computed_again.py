"""Keys and values that may be wrong are computed again, and the prefix cache is emptied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engine_kit import Drive, Model, plain_model, prompt
from support.states_kit import stateful_model

from edgemoe.types.stages import CacheRoom
from edgemoe.types.step import BLOCK_TOKENS

TEXTS = [prompt(length, seed, 96) for seed, length in enumerate((5, 40, 70))]


def submit_all(drive: Drive, tag: str) -> None:
    for n, text in enumerate(TEXTS):
        drive.submit(text, f"{tag}{n}", max_tokens=30)


def poison(drive: Drive) -> None:
    cache = drive.engine.prefixes._kv
    cache.data.fill_(3.0)
    if cache.states is not None:
        cache.states.data[1:] = 3.0  # the first one is the beginning of all


@pytest.mark.parametrize("steps", [1, 4, 12])
@pytest.mark.parametrize("way", ["park", "recompute"])
@pytest.mark.parametrize("make", [plain_model, stateful_model])
def test_requests_go_on_with_their_tokens_and_nothing_wrong_is_found_again(
    make: Callable[[], Model], way: str, steps: int
) -> None:
    clean = Drive(model=make(), preemption=way)
    submit_all(clean, "r")
    clean.run()
    drive = Drive(model=make(), preemption=way)
    submit_all(drive, "cached")
    drive.run()
    submit_all(drive, "r")
    for _ in range(steps):
        drive.step()
    poison(drive)
    drive.engine.compute_again()
    drive.run()
    submit_all(drive, "next")
    drive.run()
    drive.engine.check_integrity()
    for n in range(len(TEXTS)):
        assert drive.tokens(f"r{n}") == clean.tokens(f"r{n}")
        assert drive.tokens(f"next{n}") == clean.tokens(f"r{n}")


@pytest.mark.parametrize("make", [plain_model, stateful_model])
def test_fewer_places_are_used_from_then_on_or_more_again(make: Callable[[], Model]) -> None:
    clean, drive = Drive(model=make()), Drive(model=make(), preemption="recompute")
    submit_all(clean, "r")
    clean.run()
    submit_all(drive, "r")
    drive.submit(prompt(200, 9, 96), "long", max_tokens=30)
    drive.submit(prompt(90, 9, 96), "longer", max_tokens=90)
    for _ in range(12):
        drive.step()
    few = CacheRoom(blocks=7, state_slots=5)
    drive.engine.compute_again(few)
    most = 0
    while drive.step():
        drive.engine.check_integrity()
        most = max(most, drive.engine.blocks.count - drive.engine.blocks.free)
    assert 0 < most <= drive.engine.blocks.count == 7
    for n in range(len(TEXTS)):
        assert drive.tokens(f"r{n}") == clean.tokens(f"r{n}")
    ends = {item.request: item for item in drive.emitted if item.finish}
    assert (ends["long"].finish, ends["long"].error_code) == ("error", "context_length_exceeded")
    assert (ends["longer"].finish, len(drive.tokens("longer"))) == ("length", 7 * BLOCK_TOKENS - 90)
    drive.engine.compute_again(CacheRoom())
    drive.submit(prompt(200, 9, 96), "long again", max_tokens=30)
    drive.run()
    assert len(drive.tokens("long again")) == 30

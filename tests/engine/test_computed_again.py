"""Keys and values that may be wrong are computed again, and the prefix cache is emptied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engine_kit import Drive, Model, plain_model, prompt
from support.states_kit import stateful_model

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

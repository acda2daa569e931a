"""Each attack of `tools/attack` against a daemon with the demo model: it lives, and its victim's tokens stay right.

Times are not asserted; `tools/attack` measures them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.attacking.attacked import Attacked, attacked_daemon
from tools.attacking.hostile_files import ATTACKS, attack
from tools.attacking.hostile_requests import REQUESTS, run
from tools.attacking.measuring import measure
from tools.attacking.with_key import KEYED
from tools.attacking.without_key import KEYLESS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TOKENS = 40
GROWTH_MB = 512.0  # of engine or front under one attack: 8 bodies of 8 MB, grammars, and steps of 512 tokens
REFUSALS = {"400", "401", "408", "413", "429"}


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    with attacked_daemon() as found:
        yield found


@pytest.mark.parametrize("attack", [*KEYED, *KEYLESS])
def test_a_daemon_outlives_an_attack_and_answers_its_victim(attacked: Attacked, attack: str) -> None:
    seen = measure(attack, attacked, rounds=1, tokens=TOKENS)
    assert (seen.wrong, seen.engines) == (0, 1)
    assert seen.engine_mb - seen.engine_before_mb < GROWTH_MB
    assert seen.front_mb < GROWTH_MB
    assert set(seen.answers) - {"connections", "closed"} <= {"200"} | REFUSALS


def test_single_odd_requests_are_answered_as_documented_and_tell_nothing_of_others(attacked: Attacked) -> None:
    assert not [told for told in run(attacked, list(REQUESTS)) if told.faults]


@pytest.mark.parametrize("name", ATTACKS)
def test_a_command_on_hostile_input_ends_in_time_by_a_plain_error(name: str) -> None:
    assert attack(name).fault == ""

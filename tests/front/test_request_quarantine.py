"""Requests that engines end with are refused when they come again; nobody else's are."""

from __future__ import annotations

import msgspec
import pytest

from edgemoe.errors import RequestQuarantined
from edgemoe.front.request_attempts import MAX_FATAL, MAX_REQUESTS, PRINCIPAL_S, REQUEST_S, RequestQuarantine
from edgemoe.types.request import Principal, Request, Sampling


class Quarantined:
    """A quarantine on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.table = RequestQuarantine(lambda: self.now_s)

    def refuses(self, request: Request) -> str:
        """Returns why the request is refused; "" if it is not."""
        self.table.check_integrity()
        why = ""
        try:
            self.table.check(request)
        except RequestQuarantined as error:
            why = str(error)
        return why


def asked(prompt: int, principal: str = "mallory", grammar: str | None = None, **fields: object) -> Request:
    sampling = Sampling(max_tokens=8, grammar=grammar)
    made = Request(id="r", prompt=(prompt,), sampling=sampling, seed=1, principal=Principal(principal))
    return msgspec.structs.replace(made, **fields)


@pytest.mark.parametrize(
    ("again", "is_refused"),
    [
        (asked(1), True),
        (asked(1, id="other", seed=2, choice=3, user="mallory/u"), True),
        (asked(2), False),
        (asked(1, grammar="g"), False),
        (asked(1, principal="bob"), False),
    ],
)
def test_the_same_principal_s_same_prompt_and_grammar_is_refused(again: Request, is_refused: bool) -> None:
    held = Quarantined()
    held.table.add(asked(1))
    assert bool(held.refuses(again)) == is_refused


def test_a_request_is_refused_for_a_time_after_the_last_engine_that_ended_with_it() -> None:
    held = Quarantined()
    held.table.add(asked(1))
    held.now_s += REQUEST_S - 1
    assert "ended with this prompt" in held.refuses(asked(1))
    held.table.add(asked(1))
    held.now_s += REQUEST_S - 1
    assert held.refuses(asked(1))
    held.now_s += 1
    assert not held.refuses(asked(1))
    assert held.table.describe() == {"requests": 0, "principals": 0}


def test_a_refusal_tells_the_seconds_that_are_left() -> None:
    held = Quarantined()
    held.table.add(asked(1))
    held.now_s += 600.0
    with pytest.raises(RequestQuarantined, match=f"in {REQUEST_S - 600.0:.0f} s") as refused:
        held.table.check(asked(1))
    assert refused.value.retry_after_s == REQUEST_S - 600.0


def test_a_principal_with_several_fatal_requests_is_refused_and_nobody_else() -> None:
    held = Quarantined()
    for prompt in range(MAX_FATAL):
        assert not held.refuses(asked(100))
        held.table.add(asked(prompt))
        held.table.add(asked(prompt))  # the same one counts once
    assert "of this key or user" in held.refuses(asked(100))
    assert not held.refuses(asked(100, principal="bob"))
    assert held.table.describe() == {"requests": MAX_FATAL, "principals": 1}
    held.now_s += PRINCIPAL_S
    assert not held.refuses(asked(100))
    held.table.add(asked(100))
    assert held.refuses(asked(101))  # one more is enough within the hour


def test_the_table_is_bounded_and_keeps_the_latest() -> None:
    held = Quarantined()
    for n in range(MAX_REQUESTS + 10):
        held.table.add(asked(1, principal=f"p{n}"))
    held.table.check_integrity()
    assert held.table.describe()["requests"] == MAX_REQUESTS
    assert not held.refuses(asked(1, principal="p9"))
    assert held.refuses(asked(1, principal="p10"))

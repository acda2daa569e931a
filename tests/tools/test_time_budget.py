"""A room's tests within a time budget: the shortest run, files that set up long are paid once."""

from __future__ import annotations

from support.time_budget import chosen

TESTS = ["a.py::one", "a.py::two", "b.py::one", "b.py::two"]


def test_the_shortest_tests_run_until_the_budget_is_spent() -> None:
    call_s = {"a.py::one": 1.0, "a.py::two": 5.0, "b.py::one": 2.0, "b.py::two": 4.0}
    run, left_out = chosen(TESTS, call_s, {}, 7.5)
    assert run == {"a.py::one", "b.py::one", "b.py::two"}
    assert left_out == {"a.py::two": 5.0}


def test_the_fixtures_of_a_file_are_paid_once() -> None:
    call_s = dict.fromkeys(TESTS, 1.0)
    assert chosen(TESTS, call_s, {"a.py": 3.0}, 4.0)[0] == {"b.py::one", "b.py::two"}
    assert chosen(TESTS, call_s, {"a.py": 3.0}, 7.0)[0] == set(TESTS)


def test_a_test_that_was_never_timed_runs() -> None:
    run, left_out = chosen([*TESTS, "c.py::new"], dict.fromkeys(TESTS, 1.0), {}, 0.0)
    assert run == {"c.py::new"}
    assert set(left_out) == set(TESTS)

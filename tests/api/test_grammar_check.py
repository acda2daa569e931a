"""GrammarCompiler are tried in processes of their own, which end with one that takes too long or too much memory."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.waiting import until

from edgemoe.api.generate.answer_grammar import GrammarCandidates, response_grammar
from edgemoe.api.generate.grammar_trial import GrammarChecker, grammar_command
from edgemoe.api.schema import JsonSchema, ResponseFormat
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import EngineUnavailable, InvalidRequest
from edgemoe.front.main import Front
from edgemoe.types.request import digest_of


def asked(schema: dict[str, Any]) -> GrammarCandidates:
    choice = response_grammar(ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema)))
    assert choice is not None
    return choice


def lark(text: str) -> GrammarCandidates:
    return GrammarCandidates((text,), "response_format")


def endless(patterns: int = 40) -> dict[str, Any]:
    """Returns a schema of two kilobytes whose check takes twice as long with each pattern."""
    return {"allOf": [{"type": "string", "pattern": f"^.*a{{{at}}}.*$"} for at in range(1, patterns)]}


@pytest.fixture(scope="module")
def command(text_model: TextModel) -> list[str]:
    return [*grammar_command(text_model.directory, text_model.eos, trial_s=0.5)]


@pytest_asyncio.fixture
async def checker(command: list[str]) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(command)
    yield checker
    await checker.close()


async def test_the_first_that_can_be_honoured_counts(checker: GrammarChecker) -> None:
    good, bad = asked({"type": "object"}).larks[0], asked({"type": "objeeect"}).larks[0]
    assert await checker.first(None) is None
    only = await checker.first(GrammarCandidates((good,), "tools"))
    assert only
    assert only.trial.digest == digest_of(only.grammar)
    again = await checker.first(GrammarCandidates((bad, good), "tools"))
    assert again is not None
    assert again.grammar == only.grammar
    assert await checker.first(GrammarCandidates((bad,), "tools", optional=True)) is None
    with pytest.raises(InvalidRequest, match=r"^tools cannot be honoured"):
        await checker.first(GrammarCandidates((good.replace("start", "begin"), bad), "tools"))


# Grammars that the bounds of schemas refuse come as Lark here.
EXPLOSIVE: dict[str, GrammarCandidates] = {
    "multiple of a large prime": lark('start: %json {"type": "integer", "multipleOf": 99999989}'),
    "multiple of a prime within bounds": lark('start: %json {"type": "integer", "multipleOf": 999983}'),
    "all of many patterns": asked(endless()),
    "a hundred thousand words": lark(f"start: /{'|'.join(f'word{at}x' for at in range(50_000))}/"),
    "exponential lexemes": lark(
        "start: A\nA: "
        + " & ".join(f"/([ab]{{{prime}}})*/" for prime in (7, 11, 13, 17, 19, 23, 29))
        + " & /[ab]*a[ab]{15}/"
    ),
    "many optional parts": lark("start: /(a?){50000}a{50000}/"),
}


@pytest.mark.parametrize("name", EXPLOSIVE)
async def test_grammars_beyond_time_or_memory_are_refused_and_the_next_is_tried(
    checker: GrammarChecker, name: str
) -> None:
    began_s = time.monotonic()
    with contextlib.suppress(InvalidRequest):  # a cheap way to try it may be found
        await checker.first(EXPLOSIVE[name])
    assert time.monotonic() - began_s < 40
    assert await checker.first(asked({"type": "object"}))


async def test_a_refusal_states_the_bounds(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match=r"response_format is too complex.* 3 s or 128 MiB; simplify") as refused:
        await checker.first(EXPLOSIVE["multiple of a large prime"])
    assert refused.value.code == "invalid_grammar"


async def test_one_principal_s_endless_grammars_delay_another_s_by_no_more_than_a_start(
    checker: GrammarChecker,
) -> None:
    asking = [asyncio.ensure_future(checker.first(EXPLOSIVE["all of many patterns"], "key:mallory")) for _ in range(8)]
    await until(lambda: checker.busy)
    began_s = time.monotonic()
    for _ in range(3):
        assert await checker.first(asked({"type": "object"}), "key:bob")
    assert time.monotonic() - began_s < 15
    assert sum(each.done() for each in asking) < 8
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert await checker.first(asked({"type": "object"}), "key:mallory")


@pytest.mark.asyncio(loop_scope="session")
async def test_such_schemas_hold_up_nobody_else(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker([sys.executable, "-c", "import time; time.sleep(100)"], deadline_s=60.0)
    monkeypatch.setattr(front.api, "grammars", checker)
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}
    asking = [asyncio.ensure_future(http.post("/v1/chat/completions", json=body)) for _ in range(4)]
    await until(lambda: checker.busy)
    async with asyncio.timeout(60):
        assert (await http.post("/tokenize", json={"prompt": "hello"})).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": "SAY{hi}END"})).status_code == 200
    assert not any(each.done() for each in asking)
    for each in asking:
        each.cancel()
    await asyncio.wait(asking)
    await until(lambda: not checker.busy)  # their clients have hung up


async def test_without_a_process_no_grammar_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="cannot be started"):
        await GrammarChecker(["/nonexistent"]).first(asked({}))


async def test_its_process_ends_by_itself(checker: GrammarChecker) -> None:
    await checker.first(asked({"type": "object"}))
    (pid,) = checker.pids
    await checker.close()
    assert not Path(f"/proc/{pid}").exists()

"""Grammars are checked in a process of their own, which ends with one that takes too long or too much memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.waiting import until

from edgemoe.api.generate.grammar import GrammarChoice, response_grammar
from edgemoe.api.generate.grammar_check import GrammarChecker
from edgemoe.api.schema import JsonSchema, ResponseFormat
from edgemoe.errors import EngineUnavailable, InvalidRequest
from edgemoe.front.main import Front


def asked(schema: dict[str, Any]) -> GrammarChoice:
    choice = response_grammar(ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema)))
    assert choice is not None
    return choice


def endless(patterns: int = 40) -> dict[str, Any]:
    """A schema of two kilobytes whose check takes twice as long with each pattern."""
    return {"allOf": [{"type": "string", "pattern": f"^.*a{{{at}}}.*$"} for at in range(1, patterns)]}


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(deadline_s=20.0)
    yield checker
    await checker.close()


async def test_the_first_that_can_be_honoured_counts(checker: GrammarChecker) -> None:
    good, bad = asked({"type": "object"}).larks[0], asked({"type": "objeeect"}).larks[0]
    assert await checker.first(None) is None
    only = await checker.first(GrammarChoice((good,), "tools"))
    assert only
    assert await checker.first(GrammarChoice((bad, good), "tools")) == only
    assert await checker.first(GrammarChoice((bad,), "tools", optional=True)) is None
    with pytest.raises(InvalidRequest, match=r"^tools cannot be honoured"):
        await checker.first(GrammarChoice((good.replace("start", "begin"), bad), "tools"))


async def test_what_takes_too_long_or_too_much_is_refused_and_the_next_is_checked() -> None:
    impatient = GrammarChecker(deadline_s=3.0)
    with pytest.raises(InvalidRequest, match="response_format is too complex") as refused:
        await impatient.first(asked(endless()))
    assert refused.value.code == "invalid_grammar"
    await impatient.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_such_schemas_hold_up_nobody_else(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker([sys.executable, "-c", "import time; time.sleep(100)"], deadline_s=60.0)
    monkeypatch.setattr(front.api, "grammars", checker)
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}
    asking = [asyncio.ensure_future(http.post("/v1/chat/completions", json=body)) for _ in range(4)]
    await until(lambda: checker.busy)
    async with asyncio.timeout(30):
        assert (await http.post("/tokenize", json={"prompt": "hello"})).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": "SAY{hi}END"})).status_code == 200
    assert not any(each.done() for each in asking)
    for each in asking:
        each.cancel()
    await asyncio.wait(asking)
    await until(lambda: not checker.busy)  # their clients have hung up


async def test_without_a_process_nobody_is_to_blame() -> None:
    with pytest.raises(EngineUnavailable, match="cannot be started"):
        await GrammarChecker(["/nonexistent"]).first(asked({}))


async def test_its_process_ends_by_itself(checker: GrammarChecker) -> None:
    await checker.first(asked({"type": "object"}))
    process = checker._helper._process
    assert process is not None
    await checker.close()
    assert process.returncode == 0

"""GETs of other servers, by which monitors and pages look at this one: each row of the table in docs/api.md."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from support.api_tables import rows, spans
from support.waiting import until

from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATHS = [path for cell, _ in rows("path of a GET | answer") for path in spans(cell)]


@pytest.mark.parametrize("path", PATHS)
async def test_a_path_answers_as_the_table_says(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    named = next(text for cell, text in rows("path of a GET | answer") if path in spans(cell))
    body = answer.json() if answer.content else None
    for name in spans(named):
        assert name in (body[0] if isinstance(body, list) else body), name


async def test_slots_are_the_places_for_sequences_and_show_their_use(front: Front, http: httpx.AsyncClient) -> None:
    total = front.settings.engine.max_sequences
    assert (await http.get("/props")).json()["total_slots"] == total
    idle = (await http.get("/slots")).json()
    assert [one["id"] for one in idle] == [*range(total)]
    assert not any(one["is_processing"] for one in idle)
    assert all(one["n_ctx"] == 4096 for one in idle)
    assert (await http.get("/load")).json() == {"server_load": 0}
    waiting = {"prompt": "HANG", "max_tokens": 20}
    asking = asyncio.ensure_future(http.post("/v1/completions", json=waiting))
    supervisor = front.supervisor
    assert supervisor is not None
    await until(lambda: len(supervisor.requests) == 1)
    assert (await http.get("/load")).json() == {"server_load": 1}
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: not len(supervisor.requests))


async def test_no_free_slot_is_told_to_a_client_that_asks(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert front.supervisor is not None
    monkeypatch.setattr(front.supervisor.requests.machine, "slots", 0)
    assert (await http.get("/slots")).json() == []
    answer = await http.get("/slots", params={"fail_on_no_slot": 1})
    assert answer.status_code == 503
    assert "no slot is free" in answer.text


async def test_a_ping_may_be_a_post(http: httpx.AsyncClient) -> None:
    assert (await http.post("/ping")).status_code == 200

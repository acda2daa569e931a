"""Requests of the shapes that real coding agents send are answered, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")
SHAPES = sorted((Path(__file__).parents[1] / "data/agents").glob("*.json"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.stem)
async def test_an_agents_request_is_answered(http: httpx.AsyncClient, shape: Path, stream: bool) -> None:
    asked = json.loads(shape.read_text())
    text = json.dumps(asked["body"] | {"stream": stream}).replace('"text": "words"', '"text": "SAY{done}END"')
    answer = await http.post(asked["path"], content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    ends = ("event: response.completed", "event: message_stop")
    assert any(end in answer.text for end in ends) if stream else '"text":"done"' in answer.text, answer.text


async def test_what_agents_ask_beside_their_requests_does_no_harm(http: httpx.AsyncClient) -> None:
    assert (await http.head("/")).status_code == 200
    for path in ("/api/event_logging/batch", "/api/hello", "/v1/responses/compact"):
        answer = await http.post(path, json={"events": []})
        assert (answer.status_code, list(answer.json())) == (404, ["error"])

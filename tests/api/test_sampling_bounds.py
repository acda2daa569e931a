"""Every number that a body may have is accepted at its bounds and refused just beyond them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import inspect
from support.front_kit import write_model

from edgemoe.api.peer_fields import SENTINELS
from edgemoe.api.schema import Chat, Completion
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKS: dict[type[Any], tuple[str, dict[str, Any]]] = {
    Chat: (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 2},
    ),
    Completion: ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "echo": True}),
}
LONG = ("max_tokens", "max_completion_tokens", "n")  # whose upper bound asks for more than a test has time for
CUT = ("max_tokens", "max_completion_tokens", "top_k")  # whose greater values mean the highest
ELSEWHERE = {"min_tokens": 2}  # bounded by other fields
UNSIGNED = {"seed": 2**64 - 1}  # highest numbers that mean another one, or none


def numbers() -> Iterator[tuple[type[Any], str, float, float]]:
    """Yields (body, field, lowest, highest) of each numeric field."""
    for kind in ASKS:
        for field in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
            for one in types:
                if isinstance(one, inspect.IntType | inspect.FloatType):
                    assert one.ge is not None, f"{field.name} has no lower bound"
                    assert one.le is not None, f"{field.name} has no upper bound"
                    yield kind, field.name, one.ge, one.le


CASES = [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in numbers()]


@pytest.mark.parametrize(("kind", "field", "low", "high"), CASES)
async def test_bounds_are_accepted_and_values_beyond_are_refused(
    http: httpx.AsyncClient, kind: type[Any], field: str, low: float, high: float
) -> None:
    path, body = ASKS[kind]
    for value in (low,) if field in LONG else (low, ELSEWHERE.get(field, high)):
        answer = await http.post(path, json={**body, field: value})
        assert answer.status_code == 200, answer.text
    step = 1 if isinstance(low, int) and field not in ("temperature", "top_p", "min_p") else 1e-6
    lowest = min(low, *SENTINELS.get(field, (low,)))  # -1 stands for no limit
    high = UNSIGNED.get(field, high)
    beyond = high + max(step, abs(high) * 1e-6) if isinstance(high, float) else high + step
    for value in (lowest - step,) if field in CUT else (lowest - step, beyond):
        answer = await http.post(path, json={**body, field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, "invalid_value"), answer.text


@pytest.mark.parametrize(("kind", "field", "low", "high"), CASES)
async def test_the_real_engine_lives_through_every_bound(
    demo: Front, kind: type[Any], field: str, low: float, high: float
) -> None:
    path, body = ASKS[kind]
    transport = httpx.AsyncHTTPTransport(uds=demo.settings.api.socket, verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=60.0) as client:
        for value in (low,) if field in LONG else (low, ELSEWHERE.get(field, high)):
            answer = await client.post(path, json={"temperature": 1, **body, field: value})
            assert answer.status_code == 200, answer.text
        tiny = {"temperature": 1e-50, "top_p": 1e-50, "min_p": 1.0}
        assert (await client.post(path, json={**body, **tiny})).status_code == 200


async def test_a_models_own_defaults_are_kept_to_the_same_bounds(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    wild = {
        "temperature": 9.0,
        "repetition_penalty": 1.1,
        "top_p": 0.5,
        "top_k": "many",
        "min_p": -1,
        "eos_token_id": [1],
    }
    (model / "generation_config.json").write_text(json.dumps(wild))
    assert TextModel(model).defaults == {"top_p": 0.5, "repetition_penalty": 1.1}
    assert msgspec.json.encode(TextModel(model).about())

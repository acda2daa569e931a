"""Every wrong request gets OpenAI's error object with a helpful message, and the daemon goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.waiting import until

from edgemoe.api.schema import REFUSED, Chat, Completion
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")
MESSAGES = [{"role": "user", "content": "SAY{x}END"}]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (
        CHAT,
        {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (CHAT, {"messages": MESSAGES, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": 2.1}, "temperature"),
    (CHAT, {"messages": MESSAGES, "top_p": -0.1}, "top_p"),
    (CHAT, {"messages": MESSAGES, "n": 0}, "n"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_tokens": True}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "min_tokens": 9, "max_tokens": 2}, "min_tokens"),
    (CHAT, {"messages": MESSAGES, "seed": 2**70}, "seed"),
    (CHAT, {"messages": MESSAGES, "stop": ["x"] * 17}, "stop"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"x": "much"}}, "logit_bias[0]"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [99999]}, "stop_token_ids"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0]"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": ""}]}, "functions[0].name"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    (CHAT, {"messages": MESSAGES, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"reasoning_effort": ["x"]}}, "chat_template_kwargs"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": [[65]] * 1024, "n": 128}, "n"),  # before 131,072 choices are made
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [1, [2]]}, "prompt"),
    (TEXT, {"prompt": [99999]}, "prompt[0]"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (RESPONSES, {"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    (
        RESPONSES,
        {"instructions": "be", "input": [{"role": "user"}, {"role": "user", "content": 3}]},
        "input[1].content",
    ),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    (
        RESPONSES,
        {"instructions": "be", "input": [{"type": "function_call", "name": 3}]},
        "input[0].tool_calls[0].function.name",
    ),
    (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    (TEXT, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": [1] * 4097}, "tokens"),
]


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Returns the error object of a refusal."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_named(http: httpx.AsyncClient, path: str, body: Any, param: str) -> None:
    error = refused(await http.post(path, json=body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize("field", [*REFUSED, "store", "metadata", "service_tier", "logprobs", "seed", "stop", "user"])
async def test_null_is_as_good_as_absent(http: httpx.AsyncClient, field: str) -> None:
    assert (await http.post(CHAT, json={"messages": MESSAGES, field: None})).status_code == 200


async def test_fields_that_change_nothing_are_left_unread(http: httpx.AsyncClient) -> None:
    extra = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k", "surprise": [1]}
    neutral = {"best_of": 1, "repetition_penalty": 1.0, "modalities": ["text"], "function_call": "none"}
    assert (await http.post(CHAT, json={"messages": MESSAGES, **extra, **neutral})).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000])
async def test_bad_json_is_a_400(http: httpx.AsyncClient, body: bytes) -> None:
    assert refused(await http.post(CHAT, content=body), 400)["code"] == "invalid_json"


async def test_a_text_far_longer_than_the_context_is_not_encoded_whole(
    http: httpx.AsyncClient, text_model: TextModel
) -> None:
    text = "ab " * 200_000
    assert text_model.encode("ab " * 20, False, 50) == text_model.encode("ab " * 20, False)
    assert 50 < len(text_model.encode(text, False, 50)) <= 400
    ways = ((TEXT, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]}))
    for path, body in (*ways, *(("/tokenize", body) for _, body in ways)):
        assert refused(await http.post(path, json=body), 400)["code"] == "context_length_exceeded"
    assert (await http.post("/tokenize", json={"prompt": "ab " * 5000})).json()["count"] > 4096


async def test_a_prompt_longer_than_the_context_says_by_how_much(http: httpx.AsyncClient) -> None:
    error = refused(await http.post(TEXT, json={"prompt": [65] * 5000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens")
    assert "5000" in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("temperature", 2.1, "invalid_value"),
        ("top_p", -0.1, "invalid_value"),
        ("n", 0, "invalid_value"),
        ("stop", ["x"] * 17, "invalid_value"),
        ("temperature", "hot", "invalid_type"),
        ("stream", 2, "invalid_type"),
        ("tools", [{"type": "function"}], "missing_required_parameter"),
    ],
)
async def test_a_code_tells_a_wrong_type_from_a_wrong_value(
    http: httpx.AsyncClient, field: str, value: Any, code: str
) -> None:
    assert refused(await http.post(CHAT, json={"messages": MESSAGES, field: value}), 400)["code"] == code


async def test_more_choices_than_could_ever_wait_are_a_400(http: httpx.AsyncClient) -> None:
    refused(await http.post(TEXT, json={"prompt": ["x"] * 500, "n": 2}), 400)


async def test_another_model_is_not_found(http: httpx.AsyncClient) -> None:
    error = refused(await http.post(CHAT, json={"messages": MESSAGES, "model": "gpt-4o"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]


async def test_unknown_paths_and_methods_are_answered_in_kind(http: httpx.AsyncClient) -> None:
    refused(await http.get("/v2/chat"), 404)
    error = refused(await http.get(CHAT), 405)
    assert "GET" in error["message"]
    refused(await http.delete("/v1/models"), 405)


async def test_a_long_body_is_refused_before_it_is_read(http: httpx.AsyncClient) -> None:
    assert "max_body_bytes" in refused(await http.post(CHAT, content=b"x" * (3 << 20)), 413)["message"]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * (1 << 16)

    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):  # closed while it sends
        refused(await http.post(CHAT, content=pieces()), 413)  # chunked: nothing announces the length
    assert (await http.get("/health")).status_code == 200


async def test_bytes_that_are_no_http_do_no_harm(front: Front, http: httpx.AsyncClient) -> None:
    for noise in (b"\x00\x16\x03", b"GET / HTTP/9\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        reader, writer = await asyncio.open_unix_connection(front.settings.api.socket)
        writer.write(noise)
        writer.write_eof()
        async with asyncio.timeout(60):
            assert not (await reader.read()).startswith(b"HTTP/1.1 5")
        writer.close()
        await writer.wait_closed()
    assert (await http.get("/health")).status_code == 200


async def test_a_client_that_leaves_while_sending_is_forgotten(front: Front) -> None:
    _, writer = await asyncio.open_unix_connection(front.settings.api.socket)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await until(lambda: b'path="/v1/completions",status="499"' in front.metrics.render({}))


# --- anything at all -----------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "alien"])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES, "content": st.text(max_size=12) | VALUES},
    optional={"tool_calls": VALUES, "name": VALUES, "reasoning_content": VALUES},
)


def bodies(kind: type, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draws bodies with plausible required fields and any values in the others."""
    names = [*kind.__struct_fields__, *REFUSED]
    others = {name: VALUES for name in names if name not in known and name not in ("max_tokens", "n")}
    limits = {"max_tokens": st.integers(-1, 3) | VALUES, "n": st.integers(-1, 3) | VALUES}
    fields = st.dictionaries(st.sampled_from(sorted(others)), VALUES, max_size=3)
    fixed = st.fixed_dictionaries(known, optional=limits)
    return st.builds(lambda some, rest: {"max_tokens": 2, **some, **rest}, fields, fixed)


CHATS = bodies(Chat, messages=st.lists(MESSAGE, min_size=1, max_size=3) | VALUES)
TEXTS = bodies(Completion, prompt=st.text(max_size=12) | st.lists(st.integers(-1, 400), max_size=5) | VALUES)
FUZZ = settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def _no_500(http: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await http.post(path, content=json.dumps(body).encode())
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        refused(answer, answer.status_code)


INPUTS = st.fixed_dictionaries(
    {"input": VALUES | st.lists(MESSAGE, max_size=2)}, optional={"tools": VALUES, "text": VALUES}
)


@FUZZ
@given(body=CHATS)
async def test_no_chat_body_is_an_internal_error(http: httpx.AsyncClient, body: Any) -> None:
    await _no_500(http, CHAT, body)


@FUZZ
@given(body=TEXTS)
async def test_no_completion_body_is_an_internal_error(http: httpx.AsyncClient, body: Any) -> None:
    await _no_500(http, TEXT, body)


@FUZZ
@given(body=INPUTS)
async def test_no_response_body_is_an_internal_error(http: httpx.AsyncClient, body: Any) -> None:
    await _no_500(http, "/v1/responses", {"max_output_tokens": 2, **body})

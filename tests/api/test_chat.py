"""Chat completions over the socket, with the real openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from support.front_kit import openai_client, ready
from support.waiting import until

from edgemoe.api.endpoints.chat_completions import ChatFormat, render
from edgemoe.api.generate.generation import ChoiceDelta, Generation, PreparedAnswer
from edgemoe.api.http import responding
from edgemoe.api.http.responding import SERVER_SENT_EVENTS, ClientAnswer
from edgemoe.api.schema import Chat, convert
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import DeadlineExceeded, EngineUnavailable
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="session")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def say(text: str) -> Any:
    return [{"role": "user", "content": f"SAY{{{text}}}END"}]


def ask(text: str = "tell me") -> Any:
    return [{"role": "user", "content": text}]


async def streamed(stream: Any) -> tuple[str, str | None]:
    """Returns text and finish reason."""
    text, finish = "", None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


async def test_an_answer_arrives_whole(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=say("Größe 🦊"), user="anna")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Größe 🦊")
    assert (choice.finish_reason, answer.model, answer.object) == ("stop", "tiny", "chat.completion")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


async def test_a_stream_says_the_same_and_counts_at_its_end(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=ask(), max_tokens=30, seed=5)
    stream = await client.chat.completions.create(
        model="tiny", messages=ask(), max_tokens=30, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == whole.usage


async def test_a_seed_gives_the_same_text_and_none_another(client: openai.AsyncOpenAI) -> None:
    async def text(**options: Any) -> str | None:
        answer = await client.chat.completions.create(model="tiny", messages=ask(), max_tokens=20, **options)
        return answer.choices[0].message.content

    assert await text(seed=-3) == await text(seed=-3) != await text(seed=4)
    assert await text() != await text()
    assert await text(temperature=0) == await text(temperature=0, seed=9)


async def test_choices_differ_and_are_told_apart(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=ask(), max_tokens=9, n=3, seed=1)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    by_choice = ["", "", ""]
    async for chunk in await client.chat.completions.create(
        model="tiny", messages=ask(), max_tokens=9, n=3, seed=1, stream=True
    ):
        for choice in chunk.choices:
            by_choice[choice.index] += choice.delta.content or ""
    assert by_choice == texts
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 27


async def test_stop_strings_cut_the_answer_where_they_begin(client: openai.AsyncOpenAI) -> None:
    for stop in ("wor", ["zzz", "o wo"]):
        stream = await client.chat.completions.create(
            model="tiny", messages=say("hello world again"), stop=stop, stream=True
        )
        text, finish = await streamed(stream)
        assert (text, finish) == ("hello " if stop == "wor" else "hell", "stop")


async def test_reasoning_is_set_apart(client: openai.AsyncOpenAI) -> None:
    text = "<think>\nfirst this\n</think>\n\nthen that"
    message = (await client.chat.completions.create(model="tiny", messages=say(text))).choices[0].message
    assert (message.content, message.reasoning_content) == ("then that", "first this")  # type: ignore[attr-defined]
    reasoning = ""
    async for chunk in await client.chat.completions.create(model="tiny", messages=say(text), stream=True):
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert reasoning == "first this"
    assert message.reasoning == "first this"  # type: ignore[attr-defined]


@pytest.mark.parametrize("last", ["one two", "one two ", "one\n", "<", "e", "im_end|>"])
async def test_an_answer_goes_on_with_the_last_message(
    http: httpx.AsyncClient, text_model: TextModel, last: str
) -> None:
    messages = [*ask("one two"), {"role": "assistant", "content": last}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    rendered = render(convert({"messages": messages, **options}, Chat), [], text_model)
    assert rendered.endswith(f"<|im_start|>assistant\n{last}")
    answer = await http.post("/v1/chat/completions", json={"messages": messages, **options, "max_tokens": 3})
    assert answer.json()["usage"]["prompt_tokens"] == len(text_model.encode(rendered, add_special_tokens=False))


async def test_a_chat_is_tokenized_as_it_is_answered(http: httpx.AsyncClient) -> None:
    for options in (
        {},
        {"tools": [WEATHER]},
        {"reasoning_effort": "none"},
        {"tools": [WEATHER], "tool_choice": "none"},
    ):
        body = {"messages": ask(), **options}
        tokens = (await http.post("/tokenize", json=body)).json()
        answer = await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert tokens["count"] == answer.json()["usage"]["prompt_tokens"], options


@pytest.mark.parametrize("last", ["", "  ", None])
async def test_there_must_be_something_to_go_on_with(http: httpx.AsyncClient, last: str | None) -> None:
    body = {"messages": [*ask(), {"role": "assistant", "content": last}], "continue_final_message": True}
    answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


async def test_thinking_can_be_turned_off(client: openai.AsyncOpenAI) -> None:
    text = "<think>\nnot reasoning"  # the prompt has closed its reasoning already: the output is the answer
    for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = await client.chat.completions.create(model="tiny", messages=say(text), extra_body=extra)
        assert answer.choices[0].message.content == text


async def test_tool_calls_are_parsed_and_streamed(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "messages": say(f"Let me see.\n{CALL}\n{CALL}"), "tools": [WEATHER]}
    choice = (await client.chat.completions.create(**options)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls: Any = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Köln"}] * 2
    assert len({call.id for call in calls}) == 2
    async with client.chat.completions.stream(**options) as stream:
        final: Any = await stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["weather"] * 2


async def test_arguments_are_streamed_as_they_are_written(client: openai.AsyncOpenAI) -> None:
    city = "Köln" * 100  # pieces that come while the front is busy are joined: so many that not all of them are
    call = CALL.replace("Köln", city)
    pieces: list[Any] = []
    options: Any = {"model": "tiny", "messages": say(f"{call}\n{call}"), "tools": [WEATHER]}
    async for chunk in await client.chat.completions.create(**options, stream=True):
        pieces += chunk.choices[0].delta.tool_calls or ()
    for index in (0, 1):
        first, *rest = [piece for piece in pieces if piece.index == index]
        assert (first.type, first.function.name, bool(first.id)) == ("function", "weather", True)
        assert {(piece.id, piece.type, piece.function.name) for piece in rest} == {(None, None, None)}
        assert len(rest) > 5
        assert json.loads("".join(piece.function.arguments for piece in [first, *rest])) == {"city": city}


async def test_tool_calls_are_text_where_no_tools_were_offered(client: openai.AsyncOpenAI) -> None:
    for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = await client.chat.completions.create(model="tiny", messages=say(CALL), **extra)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == CALL


async def test_one_call_is_taken_where_parallel_ones_are_refused(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=say(f"{CALL}\n{CALL}"), tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_conversation_with_tool_results_is_accepted(client: openai.AsyncOpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        *say("ok"),
    ]
    answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "ok"


async def test_logprobs_come_with_bytes_and_alternatives(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "messages": say("aé"), "logprobs": True, "top_logprobs": 2}
    choice = (await client.chat.completions.create(**options)).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(token.bytes or ()) for token in content) == "aé".encode()
    assert [len(token.top_logprobs) for token in content] == [2] * len(content)
    count = 0
    async for chunk in await client.chat.completions.create(**options, stream=True):
        logprobs = chunk.choices[0].logprobs
        count += len(logprobs.content or ()) if logprobs else 0
    assert count == len(content)


async def test_many_at_once_each_get_their_own(client: openai.AsyncOpenAI) -> None:
    async def one(number: int) -> bool:
        stream = await client.chat.completions.create(model="tiny", messages=say(f"number {number}"), stream=True)
        return (await streamed(stream))[0] == f"number {number}"

    assert all(await asyncio.gather(*map(one, range(50))))


async def test_a_client_that_hangs_up_is_forgotten_at_once(front: Front, http: httpx.AsyncClient) -> None:
    assert front.supervisor is not None
    requests = front.supervisor.requests
    for stream in (True, False):
        body = {"messages": ask("HANG@3"), "max_tokens": 50, "stream": stream}
        request = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
        await until(lambda: len(requests) == 1)
        request.cancel()
        await until(lambda: len(requests) == 0)
    await until(lambda: front.supervisor.metrics().get("edgemoe_num_requests_running") == 0)  # type: ignore[union-attr]


async def test_the_engines_errors_reach_the_client_as_openai_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as limited:
        await client.chat.completions.create(model="tiny", messages=ask("FAIL{queue_full}END"))
    assert limited.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.InternalServerError) as late:
        await client.chat.completions.create(model="tiny", messages=ask("FAIL{deadline_exceeded}END"), stream=True)
    assert late.value.status_code == 504
    with pytest.raises(openai.InternalServerError) as failed:
        await client.chat.completions.create(model="tiny", messages=ask("FAIL{missing_expert}END"))
    assert failed.value.code == "missing_expert"


async def test_a_stream_that_has_nothing_for_long_says_that_it_waits(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "QUIET_S", 0.05)
    body = {"messages": [{"role": "user", "content": "HANG@0"}], "stream": True}
    async with asyncio.timeout(60), http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert [await anext(lines) for _ in range(3)] == [": waiting", "", ": waiting"]


async def test_an_error_after_that_is_an_event(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responding, "QUIET_S", 0.01)
    waits, sent = asyncio.Event(), list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 3:
            waits.set()

    async def deltas() -> AsyncGenerator[list[ChoiceDelta], None]:
        await waits.wait()
        raise DeadlineExceeded("too late")
        yield []

    body = convert({"messages": ask(), "stream": True}, Chat)
    job = Generation("chatcmpl", "tiny", [], [], 1)
    async with asyncio.timeout(60):
        kept = ClientAnswer(send, SERVER_SENT_EVENTS)
        async with kept.kept():
            await responding.reply(kept, PreparedAnswer(job, ChatFormat(job, body, text_model), True), deltas())
    assert sent[1:3] == [b": waiting\n\n"] * 2
    assert b"too late" in sent[-1]


async def test_a_stream_says_that_it_waits_between_its_tokens_too(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "QUIET_S", 0.05)
    body = {"messages": [{"role": "user", "content": "HANG@3"}], "stream": True}
    async with asyncio.timeout(60), http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            pass
        while await anext(lines) != ": waiting":
            pass


async def test_an_answer_that_is_no_stream_begins_with_white_space_and_is_the_same_json(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "WHOLE_QUIET_S", 0.05)
    assert front.supervisor is not None
    body = {"messages": [{"role": "user", "content": "HANG@2"}]}
    async with asyncio.timeout(60), http.stream("POST", "/v1/chat/completions", json=body) as answer:
        parts = answer.aiter_bytes()
        assert (answer.status_code, await anext(parts)) == (200, b"\n")
        front.supervisor.requests.fail_all(DeadlineExceeded("late"))
        rest = b"".join([part async for part in parts])
    assert json.loads(rest)["choices"][0]["finish_reason"] == "length"


async def test_an_answer_that_is_no_stream_and_fails_after_that_ends_the_connection(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "WHOLE_QUIET_S", 0.05)
    assert front.supervisor is not None
    body = {"messages": [{"role": "user", "content": "HANG@0"}]}
    async with asyncio.timeout(60), http.stream("POST", "/v1/chat/completions", json=body) as answer:
        parts = answer.aiter_bytes()
        assert await anext(parts) == b"\n"
        front.supervisor.requests.fail_all(EngineUnavailable("gone"))
        assert json.loads(await anext(parts))["error"]["message"] == "gone"
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(parts)


async def test_an_engine_killed_midstream_is_not_noticed(front: Front, client: openai.AsyncOpenAI) -> None:
    def stream(text: str) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=ask(text), max_tokens=40, stream=True, seed=7, n=2, temperature=1.0
        )

    async def texts(text: str) -> list[str]:
        found = ["", ""]
        async for chunk in await stream(text):
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
        return found

    assert front.supervisor is not None
    starts = front.supervisor.starts
    dying = await asyncio.gather(texts("DIE@20 a"), texts("b"), texts("c"))
    assert front.supervisor.starts == starts + 1
    assert [len(text) for pair in dying for text in pair] == [40] * 6
    await until(lambda: ready(front))
    # the same prompts on an engine that lives: the first one's second attempt is the one that spoke on
    assert await asyncio.gather(texts("b"), texts("c")) == dying[1:]


async def test_retries_of_the_client_end_well(front: Front) -> None:
    attempts = 0

    async def count(request: httpx.Request) -> None:
        nonlocal attempts
        attempts += 1

    async with openai_client(front.settings, max_retries=2) as client:
        client._client.event_hooks["request"].append(count)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=ask("FAIL{queue_full}END"))
    assert attempts == 3

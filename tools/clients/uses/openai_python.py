"""openai for Python, over the Unix socket as the README shows it. Also for older versions, which bring httpx."""

from __future__ import annotations

import json

import openai
import pydantic
import use

try:
    import httpx2 as httpx
except ImportError:
    import httpx

client = openai.OpenAI(
    base_url="http://edgemoe/v1",
    api_key="unused",
    http_client=httpx.Client(transport=httpx.HTTPTransport(uds=use.SOCKET)),
)
tools = [{"type": "function", "function": use.WEATHER}]


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


def chat() -> None:
    answer = client.chat.completions.create(model=use.MODEL, messages=use.MESSAGES, temperature=0)
    use.check_answer(answer.choices[0].message.content)
    assert answer.usage.completion_tokens > 1


def streaming() -> None:
    stream = client.chat.completions.create(
        model=use.MODEL, messages=use.MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    use.check_pieces([chunk.choices[0].delta.content for chunk in chunks if chunk.choices])
    assert chunks[-1].usage.completion_tokens > 1


def tool_calls() -> None:
    messages = [{"role": "user", "content": use.ASK_WEATHER}]
    answer = client.chat.completions.create(model=use.MODEL, messages=messages, tools=tools, temperature=0)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls", answer.choices[0]
    call = message.tool_calls[0]
    use.check_call(call.function.name, call.function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": use.SUNNY}]
    after = client.chat.completions.create(model=use.MODEL, messages=messages, tools=tools, max_tokens=64)
    assert after.choices[0].message.content or after.choices[0].message.tool_calls
    with client.chat.completions.stream(model=use.MODEL, messages=messages[:1], tools=tools, temperature=0) as stream:
        for _ in stream:
            pass
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    use.check_call(call.function.name, call.function.arguments)


def structured() -> None:
    answer = client.chat.completions.parse(
        model=use.MODEL, messages=use.MESSAGES, response_format=Place, temperature=0, max_tokens=128
    )
    assert isinstance(answer.choices[0].message.parsed, Place), answer.choices[0]
    plain = client.chat.completions.create(
        model=use.MODEL, messages=use.MESSAGES, response_format={"type": "json_object"}, max_tokens=256, seed=1
    )
    json.loads(plain.choices[0].message.content)


def responses() -> None:
    answer = client.responses.create(model=use.MODEL, input=use.QUESTION, temperature=0)
    use.check_answer(answer.output_text)
    events = client.responses.create(model=use.MODEL, input=use.QUESTION, temperature=0, stream=True)
    use.check_pieces([event.delta for event in events if event.type == "response.output_text.delta"])


def completions() -> None:
    answer = client.completions.create(model=use.MODEL, prompt="def add(a, b):", max_tokens=8, temperature=0)
    assert answer.choices[0].text


if __name__ == "__main__":
    use.run(
        chat=chat,
        streaming=streaming,
        tools=tool_calls,
        structured=structured,
        responses=responses,
        completions=completions,
    )

"""Mistral's own client, over TCP."""

from __future__ import annotations

import use
from mistralai.client import Mistral

client = Mistral(server_url=use.URL.removesuffix("/v1"), api_key=use.KEY)
SETTINGS = {"model": use.MODEL, "temperature": 0, "max_tokens": 128}


def chat() -> None:
    answer = client.chat.complete(messages=use.MESSAGES, **SETTINGS)
    use.check_answer(answer.choices[0].message.content)


def streaming() -> None:
    events = client.chat.stream(messages=use.MESSAGES, **SETTINGS)
    use.check_pieces([event.data.choices[0].delta.content for event in events if event.data.choices])


def tool_calls() -> None:
    messages = [{"role": "user", "content": use.ASK_WEATHER}]
    offered = [{"type": "function", "function": use.WEATHER}]
    answer = client.chat.complete(messages=messages, tools=offered, tool_choice="any", **SETTINGS)
    call = answer.choices[0].message.tool_calls[0]
    use.check_call(call.function.name, call.function.arguments)


def prefix() -> None:
    begun = {"role": "assistant", "content": "The capital of", "prefix": True}
    answer = client.chat.complete(messages=[*use.MESSAGES, begun], **SETTINGS)
    text = answer.choices[0].message.content
    assert "The capital" not in text, f"begun anew: {text!r}"


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls, prefix=prefix)

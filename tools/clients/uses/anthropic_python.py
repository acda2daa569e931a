"""anthropic for Python, over TCP: /v1/messages."""

from __future__ import annotations

import anthropic
import use

client = anthropic.Anthropic(base_url=use.URL.removesuffix("/v1"), api_key=use.KEY)
tools = [{"name": "get_weather", "description": "Tells the weather in a city.", "input_schema": use.CITY}]
GREEDY = {"temperature": 0}
ask = [{"role": "user", "content": use.ASK_WEATHER}]


def chat() -> None:
    answer = client.messages.create(model=use.MODEL, messages=use.MESSAGES, max_tokens=64, extra_body=GREEDY)
    use.check_answer(answer.content[0].text)
    assert answer.usage.output_tokens > 1


def streaming() -> None:
    with client.messages.stream(model=use.MODEL, messages=use.MESSAGES, max_tokens=64, extra_body=GREEDY) as stream:
        use.check_pieces(list(stream.text_stream))


def tool_calls() -> None:
    asked = {"model": use.MODEL, "messages": ask, "tools": tools, "max_tokens": 128, "extra_body": GREEDY}
    answer = client.messages.create(**asked)
    assert answer.stop_reason == "tool_use", answer
    call = next(block for block in answer.content if block.type == "tool_use")
    use.check_call(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": use.SUNNY}
    turns = [*ask, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model=use.MODEL, messages=turns, tools=tools, max_tokens=64)
    assert after.content
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    call = next(block for block in final.content if block.type == "tool_use")
    use.check_call(call.name, call.input)


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls)

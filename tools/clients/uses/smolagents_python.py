"""smolagents, over TCP: its model. The demo model does not write the JSON that its agents ask for in the prompt."""

from __future__ import annotations

import json

import use
from smolagents import OpenAIServerModel, tool

model = OpenAIServerModel(
    use.MODEL, api_base=use.URL, api_key=use.KEY, flatten_messages_as_text=True, temperature=0, max_tokens=128
)
QUESTION = [{"role": "user", "content": [{"type": "text", "text": use.QUESTION}]}]
ASK_WEATHER = [{"role": "user", "content": [{"type": "text", "text": use.ASK_WEATHER}]}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
}


@tool
def get_weather(city: str) -> str:
    """Tells the weather in a city.

    Args:
        city: The city.
    """
    return use.SUNNY


def chat() -> None:
    use.check_answer(model.generate(QUESTION).content)


def streaming() -> None:
    use.check_pieces([delta.content for delta in model.generate_stream(QUESTION)])


def tool_calls() -> None:
    call = model.generate(ASK_WEATHER, tools_to_call_from=[get_weather]).tool_calls[0].function
    use.check_call(call.name, call.arguments)


def structured() -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    answer = json.loads(model.generate(QUESTION, response_format=asked).content)
    assert set(answer) == {"city", "capital"}, answer


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls, structured=structured)

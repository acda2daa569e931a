"""haystack-ai, over TCP: its generator, and an agent with a tool."""

from __future__ import annotations

import os
from typing import Annotated

import pydantic
import use

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

SETTINGS = {"temperature": 0, "max_tokens": 128}


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


@tool
def get_weather(city: Annotated[str, "The city."]) -> str:
    """Tells the weather in a city."""
    asked.append(city)
    return use.SUNNY


asked: list[str] = []


def model(**more: object) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(use.KEY),
        model=use.MODEL,
        api_base_url=use.URL,
        generation_kwargs=SETTINGS | more,
    )


def chat() -> None:
    use.check_answer(model().run([ChatMessage.from_user(use.QUESTION)])["replies"][0].text)


def streaming() -> None:
    pieces: list[str] = []
    model().run([ChatMessage.from_user(use.QUESTION)], streaming_callback=lambda chunk: pieces.append(chunk.content))
    use.check_pieces(pieces)


def tool_calls() -> None:
    call = model().run([ChatMessage.from_user(use.ASK_WEATHER)], tools=[get_weather])["replies"][0].tool_calls[0]
    use.check_call(call.tool_name, call.arguments)
    agent = Agent(chat_generator=model(), tools=[get_weather], max_agent_steps=2)
    agent.run([ChatMessage.from_user(use.ASK_WEATHER)])
    assert asked, "the tool was not called"


def structured() -> None:
    answer = model(response_format=Place).run([ChatMessage.from_user(use.QUESTION)])["replies"][0].text
    Place.model_validate_json(answer)


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls, structured=structured)

"""AutoGen, over TCP: its client of OpenAI's API, and an agent with a tool."""

from __future__ import annotations

import asyncio

import pydantic
import use
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import ModelFamily, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABLE = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}
QUESTION = [UserMessage(content=use.QUESTION, source="user")]
ASK_WEATHER = [UserMessage(content=use.ASK_WEATHER, source="user")]


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


async def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    asked.append(city)
    return use.SUNNY


asked: list[str] = []


def model() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=use.MODEL, base_url=use.URL, api_key=use.KEY, model_info=ABLE, temperature=0, max_tokens=128
    )


async def chat() -> None:
    use.check_answer((await model().create(QUESTION)).content)


async def streaming() -> None:
    use.check_pieces([part async for part in model().create_stream(QUESTION) if isinstance(part, str)])


async def tool_calls() -> None:
    tool = FunctionTool(get_weather, description="Tells the weather in a city.")
    call = (await model().create(ASK_WEATHER, tools=[tool])).content[0]
    use.check_call(call.name, call.arguments)
    assert await tool.run_json({"city": "Paris"}, CancellationToken()) == use.SUNNY
    asked.clear()
    await AssistantAgent("guide", model(), tools=[get_weather]).run(task=use.ASK_WEATHER)
    assert asked, "the tool was not called"


async def structured() -> None:
    Place.model_validate_json((await model().create(QUESTION, json_output=Place)).content)


if __name__ == "__main__":
    use.run(
        chat=lambda: asyncio.run(chat()),
        streaming=lambda: asyncio.run(streaming()),
        tools=lambda: asyncio.run(tool_calls()),
        structured=lambda: asyncio.run(structured()),
    )

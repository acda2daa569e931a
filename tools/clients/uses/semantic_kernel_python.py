"""Semantic Kernel, over TCP: answers, functions of a plugin and typed outputs."""

from __future__ import annotations

import asyncio

import openai
import pydantic
import use
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


class Weather:
    def __init__(self) -> None:
        self.asked: list[str] = []

    @kernel_function(description="Tells the weather in a city.")
    def get_weather(self, city: str) -> str:
        self.asked.append(city)
        return use.SUNNY


def model() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(use.MODEL, async_client=openai.AsyncOpenAI(base_url=use.URL, api_key=use.KEY))


def settings(**more: object) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=128, **more)


def asking(question: str) -> ChatHistory:
    history = ChatHistory()
    history.add_user_message(question)
    return history


async def chat() -> None:
    use.check_answer(str(await model().get_chat_message_content(asking(use.QUESTION), settings())))


async def streaming() -> None:
    pieces = model().get_streaming_chat_message_content(asking(use.QUESTION), settings())
    use.check_pieces([str(piece) async for piece in pieces])


async def tool_calls() -> None:
    kernel, weather = Kernel(), Weather()
    kernel.add_plugin(weather, "weather")
    choice = FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=1)
    asked = settings(function_choice_behavior=choice)
    await model().get_chat_message_content(asking(use.ASK_WEATHER), asked, kernel=kernel)
    assert weather.asked, "the function was not called"


async def structured() -> None:
    answer = await model().get_chat_message_content(asking(use.QUESTION), settings(response_format=Place))
    Place.model_validate_json(str(answer))


if __name__ == "__main__":
    use.run(
        chat=lambda: asyncio.run(chat()),
        streaming=lambda: asyncio.run(streaming()),
        tools=lambda: asyncio.run(tool_calls()),
        structured=lambda: asyncio.run(structured()),
    )

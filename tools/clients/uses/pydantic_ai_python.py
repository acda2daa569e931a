"""pydantic-ai, over TCP: agents with tools and typed outputs."""

from __future__ import annotations

import contextlib

import pydantic
import use
from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(use.MODEL, provider=OpenAIProvider(base_url=use.URL, api_key=use.KEY))
SETTINGS = {"temperature": 0, "max_tokens": 128}


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


def chat() -> None:
    use.check_answer(Agent(model, model_settings=SETTINGS).run_sync(use.QUESTION).output)


def streaming() -> None:
    with Agent(model, model_settings=SETTINGS).run_stream_sync(use.QUESTION) as answer:
        use.check_pieces(list(answer.stream_text(delta=True, debounce_by=None)))


def tool_calls() -> None:
    agent, asked = Agent(model, model_settings=SETTINGS), []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Tells the weather in a city."""
        asked.append(city)
        return f"It is sunny in {city}."

    with contextlib.suppress(UsageLimitExceeded, UnexpectedModelBehavior):  # a small model may call again and again
        agent.run_sync(use.ASK_WEATHER, usage_limits=UsageLimits(request_limit=3))
    assert asked, "the tool was not called"


def structured() -> None:
    for output in (NativeOutput(Place), Place):  # a JSON schema, a required tool
        found = Agent(model, output_type=output, model_settings=SETTINGS).run_sync(use.QUESTION).output
        assert isinstance(found, Place)


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls, structured=structured)

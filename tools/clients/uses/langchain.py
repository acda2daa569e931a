"""langchain-openai, over TCP."""

from __future__ import annotations

import pydantic
import use
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=use.MODEL, base_url=use.URL, api_key=use.KEY, temperature=0, max_tokens=128)


class Place(pydantic.BaseModel, extra="forbid"):
    """A place in an answer."""

    city: str = pydantic.Field(max_length=24)
    capital: bool


@tool
def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"It is sunny in {city}."


def chat() -> None:
    use.check_answer(model.invoke(use.QUESTION).content)


def streaming() -> None:
    use.check_pieces([chunk.content for chunk in model.stream(use.QUESTION)])


def tool_calls() -> None:
    bound = model.bind_tools([get_weather])
    call = bound.invoke(use.ASK_WEATHER).tool_calls[0]
    use.check_call(call["name"], call["args"])
    whole = None
    for chunk in bound.stream(use.ASK_WEATHER):
        whole = chunk if whole is None else whole + chunk
    use.check_call(whole.tool_calls[0]["name"], whole.tool_calls[0]["args"])


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Place, method=method).invoke(use.QUESTION)
        assert isinstance(found, Place), (method, found)


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls, structured=structured)

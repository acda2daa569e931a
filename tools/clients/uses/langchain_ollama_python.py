"""langchain-ollama's ChatOllama, at the port for Ollama's clients, without a key."""

from __future__ import annotations

import pydantic
import use
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

OPTIONS = {"model": use.MODEL, "base_url": use.OLLAMA, "temperature": 0, "num_predict": 128}
model = ChatOllama(**OPTIONS, validate_model_on_init=True)


class Place(pydantic.BaseModel, extra="forbid"):
    """Names a city and says whether it is a capital."""

    city: str = pydantic.Field(max_length=24)
    capital: bool


@tool
def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"It is sunny in {city}."


bound = model.bind_tools([get_weather])


def chat() -> None:
    answer = model.invoke(use.QUESTION)
    use.check_answer(answer.content)
    assert answer.usage_metadata["output_tokens"] > 1, answer


def streaming() -> None:
    use.check_pieces([chunk.content for chunk in model.stream(use.QUESTION)])


def tool_calls() -> None:
    call = bound.invoke(use.ASK_WEATHER).tool_calls[0]
    use.check_call(call["name"], call["args"])
    whole = None
    for chunk in bound.stream(use.ASK_WEATHER):
        whole = chunk if whole is None else whole + chunk
    use.check_call(whole.tool_calls[0]["name"], whole.tool_calls[0]["args"])


def second_turn() -> None:
    asked = bound.invoke(use.ASK_WEATHER)
    result = ToolMessage(use.SUNNY, tool_call_id=asked.tool_calls[0]["id"])
    after = bound.invoke([HumanMessage(use.ASK_WEATHER), asked, result])
    assert after.content or after.tool_calls, after


def thinking() -> None:
    for reasoning in (True, False):
        answer = ChatOllama(**OPTIONS, reasoning=reasoning).invoke(use.QUESTION)
        thought = answer.additional_kwargs.get("reasoning_content")
        assert answer.content or thought, answer
        assert reasoning or not thought, answer


def structured() -> None:
    found = model.with_structured_output(Place, method="json_schema").invoke(use.QUESTION)
    assert isinstance(found, Place), found


def refusals() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    question = HumanMessage([{"type": "text", "text": "What is this?"}, picture])
    use.check_refused(lambda: model.invoke([question]), "text only, no images")


if __name__ == "__main__":
    use.run(
        chat=chat,
        streaming=streaming,
        tools=tool_calls,
        structured=structured,
        second_turn=second_turn,
        thinking=thinking,
        refusals=refusals,
    )

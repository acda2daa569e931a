"""LlamaIndex, over TCP: answers, tools and typed outputs."""

from __future__ import annotations

import pydantic
import use
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=use.MODEL,
    api_base=use.URL,
    api_key=use.KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=128,
)
QUESTION = [ChatMessage(role="user", content=use.QUESTION)]


class Place(pydantic.BaseModel, extra="forbid"):
    """A place in an answer."""

    city: str = pydantic.Field(max_length=24)
    capital: bool


def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    asked.append(city)
    return use.SUNNY


asked: list[str] = []


def chat() -> None:
    use.check_answer(model.chat(QUESTION).message.content)


def streaming() -> None:
    use.check_pieces([chunk.delta for chunk in model.stream_chat(QUESTION)])


def tool_calls() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = model.chat_with_tools([tool], user_msg=use.ASK_WEATHER)
    call = model.get_tool_calls_from_response(answer)[0]
    use.check_call(call.tool_name, call.tool_kwargs)
    *_, whole = model.stream_chat_with_tools([tool], user_msg=use.ASK_WEATHER)
    call = model.get_tool_calls_from_response(whole)[0]
    use.check_call(call.tool_name, call.tool_kwargs)
    model.predict_and_call([tool], user_msg=use.ASK_WEATHER)
    assert asked, "the tool was not called"


def structured() -> None:
    found = model.as_structured_llm(Place).chat(QUESTION).raw
    assert isinstance(found, Place), found


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls, structured=structured)

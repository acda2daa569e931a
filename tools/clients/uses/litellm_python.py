"""litellm, over TCP, as an OpenAI-compatible endpoint."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import asks the network for one

import litellm
import pydantic
import use

COMMON = {"model": f"openai/{use.MODEL}", "api_base": use.URL, "api_key": use.KEY, "temperature": 0}
tools = [{"type": "function", "function": use.WEATHER}]
ask = [{"role": "user", "content": use.ASK_WEATHER}]


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


def chat() -> None:
    use.check_answer(litellm.completion(messages=use.MESSAGES, **COMMON).choices[0].message.content)


def streaming() -> None:
    stream = litellm.completion(messages=use.MESSAGES, stream=True, **COMMON)
    use.check_pieces([chunk.choices[0].delta.content for chunk in stream])


def tool_calls() -> None:
    call = litellm.completion(messages=ask, tools=tools, **COMMON).choices[0].message.tool_calls[0]
    use.check_call(call.function.name, call.function.arguments)
    chunks = list(litellm.completion(messages=ask, tools=tools, stream=True, **COMMON))
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    use.check_call(call.function.name, call.function.arguments)


def structured() -> None:
    answer = litellm.completion(messages=use.MESSAGES, response_format=Place, max_tokens=128, **COMMON)
    Place.model_validate_json(answer.choices[0].message.content)


def too_long() -> None:
    """Expects the error at which applications retry with a shorter prompt."""
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 20000}], **COMMON)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


if __name__ == "__main__":
    use.run(chat=chat, streaming=streaming, tools=tool_calls, structured=structured, overflow=too_long)

"""instructor, over TCP: answers as pydantic models, by way of tools and of JSON schemas."""

from __future__ import annotations

import instructor
import openai
import pydantic
import use

plain = openai.OpenAI(base_url=use.URL, api_key=use.KEY)
ASKED = {"model": use.MODEL, "messages": use.MESSAGES, "temperature": 0, "max_tokens": 128, "max_retries": 0}


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


def by(mode: instructor.Mode) -> None:
    found = instructor.from_openai(plain, mode=mode).chat.completions.create(response_model=Place, **ASKED)
    assert isinstance(found, Place)


def streaming() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(client.chat.completions.create_partial(response_model=Place, **ASKED))
    assert len(parts) > 1
    assert parts[-1].city is not None


if __name__ == "__main__":
    use.run(
        streaming=streaming,
        tools=lambda: by(instructor.Mode.TOOLS),
        structured=lambda: by(instructor.Mode.JSON_SCHEMA),
    )

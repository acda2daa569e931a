"""Bodies of llama.cpp's and Ollama's own endpoints, whose sampling is not kept to OpenAI's bounds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, structs

from edgemoe.api.schema import Chat, Completion, RequestBody

LooseNumber = Annotated[float, Meta(ge=-1e6, le=1e6)]


def _kept_in_bounds(body: RequestBody) -> None:
    """Reads numbers beyond OpenAI's bounds as llama.cpp and Ollama do: as the nearest, and no penalty as 1."""
    if body.temperature is not None:
        structs.force_setattr(body, "temperature", max(0.0, body.temperature))
    for name in ("top_p", "min_p"):
        if (value := getattr(body, name)) is not None:
            structs.force_setattr(body, name, min(1.0, max(0.0, value)))
    if body.repetition_penalty is not None:
        least, most = 0.01, 100.0
        penalty = min(most, max(least, body.repetition_penalty)) if body.repetition_penalty > 0 else 1.0
        structs.force_setattr(body, "repetition_penalty", penalty)


class LooseChat(Chat, frozen=True, kw_only=True):
    """A chat whose sampling is not kept to OpenAI's bounds."""

    temperature: LooseNumber | None = None
    top_p: LooseNumber | None = None
    min_p: LooseNumber | None = None
    repetition_penalty: LooseNumber | None = None

    def __post_init__(self) -> None:
        _kept_in_bounds(self)


MAX_FILES = 1024  # beside the one that is edited


class OtherFile(msgspec.Struct, frozen=True):
    """A file beside the one that is edited."""

    text: str
    filename: str | None = "tmp"


class LlamaCompletion(Completion, frozen=True, kw_only=True):
    """The body of llama.cpp's POST /completion, whose sampling is not kept to OpenAI's bounds."""

    temperature: LooseNumber | None = None
    top_p: LooseNumber | None = None
    min_p: LooseNumber | None = None
    repetition_penalty: LooseNumber | None = None
    return_tokens: bool | None = None

    def __post_init__(self) -> None:
        _kept_in_bounds(self)


class Infill(LlamaCompletion, frozen=True, kw_only=True):
    """The body of POST /infill. `prompt` is the beginning of the text between prefix and suffix."""

    prompt: str | None = None  # type: ignore[assignment]
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Annotated[list[OtherFile], Meta(max_length=MAX_FILES)] | None = None

"""The part of a streamed answer that a client holds, from which another box goes on with the answer.

`edgemoe proxy` asks for a stream in frames: a line of JSON, then the bytes of some events. The line has the tokens that
these events show. A body may begin with the lines of all frames that came: the stream then begins behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.bounds import Seed, TokenId, Tokens

FRAMES = "application/vnd.edgemoe.frames"  # content type of such a stream
ASKS_FRAMES, HELD_BYTES = "x-edgemoe-frames", "x-edgemoe-held-bytes"  # headers of a request
MOST_CHOICES, MOST_FRAMES = 16_384, 1 << 20
FrameEnd = Literal["", "complete", "error", "unavailable"]  # "unavailable": another box may go on


class AnswerName(msgspec.Struct, frozen=True, kw_only=True):
    """Names one answer: its id, the second in which it began, and the seeds of its requests."""

    id: Annotated[str, Meta(pattern=r"^[a-z]{2,16}-[0-9a-f]{24}$")]
    created: Annotated[int, Meta(ge=0, le=1 << 40)]
    seeds: Annotated[tuple[Seed, ...], Meta(max_length=MOST_CHOICES)]


class ShownTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one choice that the events of a frame show, and why the choice ended, if it has."""

    choice: Annotated[int, Meta(ge=0, lt=MOST_CHOICES)]
    tokens: Tokens
    finish: Literal["", "stop", "length", "tool_calls"] = ""


Shown = Annotated[tuple[ShownTokens, ...], Meta(max_length=MOST_CHOICES)]


class FrameHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The line before the bytes of a frame. The first one has the content type; the first with tokens, the answer."""

    bytes: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    shown: Shown = ()
    answer: AnswerName | None = None
    content_type: Annotated[str, Meta(max_length=128)] = ""
    end: FrameEnd = ""


class HeldAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an answer that a client holds: the answer's name, and the tokens of each frame."""

    answer: AnswerName
    frames: Annotated[tuple[Shown, ...], Meta(max_length=MOST_FRAMES)]


def read_held(headers: Mapping[str, str], raw: bytes) -> tuple[HeldAnswer | None, bytes]:
    """Returns the held part that a body begins with, if its headers say so, and the body. Raises InvalidRequest."""
    size = headers.get(HELD_BYTES, "")
    if not size:
        return None, raw
    if not (size.isascii() and size.isdigit()) or len(size) > 12 or int(size) > len(raw):
        raise InvalidRequest(f"{HELD_BYTES}: {size[:20]!r} is no number of bytes of this body", code="invalid_held")
    try:
        return msgspec.json.decode(raw[: int(size)], type=HeldAnswer), raw[int(size) :]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the held part of the answer: {error}", code="invalid_held") from error


def check_held(held: HeldAnswer, most_tokens: Sequence[int], vocab: int) -> list[list[int]]:
    """Returns the held tokens of each choice, which may have `most_tokens`. Raises InvalidRequest for any others."""
    if len(held.answer.seeds) != len(most_tokens):
        raise InvalidRequest(
            f"held: {len(held.answer.seeds)} seeds for {len(most_tokens)} choices", code="invalid_held"
        )
    tokens: list[list[TokenId]] = [[] for _ in most_tokens]
    for frame in held.frames:
        for shown in frame:
            if shown.choice >= len(tokens) or max(shown.tokens, default=0) >= vocab:
                raise InvalidRequest("held: a choice or a token that this model does not have", code="invalid_held")
            tokens[shown.choice] += shown.tokens
    for mine, most in zip(tokens, most_tokens, strict=True):
        if len(mine) > most:
            raise InvalidRequest(f"held: {len(mine)} tokens of at most {most}", code="invalid_held")
    return tokens


def end_of(error: RequestError) -> FrameEnd:
    """Returns how a stream ends by an error."""
    return "unavailable" if error.status == 503 else "error"


def frame(head: FrameHead, body: bytes) -> bytes:
    """Returns a frame with this body."""
    return msgspec.json.encode(msgspec.structs.replace(head, bytes=len(body))) + b"\n" + body

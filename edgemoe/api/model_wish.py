"""Reads which of several models a body asks for, before the body's endpoint decodes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from edgemoe.api.schema import MAX_ANSWERS
from edgemoe.api.spellings import bare_scalar, bare_truth
from edgemoe.errors import InvalidRequest
from edgemoe.types.bounds import MAX_MODELS

UNITS_S = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|\u00b5s|ms|s|m|h)")  # of a duration as Go writes it
DURATION = re.compile(f"(?:{PART.pattern})+")
NUMBER = re.compile(r"\d+(?:\.\d*)?")  # of seconds
LONGEST_CHARS = 64
CHOICES = re.compile(rb"([0-9]{1,3})(?:\.0*)?")


@dataclass(frozen=True, slots=True)
class ModelWish:
    """The model that a request names, and how long it shall stay loaded."""

    name: str | None = None
    keep_s: float | None = None  # after the request; -1: as long as nothing else needs its memory
    unloads: bool = False  # the request has nothing to answer: it ends the model's stay
    is_stream: bool = False
    others: tuple[str, ...] = ()  # models that will do where that one is not served
    choices: int = 1  # of each prompt


NO_WISH = ModelWish()
NOTHING = msgspec.Raw()
EMPTY = (b"", b"null", b'""', b"[]")  # parts of a request that only loads or unloads, as JSON


class _Named(msgspec.Struct):
    models: msgspec.Raw = NOTHING
    model: str | None = None
    name: str | None = None  # an earlier name of `model` in Ollama's API
    stream: msgspec.Raw = NOTHING
    n: msgspec.Raw = NOTHING
    n_cmpl: msgspec.Raw = NOTHING  # llama.cpp's name of `n`
    extra_body: msgspec.Raw = NOTHING
    ttl: Any = None  # LM Studio's, seconds
    keep_alive: Any = None  # Ollama's


class _Kept(_Named):
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    suffix: msgspec.Raw = NOTHING


def read_wish(raw: bytes) -> ModelWish:
    """Returns the model that a body names; none of a body that is no object, which its endpoint refuses.

    Raises InvalidRequest for a wrong duration.
    """
    try:
        body = msgspec.json.decode(raw, type=_Named)
        more = msgspec.json.decode(body.extra_body, type=_Named) if bytes(body.extra_body)[:1] == b"{" else _Named()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return NO_WISH
    stream, models = bytes(body.stream) or bytes(more.stream), bytes(body.models) or bytes(more.models)
    kept = ((name, getattr(one, name)) for one in (body, more) for name in ("ttl", "keep_alive"))
    keep_s = next((seconds_of(value, name) for name, value in kept if value is not None), None)
    return ModelWish(
        body.model or more.model,
        keep_s,
        is_stream=bare_truth(stream) == b"true",
        others=_others(models),
        choices=max(_count(bytes(one)) for one in (body.n, body.n_cmpl, more.n, more.n_cmpl)),
    )


def _count(raw: bytes) -> int:
    """Returns a number of choices; 1 where it is no such number, which its endpoint refuses."""
    found = CHOICES.fullmatch(bare_scalar(raw))
    return int(found[1]) if found and 1 <= int(found[1]) <= MAX_ANSWERS else 1


def _others(raw: bytes) -> tuple[str, ...]:
    """Returns OpenRouter's list of models; nothing where it is no such list, which its endpoint refuses."""
    try:
        return tuple(msgspec.json.decode(raw, type=list[str])[:MAX_MODELS]) if raw[:1] == b"[" else ()
    except (msgspec.MsgspecError, RecursionError):
        return ()


def read_ollama_wish(raw: bytes) -> ModelWish:
    """Returns the model and the `keep_alive` of a body of Ollama's API. Raises InvalidRequest for a wrong duration."""
    try:
        body = msgspec.json.decode(raw, type=_Kept)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return NO_WISH
    keep_s = None if body.keep_alive is None else seconds_of(body.keep_alive)
    is_empty = all(bytes(part) in EMPTY for part in (body.messages, body.prompt, body.suffix))
    is_stream = bare_truth(bytes(body.stream)) != b"false"
    return ModelWish(body.model or body.name, keep_s, unloads=is_empty and keep_s == 0, is_stream=is_stream)


def seconds_of(keep_alive: Any, name: str = "keep_alive") -> float:
    """Returns the seconds of a `keep_alive`; -1 of any negative one. Raises InvalidRequest, naming the field."""
    if isinstance(keep_alive, float | int):
        return float(keep_alive) if keep_alive >= 0 else -1.0
    text = str(keep_alive).strip()[:LONGEST_CHARS]
    plain = text.removeprefix("-")
    if NUMBER.fullmatch(plain):
        seconds = float(plain)
    elif DURATION.fullmatch(plain):
        seconds = sum(float(number) * UNITS_S[unit] for number, unit in PART.findall(plain))
    else:
        raise InvalidRequest(f'{name}: write seconds, or a duration as in "5m" or "1h30m"', param=name)
    return -1.0 if text.startswith("-") and seconds else seconds

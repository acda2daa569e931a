"""Helpers of the clients' scripts, which run in the clients' own environments: standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

URL, KEY, OLLAMA, SOCKET, MODEL, TOKENIZER, FOLDER = (
    os.environ[f"EDGEMOE_{name}"] for name in ("URL", "KEY", "OLLAMA", "SOCKET", "MODEL", "TOKENIZER", "FOLDER")
)
WHY_CHARS = 400
QUESTION, ANSWER = "What is the capital of France?", "Paris"
ASK_WEATHER = "What is the weather in Paris?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Tells the weather in a city.", "parameters": CITY}
SUNNY = "It is sunny, 21 degrees."
MESSAGES = [{"role": "user", "content": QUESTION}]


def run(**features: Callable[[], object]) -> None:
    """Calls each feature, which raises if it fails, and prints a line of JSON with its result."""
    for name, call in features.items():
        try:
            call()
            why = ""
        except BaseException as error:
            why = f"{type(error).__name__}: {str(error)[-WHY_CHARS:]}"
        print(json.dumps({"feature": name, "why": why}), flush=True)


def check_answer(text: str | None) -> None:
    """Asserts the answer to QUESTION."""
    assert ANSWER in (text or ""), f"{ANSWER} is not in the answer {text!r}"


def check_pieces(pieces: Sequence[str | None]) -> None:
    """Asserts the answer to QUESTION, streamed in several pieces."""
    said = [piece for piece in pieces if piece]
    check_answer("".join(said))
    assert len(said) > 1, f"streamed in one piece: {said}"


def check_refused(call: Callable[[], object], *words: str) -> None:
    """Raises AssertionError unless a call fails with an error that says all of `words`."""
    try:
        call()
    except Exception as error:
        said = str(error)
    else:
        said = "nothing, for it was not refused"
    assert all(word in said for word in words), said


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    """Asserts the call after ASK_WEATHER; the city depends on the model's understanding of the question."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    said = f"called {name}({found})"
    assert name == "get_weather", said
    assert isinstance(found.get("city"), str), said

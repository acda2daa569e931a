"""What the clients' scripts share. Each runs in its client's own environment, so only the standard library is here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

URL, KEY, SOCKET, MODEL, TOKENIZER, FOLDER = (
    os.environ[f"EDGEMOE_{name}"] for name in ("URL", "KEY", "SOCKET", "MODEL", "TOKENIZER", "FOLDER")
)
WHY_CHARS = 400
QUESTION, ANSWER = "What is the capital of France?", "Paris"
ASK_WEATHER = "What is the weather in Paris?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Tells the weather in a city.", "parameters": CITY}
SUNNY = "It is sunny, 21 degrees."
MESSAGES = [{"role": "user", "content": QUESTION}]


def run(**features: Callable[[], object]) -> None:
    """Calls each and prints a line of JSON for it: whether it went well, and why not. A feature raises if not."""
    for name, call in features.items():
        try:
            call()
            why = ""
        except BaseException as error:
            why = f"{type(error).__name__}: {str(error)[-WHY_CHARS:]}"
        print(json.dumps({"feature": name, "why": why}), flush=True)


def check_answer(text: str | None) -> None:
    """The answer to QUESTION."""
    assert ANSWER in (text or ""), f"{ANSWER} is not in the answer {text!r}"


def check_pieces(pieces: Sequence[str | None]) -> None:
    """The answer to QUESTION as it was streamed."""
    said = [piece for piece in pieces if piece]
    check_answer("".join(said))
    assert len(said) > 1, f"streamed in one piece: {said}"


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    """The call that ASK_WEATHER leads to; which city is asked for depends on how well the model listens."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    said = f"called {name}({found})"
    assert name == "get_weather", said
    assert isinstance(found.get("city"), str), said

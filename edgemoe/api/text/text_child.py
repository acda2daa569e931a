"""The process that renders and tokenizes prompts, within bounds. Its argument is the model's directory."""

from __future__ import annotations

import signal
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from edgemoe.api.text.bounded_text import (
    IDS,
    MAX_PROMPT_CHARS,
    MEMORY_BYTES,
    SHORT_CHARS,
    TEXT_S,
    TEXT_S_PER_BYTE,
    EncodeQuestion,
    RenderQuestion,
    TextAnswer,
)
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import CheckpointError, InvalidRequest
from edgemoe.guard import refuse_pickle
from edgemoe.heap import give_back
from edgemoe.helper.serving import bound_addresses, bound_memory, serve

LOAD_S = 20.0  # of a processor, for reading the model's files; jinja works constants out, too
LOAD_BYTES = 3 << 30
LONG_CHARS = 1 << 20  # of a text after which memory is given back


class Prompts:
    """Renders and tokenizes with one model's files."""

    def __init__(self, model: TextModel) -> None:
        """Compiles the template. Raises CheckpointError where it is not valid."""
        self._model = model
        if model.template is not None:
            _ = model.template.compiled
        model.encode("a", add_special_tokens=False)  # which starts its thread

    def answer(self, asked: RenderQuestion | EncodeQuestion) -> TextAnswer:
        """Returns the prompt's text, or its tokens."""
        try:
            if isinstance(asked, RenderQuestion):
                text = self._rendered(asked)
                short = len(text) <= SHORT_CHARS
                whole = self._model.encode(text, False) if short else []
                return TextAnswer(asked.number, text=text, is_encoded=short, ids=array(IDS, whole).tobytes())
            ids = self._model.encode(asked.text, asked.add_special_tokens, asked.most_tokens)
        except InvalidRequest as error:
            return TextAnswer(asked.number, refusal=str(error) or "the prompt cannot be made", param=error.param)
        found = TextAnswer(asked.number, ids=array(IDS, ids).tobytes())
        if len(asked.text) > LONG_CHARS:
            give_back()
        return found

    def _rendered(self, asked: RenderQuestion) -> str:
        assert self._model.template is not None, "its parent has it, too"
        messages, tools, extra = map(msgspec.json.decode, (asked.messages, asked.tools, asked.extra))
        begin = asked.add_generation_prompt
        text = self._model.template.render(messages, tools, add_generation_prompt=begin, extra=extra)
        if len(text) > MAX_PROMPT_CHARS:
            raise InvalidRequest(
                f"messages: the model's chat template makes {len(text)} characters of them, more than the "
                f"{MAX_PROMPT_CHARS} allowed",
                param="messages",
            )
        return text


def _answering(directory: Path) -> Callable[[RenderQuestion | EncodeQuestion], TextAnswer]:
    """Returns what answers questions; where the model's files cannot be read, with why."""
    try:
        return Prompts(TextModel(directory)).answer
    except CheckpointError as error:
        why = str(error)
        return lambda asked: TextAnswer(asked.number, refusal=why)


def main() -> None:
    """Answers its parent's questions."""
    bound_addresses(LOAD_BYTES)
    signal.setitimer(signal.ITIMER_PROF, LOAD_S)
    answer = _answering(Path(sys.argv[1]))
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    refuse_pickle()
    bound_memory(MEMORY_BYTES)
    kinds: Any = RenderQuestion | EncodeQuestion
    serve(sys.stdin.buffer, sys.stdout.buffer, kinds, answer, TEXT_S, TEXT_S_PER_BYTE)


if __name__ == "__main__":
    main()

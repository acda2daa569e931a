"""The process that renders and tokenizes prompts, within bounds. Its argument is the model's directory."""

from __future__ import annotations

import resource
import signal
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec

from edgemoe.api.text.bounded_text import (
    IDS,
    MAX_PROMPT_CHARS,
    MEMORY_BYTES,
    TEXT_S,
    EncodeQuestion,
    RenderQuestion,
    TextAnswer,
)
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.guard import refuse_pickle
from edgemoe.heap import give_back
from edgemoe.helper.serving import bound_memory, serve

LOAD_S = 60.0  # of a processor, for reading the model's files
LOAD_BYTES = 8 << 30
LONG_CHARS = 1 << 20  # of a text after which memory is given back


class Prompts:
    """Renders and tokenizes with one model's files."""

    def __init__(self, model: TextModel) -> None:
        self._model = model

    def answer(self, asked: RenderQuestion | EncodeQuestion) -> TextAnswer:
        """Returns the prompt's text, or its tokens."""
        try:
            if isinstance(asked, RenderQuestion):
                return TextAnswer(asked.number, text=self._rendered(asked))
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


def main() -> None:
    """Answers its parent's questions."""
    resource.setrlimit(resource.RLIMIT_AS, (LOAD_BYTES, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, LOAD_S)
    model = TextModel(Path(sys.argv[1]))
    model.encode("a", add_special_tokens=False)  # which starts its thread
    prompts = Prompts(model)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    refuse_pickle()
    bound_memory(MEMORY_BYTES)
    kinds: Any = RenderQuestion | EncodeQuestion
    serve(sys.stdin.buffer, sys.stdout.buffer, kinds, prompts.answer, TEXT_S)


if __name__ == "__main__":
    main()

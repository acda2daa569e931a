"""Renders and tokenizes prompts in child processes with bounded time and memory; the child is this module's `main`.

Templates and tokenizers come with a checkpoint: a template is a program, and a tokenizer's regular expressions may take
any time. A prompt beyond `TEXT_S` or `MEMORY` ends its child process and fails alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgemoe.api.text.chat_template import ChatTemplate
from edgemoe.api.text.tokenizer import LETTERS, TextModel
from edgemoe.errors import CheckpointError, EngineUnavailable, HelperFailed, HelperMissing, InvalidRequest
from edgemoe.guard import refuse_pickle
from edgemoe.heap import give_back
from edgemoe.helper.child_process import (
    MAX_FRAME_BYTES,
    HelperPool,
    MemoryBound,
    NumberedMessage,
    bound_addresses,
    serve,
)
from edgemoe.types.bounds import Count
from edgemoe.types.json_object import Json

MODULE = "edgemoe.api.text.bounded_text"
LOAD_S = 20.0  # of a processor, for reading the model's files; jinja works constants out, too
TEXT_S = 2.0  # of a processor, for one prompt
TEXT_S_PER_BYTE = 2e-6  # more for each byte of a prompt: four times the usual
NICENESS = 5  # of the processes: streams come first
DEADLINE_S = 60.0  # by the clock, on a machine that does much else
LOAD_BYTES = 1 << 30  # for these files; a tokenizer of 262,144 tokens takes 390 MiB
MEMORY = MemoryBound(256 << 20, 256, 1 << 30)  # beyond these files; English takes 110 to 130 bytes for each of its own
LARGE_BYTES = 1 << 20  # of a question; larger ones are answered one at a time, for their memory
MAX_PROMPT_CHARS = 16 << 20  # that a template may make
SHORT_CHARS = 32 << 10  # of a prompt that is tokenized as it is rendered, which saves a question
IDS = "I"  # 32 bits


class RenderQuestion(NumberedMessage, frozen=True, tag="render"):
    """Asks for a prompt of messages, and its tokens where it is short. JSON, which has integers of any length."""

    messages: bytes
    tools: bytes
    extra: bytes
    add_generation_prompt: bool

    @property
    def length(self) -> int:
        return len(self.messages) + len(self.tools) + len(self.extra)


class EncodeQuestion(NumberedMessage, frozen=True, tag="encode"):
    """Asks for the tokens of a text."""

    text: str
    add_special_tokens: bool
    most_tokens: Count | None

    @property
    def length(self) -> int:
        return len(self.text)


class TextAnswer(NumberedMessage, frozen=True):
    """Answers with a text or token ids, or with why there are none."""

    text: str = ""
    is_encoded: bool = False
    ids: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)] = b""
    refusal: str = ""
    param: str | None = None


def text_command(directory: Path, load_s: float = LOAD_S, text_s: float = TEXT_S) -> Sequence[str]:
    """Returns the command of a process that renders and tokenizes for the model in `directory`.

    It may take `load_s` of a processor to read the model's files, and `text_s` for a short prompt.
    """
    return (sys.executable, "-m", MODULE, str(directory), str(load_s), str(text_s))


class BoundedText:
    """Owns the processes. `close` after use. One event loop; `of` is used on threads that it does not run on."""

    def __init__(self, command: Sequence[str], deadline_s: float = DEADLINE_S) -> None:
        self.helpers = HelperPool(command, deadline_s)

    def of(self, model: TextModel, principal: str) -> TextModel:
        """Returns the model as the principal's requests use it, on threads. Must be called on the event loop."""
        return BoundedModel(model, self.helpers, principal)

    async def check(self) -> None:
        """Has a process read the model's files. Raises CheckpointError where it cannot within its bounds."""
        try:
            answer = await self.helpers.ask(EncodeQuestion(0, "a", False, None), TextAnswer)
        except HelperFailed as error:
            raise CheckpointError(
                f"the model's tokenizer and chat template cannot be read within bounds: {error}; "
                "pull or pack the model again"
            ) from error
        if answer.refusal:
            raise CheckpointError(answer.refusal)

    async def close(self) -> None:
        """Ends the child processes."""
        await self.helpers.close()


class BoundedModel(TextModel):
    """A text model that has the prompts of one principal made in bounds."""

    def __init__(self, model: TextModel, helpers: HelperPool, principal: str) -> None:
        vars(self).update(vars(model))  # which are not changed
        self._helpers, self._principal = helpers, principal
        self._loop = asyncio.get_running_loop()
        self.rendered = TextAnswer(0)  # the last prompt
        if model.template is not None:
            self.template = BoundedTemplate(model.template, self)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("it encodes in another process")

    def encode(self, text: str, add_special_tokens: bool, most_tokens: int | None = None) -> list[int]:
        known = self.rendered
        is_whole = most_tokens is None or len(text) <= LETTERS * most_tokens  # else fewer tokens may do
        if known.is_encoded and text is known.text and not add_special_tokens and is_whole:
            return array(IDS, known.ids).tolist()
        return array(IDS, self.ask(EncodeQuestion(0, text, add_special_tokens, most_tokens), "prompt").ids).tolist()

    def ask(self, asked: RenderQuestion | EncodeQuestion, what: str) -> TextAnswer:
        """Returns the answer to a question about `what`. Raises InvalidRequest, EngineUnavailable."""
        is_large = asked.length > LARGE_BYTES
        asking = self._helpers.ask(asked, TextAnswer, principal=self._principal, is_large=is_large)
        try:
            answer = asyncio.run_coroutine_threadsafe(asking, self._loop).result()
        except HelperMissing as error:
            raise EngineUnavailable(f"the process that makes prompts {error}; try again") from error
        except HelperFailed as error:
            why = f"{what}: to make a prompt of this takes more than {TEXT_S:g} s or {MEMORY.fixed_bytes >> 20} MiB"
            raise InvalidRequest(why, param=what, code="prompt_too_complex") from error
        if answer.refusal:
            raise InvalidRequest(answer.refusal, param=answer.param)
        return answer


class BoundedTemplate(ChatTemplate):
    """A chat template that another process renders."""

    def __init__(self, template: ChatTemplate, model: BoundedModel) -> None:
        vars(self).update(vars(template))
        self._model = model

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] | None = None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        given, shown, more = (msgspec.json.encode(part) for part in (messages, tools, extra))
        asked = RenderQuestion(0, given, shown, more, add_generation_prompt)
        self._model.rendered = answer = self._model.ask(asked, "messages")
        return answer.text


LONG_CHARS = 1 << 20  # of a text after which memory is given back


class PromptMaker:
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
    """Returns the function that answers questions; if the model's files cannot be read, it answers with the reason."""
    try:
        return PromptMaker(TextModel(directory)).answer
    except CheckpointError as error:
        why = str(error)
        return lambda asked: TextAnswer(asked.number, refusal=why)


def main() -> None:
    """Answers its parent's questions."""
    os.nice(NICENESS)
    directory, load_s, text_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    bound_addresses(LOAD_BYTES)
    signal.setitimer(signal.ITIMER_PROF, load_s)
    answer = _answering(directory)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    refuse_pickle()
    kinds: Any = RenderQuestion | EncodeQuestion
    serve(sys.stdin.buffer, sys.stdout.buffer, kinds, answer, text_s, TEXT_S_PER_BYTE, MEMORY)


if __name__ == "__main__":
    main()

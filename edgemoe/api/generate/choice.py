"""Turns one choice's emissions into what an app sees: text, reasoning, tool calls, logprobs, finish reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgemoe.api.dialects.dialect import HERMES, Marks
from edgemoe.api.dialects.output_parser import Parser
from edgemoe.api.dialects.tool_calls import Pieces
from edgemoe.api.text.detokenize import Detokenizer, Vocabulary
from edgemoe.api.text.stop_strings import Stops
from edgemoe.types.request import Emission, TokenLogprob


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `finish` is "", "stop", "length" or "tool_calls"."""

    choice: int
    pieces: Pieces = field(default_factory=Pieces)
    logprobs: list[Emission] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # from the second token on
    finish: str = ""

    @property
    def text(self) -> str:
        """Returns the text of the answer."""
        return self.pieces.text("text")

    @property
    def reasoning(self) -> str:
        """Returns the text of the reasoning."""
        return self.pieces.text("reasoning")

    def add(self, other: Delta) -> None:
        """Appends what follows this delta."""
        self.pieces.extend(other.pieces)
        self.logprobs += other.logprobs
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs
        self.finish = self.finish or other.finish

    def __bool__(self) -> bool:
        return bool(self.pieces or self.finish)


class Choice:
    """Holds the front's state of one choice, which follows from the tokens taken so far."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        stops: Stops | None = None,
        marks: Marks | None = None,
        prompt_only: bool = False,
    ):
        """Starts a choice. With `prompt_only` it shows no token, only the log probabilities of the prompt.

        These arrive with the first token, which is then dropped.
        """
        self.index = index
        self._prompt_only = prompt_only
        self.tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.finish = ""
        marks = marks or Marks(HERMES)
        self._detokenizer = Detokenizer(vocabulary, shown=marks.names)
        self._stops = stops or Stops()
        self._parser = Parser(marks, vocabulary.special)
        self._called = False
        self._delta = Delta(index)

    @property
    def stop_string(self) -> str:
        """Returns the stop string that ended the text, or ""."""
        return self._stops.matched

    def take(self, emission: Emission) -> bool:
        """Adds one emission. Must not be called once `finish` is set.

        Returns True where the text has ended in a way that the engine cannot know: a stop string, the last tool call.
        """
        if emission.index == 0:
            self.cached_tokens = emission.cached_tokens
            self._delta.prompt_logprobs = emission.prompt_logprobs
        if emission.token is not None and not self._prompt_only:
            self._token(emission, emission.token)
        if emission.finish and not self.finish:
            rest = "" if self._stops.stopped else self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
            self._end("length" if self._prompt_only else emission.finish, rest)
        return bool(self.finish) and not emission.finish

    def delta(self) -> Delta:
        """Returns what is new since the last call; falsy where there is nothing to show yet."""
        if not self._delta:
            return Delta(self.index)
        delta, self._delta = self._delta, Delta(self.index)
        return delta

    def _token(self, emission: Emission, token: int) -> None:
        self.tokens += 1
        self.reasoning_tokens += self._parser.reasoning
        if emission.logprob is not None:
            self._delta.logprobs.append(emission)
        self._add(self._parser.feed(self._stops.feed(self._detokenizer.feed(token))))
        if self._stops.stopped or self._parser.done:
            self._end("stop", "")

    def _end(self, reason: str, rest: str) -> None:
        self._add(self._parser.feed(rest))
        if not self._parser.done:
            self._add(self._parser.flush())
        self.finish = self._delta.finish = "tool_calls" if self._called and reason == "stop" else reason

    def _add(self, pieces: Pieces) -> None:
        self._called = self._called or any(piece.ended == "complete" for piece in pieces)
        self._delta.pieces.extend(pieces)

"""Has grammars checked in a process of their own, because a schema of a kilobyte can take minutes and gigabytes.

What takes longer than `CHECK_S` or more memory than the process may have is refused, and delays only those requests
whose grammars are to be checked, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edgemoe.api.generate.grammar import GrammarChoice
from edgemoe.errors import EngineUnavailable, HelperFailed, HelperMissing, InvalidRequest
from edgemoe.helper.frames import Numbered
from edgemoe.helper.process import HelperProcess
from edgemoe.types.bounds import Grammar

COMMAND = (sys.executable, "-m", "edgemoe.api.generate.grammar_child")
CHECK_S = 5.0  # that checking one grammar may take
MEMORY_BYTES = 256 << 20


class GrammarQuestion(Numbered, frozen=True):
    """Asks whether a Lark grammar can be honoured; `term`, where there is one, has to match some text."""

    lark: str
    term: str = ""


class GrammarVerdict(Numbered, frozen=True):
    """Answers with the serialised grammar, or with why it cannot be honoured."""

    grammar: str = ""
    reason: str = ""
    unmatched: bool = False  # no text matches the term


class GrammarChecker:
    """Owns the process, which is started with the first grammar. `close` after use. One event loop."""

    def __init__(self, command: Sequence[str] = COMMAND, deadline_s: float = CHECK_S) -> None:
        self._helper = HelperProcess(command, deadline_s)

    @property
    def busy(self) -> bool:
        """Returns whether a grammar is being checked."""
        return self._helper.busy

    async def first(self, choice: GrammarChoice | None) -> Grammar | None:
        """Returns the first grammar of `choice` that can be honoured; None where there is none and need not be.

        Raises InvalidRequest where there has to be one, EngineUnavailable where no process can be started.
        """
        if choice is None:
            return None
        refusal: InvalidRequest | None = None
        for lark in choice.larks:
            try:
                return await self._checked(lark, choice)
            except InvalidRequest as error:
                refusal = error
        if refusal is not None and not choice.optional:
            raise refusal
        return None

    async def close(self) -> None:
        """Ends the process."""
        await self._helper.close()

    async def _checked(self, lark: str, choice: GrammarChoice) -> Grammar:
        param = choice.param
        try:
            verdict = await self._helper.ask(GrammarQuestion(0, lark, choice.term), GrammarVerdict, lambda _: True)
        except HelperMissing as error:
            raise EngineUnavailable(f"the process that checks grammars {error}; try again") from error
        except HelperFailed as error:
            why = f"{param} is too complex: to check it takes more than {CHECK_S:g} s or {MEMORY_BYTES >> 20} MiB"
            raise InvalidRequest(why, param=param, code="invalid_grammar") from error
        return judged(verdict, param)


def judged(verdict: GrammarVerdict, param: str) -> Grammar:
    """Returns the grammar. Raises InvalidRequest where it cannot be honoured."""
    if verdict.unmatched:
        param = f"{param}.regex"
        raise InvalidRequest(f"{param}: no text matches this", param=param, code="invalid_grammar")
    if verdict.reason:
        raise InvalidRequest(f"{param} cannot be honoured: {verdict.reason}", param=param, code="invalid_grammar")
    return verdict.grammar

"""Constrains output by grammars: llguidance says which tokens may come next.

A replayed request's state is rebuilt from its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from edgemoe.errors import InvalidRequest

CACHED = 64  # compiled grammars kept; apps send the same schema again and again


class Matcher:
    """Tracks one sequence's position in its grammar."""

    def __init__(self, start: LLMatcher, emitted: Sequence[int]) -> None:
        """Starts after the tokens emitted so far. Raises InvalidRequest where they do not follow the grammar."""
        self._matcher = start.deep_copy()
        for token in emitted:
            self.accept(token)

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Sets bit t of `mask` [V / 32] for each token t that may come next. Raises InvalidRequest."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """Advances by `token`. Raises InvalidRequest where the grammar does not allow it."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """Returns whether the grammar is complete, so that only the end may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {_reason(self._matcher)}", code="invalid_grammar")


class Grammars:
    """Compiles grammars on a thread of its own, one by one: a complex one delays those after it, but no step."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str, emitted: Sequence[int]) -> Future[Matcher]:
        """Returns a future matcher that has accepted the tokens emitted so far. The future raises InvalidRequest."""
        return self._thread.submit(lambda: Matcher(self._compile(grammar), emitted))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0)
            if compiled.is_error():
                raise InvalidRequest(f"the grammar is not valid: {_reason(compiled)}", code="invalid_grammar")
            self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)
        return compiled


def _reason(matcher: LLMatcher) -> str:
    """What is wrong, without the parser's state that follows it."""
    return str(matcher.get_error()).partition("\n")[0]

"""Drafts the next tokens of a text by looking up where its last tokens occurred before (prompt look-up).

The text is the request's expected text, if it has one, then prompt and output. Looking up takes microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Row
from typing import NamedTuple

LEAST, LONGEST = 2, 32  # tokens of a match, which is not followed further back
LOOKS = 16  # earlier occurrences that are compared
BORDER = -1  # between the expected text and the prompt: no draft crosses it
MOST_INDEXED = 1 << 16  # tokens of a text, its last ones, when the look-up begins


class Draft(NamedTuple):
    """Drafted tokens, and how many tokens before them match the end of the text."""

    tokens: tuple[int, ...]
    match: int


NO_DRAFT = Draft((), 0)


class NgramLookup:
    """Indexes a growing text by pairs of tokens. Each pair leads to its occurrences, the latest one first."""

    def __init__(self, expected: Row[int], text: Row[int]) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # pair -> the place behind it
        self._earlier: list[int] = []  # of each place: the one of the same pair before it, or -1
        self._seen = max(0, len(text) - MOST_INDEXED)  # tokens of the text so far
        if expected:
            self._append([*expected[-MOST_INDEXED:], BORDER])
        self.follow(text)

    def follow(self, text: Row[int]) -> None:
        """Indexes the tokens that the text has gained."""
        self._append(text[self._seen :])
        self._seen = len(text)

    def draft(self, most: int) -> Draft:
        """Returns at most `most` tokens that followed the longest match of the text's end, the latest of equals.

        A draft that reaches the text's end goes on periodically.
        """
        tokens, best, place = self._tokens, 0, -1
        if most < 1 or len(tokens) < LEAST:
            return NO_DRAFT
        here = self._latest.get((tokens[-2], tokens[-1]), -1)
        for _ in range(LOOKS):
            if here < 0 or best == LONGEST:
                break
            if tokens[here] != BORDER and (match := self._match(here)) > best:
                best, place = match, here
            here = self._earlier[here]
        if place < 0:
            return NO_DRAFT
        period = len(tokens) - place
        found = [tokens[place + n % period] for n in range(most)]
        if BORDER in found:
            del found[found.index(BORDER) :]
        return Draft(tuple(found), best) if found else NO_DRAFT

    def _append(self, tokens: Iterable[int]) -> None:
        known, latest, earlier = self._tokens, self._latest, self._earlier
        for token in tokens:
            place, before = len(known), -1
            if place >= LEAST:
                pair = known[-2], known[-1]
                before = latest.get(pair, -1)
                latest[pair] = place
            earlier.append(before)
            known.append(token)

    def _match(self, place: int) -> int:
        """Counts the tokens before `place` that equal the text's last ones."""
        tokens, end = self._tokens, len(self._tokens)
        match = LEAST
        while match < min(LONGEST, place) and tokens[place - match - 1] == tokens[end - match - 1] != BORDER:
            match += 1
        return match

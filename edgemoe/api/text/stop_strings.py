"""Matches stop strings across chunks of text, and measures how much of a text may begin a tag."""

from __future__ import annotations

from collections.abc import Iterable


def held_back(text: str, marks: Iterable[str]) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of one of `marks`."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


class Stops:
    """Passes text on up to the first complete stop string, and holds back what may become one."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.matched = ""  # the stop string that has ended the text
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string has ended the text."""
        return bool(self.matched)

    def feed(self, text: str) -> str:
        """Adds `text`. Returns the text, held back or new, that cannot belong to a stop string."""
        if not self.strings or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.strings if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = held_back(text, self.strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

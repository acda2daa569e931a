"""Matches stop strings across chunks of text."""

from __future__ import annotations

from edgemoe.api.dialects.growing_text import held_back


class Stops:
    """Passes text on up to the first complete stop string, and holds back what may become one."""

    def __init__(self, strings: tuple[str, ...] = (), unsearched: int = 0) -> None:
        """Looks for `strings` in what comes after the first `unsearched` texts, as vLLM does for `min_tokens`."""
        self.strings = strings
        self._unsearched = unsearched
        self.matched = ""  # the stop string that has ended the text
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string has ended the text."""
        return bool(self.matched)

    def feed(self, text: str) -> str:
        """Adds `text`. Returns the text, held back or new, that cannot belong to a stop string."""
        self._unsearched -= 1
        if not self.strings or self.stopped or self._unsearched >= 0:
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

"""Suggests the nearest known word for an unknown command, action or option."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from edgemoe.cli.parser.options import CommandParser

MEANT = {  # what other programs call it -> what does it here
    "run": "edgemoe serve",
    "start": "edgemoe serve",
    "list": "edgemoe models",
    "ls": "edgemoe models",
    "ps": "edgemoe status",
    "rm": "edgemoe models remove",
    "stop": "Ctrl-C where `edgemoe serve` runs, or systemctl stop edgemoe",
}
SHOWN_CHARS = 60  # of a word in an error


def unknown_word(parser: CommandParser, words: Sequence[str]) -> str:
    """Returns an error text for the first unknown command, action or option; "" where all are known."""
    rest = list(words)
    while inner := dict(parser.inner()):
        if not rest or rest[0].startswith("-"):
            return ""  # an option of all commands, or a missing word, which argparse names
        word = rest.pop(0)
        if word not in inner:
            what = "action" if parser.prog.count(" ") else "command"
            return f"no {what} {_shown(word)}{_nearest(word, list(inner), parser.prog)}"
        parser = inner[word]
    return "" if parser.get_default("passes_arguments") else _unknown_option(parser, rest)


def _unknown_option(parser: CommandParser, words: Sequence[str]) -> str:
    known = [name for name, _ in parser.words() if name.startswith("--")]
    for word in words:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name.startswith("--") and not any(each.startswith(name) for each in known):
            return f"no option {_shown(name)}{_nearest(name, known, '')}; see `{parser.prog} --help`"
    return ""


def _nearest(word: str, known: Sequence[str], before: str) -> str:
    """Returns the end of an error, which suggests a known word."""
    close = difflib.get_close_matches(word[:SHOWN_CHARS], known, n=1, cutoff=0.5)
    if word in MEANT and before == "edgemoe":
        return f"; here that is {MEANT[word]}"
    if close:
        return f"; did you mean {f'{before} {close[0]}'.strip()}?"
    return f"; there are {', '.join(known)}" if before else ""


def _shown(word: str) -> str:
    return repr(word if len(word) <= SHOWN_CHARS else f"{word[:SHOWN_CHARS]}...")

"""Finds the words of a command line that are unknown, misplaced or empty, and suggests the right ones."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise

from edgemoe.cli.parser import CommandParser

SYNONYMS = {  # other programs' word for a command -> the command here
    "start": "edgemoe serve",
    "list": "edgemoe models",
    "ls": "edgemoe models",
    "ps": "edgemoe status",
    "rm": "edgemoe models remove",
    "stop": "Ctrl-C where `edgemoe serve` runs, or systemctl stop edgemoe",
}
SHOWN_CHARS = 60  # of a word in an error
TAKE_TEXT = ("chat", "generate")  # which may be empty


def unknown_word(parser: CommandParser, words: Sequence[str]) -> str:
    """Returns an error text for the first unknown command, action or option; "" where all are known."""
    rest = list(words)
    while inner := dict(parser.inner()):
        if not rest:
            return ""  # a missing word, which argparse names
        if (option := rest[0].partition("=")[0]).startswith("-"):
            if not option.startswith("--") or option in [name for name, _ in parser.words()]:
                return ""
            what = "ACTION" if parser.prog.count(" ") else "COMMAND"
            return f"options come behind the {what.lower()}: {parser.prog} {what} {_shown(option)[1:-1]} ..."
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


def left_over(parser: CommandParser, command: str, words: Sequence[str]) -> str:
    """Returns an error text for words that no option or argument of the command took."""
    if words[0] in dict(dict(parser.inner())[command].inner()):
        return f"options come behind the action: edgemoe {command} {words[0]} --OPTION ..."
    return f"unknown arguments: {' '.join(words)}; see `edgemoe {command} --help`"


def empty_word(words: Sequence[str]) -> str:
    """Returns an error text for a path, name or value that is empty, as of an unset variable; "" where none is."""
    for before, word in pairwise(words):
        option, value = word.partition("=")[::2]
        if word and not (option.startswith("--") and "=" in word and not value):
            continue
        if words[0] not in TAKE_TEXT:
            place = option or (before if before.startswith("--") else f"a word behind `edgemoe {words[0]}`")
            return f"{place} is empty; is a variable not set?"
    return ""


def _nearest(word: str, known: Sequence[str], before: str) -> str:
    """Returns the end of an error, which suggests a known word."""
    close = difflib.get_close_matches(word[:SHOWN_CHARS], known, n=1, cutoff=0.5)
    if word in SYNONYMS and before == "edgemoe":
        return f"; here that is {SYNONYMS[word]}"
    if close:
        return f"; did you mean {f'{before} {close[0]}'.strip()}?"
    return f"; there are {', '.join(known)}" if before else ""


def _shown(word: str) -> str:
    return repr(word if len(word) <= SHOWN_CHARS else f"{word[:SHOWN_CHARS]}...")

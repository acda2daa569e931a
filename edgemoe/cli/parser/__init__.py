"""Puts together the parser of the command line. Imports nothing but argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import edgemoe
from edgemoe.cli.parser import commands, texts
from edgemoe.cli.parser.options import CommandParser, Plain

GROUPS: tuple[tuple[str, tuple[Callable[[Any], None], ...]], ...] = (
    ("Serve a model", (commands.serve, commands.service, commands.key, commands.config, commands.reload)),
    ("Talk to it", (commands.chat, commands.generate)),
    ("See what it does", (commands.status, commands.top, commands.dashboard, commands.bench, commands.doctor)),
    ("Keep models", (commands.plan, commands.pull, commands.pack, commands.models)),
    ("Several boxes", (commands.keygen, commands.witness)),
    ("Tools", (commands.completion, commands.replay)),
)
UNSAID = {"models": "list", "service": "status", "key": "list"}  # the action that is meant where none is given


def build_parser() -> CommandParser:
    """Returns the parser. Each command's namespace has `handler`, the "module:function" that runs it."""
    parser = CommandParser(
        prog="edgemoe", usage="edgemoe COMMAND [OPTION ...]", epilog=texts.AFTER_OVERVIEW, formatter_class=Plain
    )
    parser.add_argument("--version", action="version", version=f"edgemoe {edgemoe.__version__}")
    found = parser.add_subparsers(
        prog="edgemoe", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for _, several in GROUPS:
        for add in several:
            add(found)
    summaries = {name: inner.summary for name, inner in parser.inner()}
    parser.description = "\n\n".join([texts.OVERVIEW, *_groups(summaries)])
    return parser


def complete(words: Sequence[str]) -> list[str]:
    """Returns a command line with the action that is meant, where a command has actions and none is given."""
    said = list(words)
    if said and said[0] in UNSAID and (len(said) == 1 or (said[1][:1] == "-" and said[1] not in ("-h", "--help"))):
        said.insert(1, UNSAID[said[0]])
    return said


def _groups(summaries: Mapping[str, str]) -> Iterator[str]:
    """Yields the commands of each group with their summaries, a line each."""
    for title, several in GROUPS:
        yield "\n".join([f"{title}:", *(f"  {add.__name__:12}{summaries[add.__name__]}" for add in several)])

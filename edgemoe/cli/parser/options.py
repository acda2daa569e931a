"""Makes a command, and the options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any


class Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of texts, and gives options more room than argparse does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"max_help_position": 28, "width": 110})


class CommandParser(argparse.ArgumentParser):
    """A parser that tells what it takes."""

    def words(self) -> Iterator[tuple[str, str]]:
        """Yields each long option, choice and command that may stand on the line, with its help."""
        for action in self._actions:
            if isinstance(action.choices, dict):
                yield from ((name, parser.summary) for name, parser in action.choices.items())
            elif action.option_strings:
                yield action.option_strings[-1], action.help or ""
            else:
                yield from ((str(choice), "") for choice in action.choices or ())

    def inner(self) -> Iterator[tuple[str, CommandParser]]:
        """Yields the commands, or a command's actions."""
        for action in self._actions:
            if isinstance(action.choices, dict):
                yield from action.choices.items()

    @property
    def summary(self) -> str:
        return (self.description or "").partition("\n")[0]


def command(commands: Any, name: str, handler: str, summary: str, epilog: str = "") -> CommandParser:
    """Adds a command, or an action of one, and returns its parser. `handler` is the "module:function" that runs it."""
    parser: CommandParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=epilog, formatter_class=Plain
    )
    parser.set_defaults(handler=handler, passes_arguments=False)
    return parser


def actions(parser: argparse.ArgumentParser) -> Any:
    """Returns where a command's actions are added, each by `command`; which one was given is `action`."""
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")


def settings_options(parser: argparse.ArgumentParser) -> None:
    """Adds where settings come from."""
    parser.add_argument("--config", metavar="FILE", help="read settings from this file only")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, as in memory.ram_bytes=12GiB"
    )


def client_options(parser: argparse.ArgumentParser) -> None:
    """Adds what finds the daemon."""
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: as in the settings)")
    settings_options(parser)


def sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """Adds what a request may ask for, and what finds the daemon."""
    until = max_tokens or "what the context allows"
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"longest answer, in tokens (default: {until})"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens up to this mass")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end where this text appears")
    client_options(parser)

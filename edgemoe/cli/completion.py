"""Runs `edgemoe completion`: writes a completion script for bash, zsh or fish, generated from the parser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from edgemoe.cli.parser import CommandParser, build_parser
from edgemoe.config.loading import flatten
from edgemoe.config.settings import Settings

Words = list[tuple[str, str]]  # a word and its purpose


def run(args: argparse.Namespace) -> int:
    """Prints the script for one shell."""
    print(scripts()[args.shell], end="")
    return 0


def scripts() -> dict[str, str]:
    """Returns the script for each shell."""
    places = list(_places(build_parser(), ()))
    settings = [f"{key}=" for key in flatten(Settings())]
    return {name: write(places, settings) for name, write in (("bash", _bash), ("zsh", _zsh), ("fish", _fish))}


def _places(parser: CommandParser, path: tuple[str, ...]) -> Iterator[tuple[str, Words]]:
    """Yields each command line's beginning and the words that may follow, innermost first: the first match is right."""
    for name, inner in parser.inner():
        yield from _places(inner, (*path, name))
    yield "".join(f"{word} " for word in path), list(parser.words())


def _bash(places: Sequence[tuple[str, Words]], settings: Sequence[str]) -> str:
    cases = "\n".join(
        f"    {shlex.quote(path)}*) words={shlex.quote(' '.join(word for word, _ in words))} ;;"
        for path, words in places
    )
    return f"""\
_edgemoe() {{
  local words before="${{COMP_WORDS[*]:1:COMP_CWORD-1}} "
  before="${{before# }}"
  case "$before" in
    *"--set ") compopt -o nospace; words={shlex.quote(" ".join(settings))} ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _edgemoe edgemoe
"""


def _zsh(places: Sequence[tuple[str, Words]], settings: Sequence[str]) -> str:
    cases = "\n".join(
        f"    {shlex.quote(path)}*) found=({' '.join(map(_described, words))}) ;;" for path, words in places
    )
    return f"""\
#compdef edgemoe
_edgemoe() {{
  local -a found
  local before="${{words[2,CURRENT-1]}} "
  before="${{before# }}"
  case "$before" in
    *"--set ") found=({" ".join(map(shlex.quote, settings))}); compadd -S "" -- $found; return ;;
{cases}
  esac
  _describe -o edgemoe found || _files
}}
if [[ "$funcstack[1]" == _edgemoe ]]; then _edgemoe "$@"; else compdef _edgemoe edgemoe; fi
"""


def _described(word: tuple[str, str]) -> str:
    name, purpose = (part.replace(":", "\\:") for part in word)
    return shlex.quote(f"{name}:{purpose}" if purpose else name)


def _fish(places: Sequence[tuple[str, Words]], settings: Sequence[str]) -> str:
    cases = "\n".join(
        f"    case {_fish_quoted(path + '*')}\n      printf '%s\\n' "
        + " ".join(_fish_quoted(f"{word}\t{purpose}") for word, purpose in words)
        for path, words in places
    )
    return f"""\
function __edgemoe
  set -l before (commandline -opc)[2..]
  switch "$before "
    case '*--set '
      printf '%s\\n' {" ".join(settings)}
{cases}
  end
end
complete -c edgemoe -a '(__edgemoe)'
"""


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

"""Runs `edgemoe generate` and `edgemoe chat`, which stream text from the daemon."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

from edgemoe.cli.client import Client, socket_of
from edgemoe.errors import ConfigError
from edgemoe.types.arrays import Json

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop")


def generate(args: argparse.Namespace) -> int:
    """Continues one prompt."""
    if args.prompt is None and sys.stdin.isatty():
        raise ConfigError('give a prompt, as in `edgemoe generate "Once upon a time"`, or pipe one in')
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    with Client(socket_of(args)) as client:
        events = client.stream("/v1/completions", {"prompt": prompt} | _sampling(args))
        _show(choice.get("text") or "" for choice in _choices(events))
    return 0


def chat(args: argparse.Namespace) -> int:
    """Prints one answer, or holds a conversation until an empty line."""
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with Client(socket_of(args)) as client:
        if args.message is not None:
            _answer(client, args, [*messages, {"role": "user", "content": args.message}])
            return 0
        while question := _asked():
            messages.append({"role": "user", "content": question})
            try:
                messages.append({"role": "assistant", "content": _answer(client, args, messages)})
            except KeyboardInterrupt:
                print("\n[stopped]", file=sys.stderr)
                messages.pop()
    return 0


def _asked() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _answer(client: Client, args: argparse.Namespace, messages: list[Json]) -> str:
    events = client.stream("/v1/chat/completions", {"messages": messages} | _sampling(args))
    return _show(choice.get("delta", {}).get("content") or "" for choice in _choices(events))


def _choices(events: Iterator[Json]) -> Iterator[Json]:
    for event in events:
        yield from event.get("choices", [])


def _show(pieces: Iterator[str]) -> str:
    """Prints the pieces as they arrive and returns the whole text. A terminal gets no control codes."""
    whole, to_terminal = [], sys.stdout.isatty()
    for piece in pieces:
        whole.append(piece)
        print(_CONTROL.sub("", piece) if to_terminal else piece, end="", flush=True)
    print()
    return "".join(whole)


def _sampling(args: argparse.Namespace) -> Json:
    return {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}

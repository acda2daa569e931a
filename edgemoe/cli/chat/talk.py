"""Runs `edgemoe generate` and `edgemoe chat`, which stream text from the daemon."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from functools import partial

from edgemoe.cli.chat.conversation import Conversation, hold
from edgemoe.cli.client import Client, socket_of, wait_for_engine
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
        wait_for_engine(client)
        events = client.stream("/v1/completions", {"prompt": prompt} | _sampling(args))
        _show(choice.get("text") or "" for choice in _choices(events))
    return 0


def chat(args: argparse.Namespace) -> int:
    """Prints one answer, or holds a conversation."""
    with Client(socket_of(args)) as client:
        wait_for_engine(client)
        talk = Conversation(partial(_answer, client, args), args.system or "", args.stats)
        if args.message is not None:
            talk.ask(args.message)
        else:
            hold(talk)
    return 0


def _answer(client: Client, args: argparse.Namespace, messages: list[Json], stats: bool) -> str:
    """Prints an answer as it arrives, and then how fast it came."""
    events, last = client.stream("/v1/chat/completions", {"messages": messages} | _sampling(args)), Json()
    text = _show(choice.get("delta", {}).get("content") or "" for choice in _choices(_keeping_last(events, last)))
    if stats and (timings := last.get("timings")):
        print(
            f"[{timings['prompt_n']} tokens of prompt in {timings['prompt_ms'] / 1000:.2f} s; "
            f"{timings['predicted_n']} tokens at {timings['predicted_per_second']:.1f} tokens/s]",
            file=sys.stderr,
        )
    return text


def _keeping_last(events: Iterator[Json], last: Json) -> Iterator[Json]:
    """Yields the events, and leaves the latest one's fields in `last`."""
    for event in events:
        last |= event
        yield event


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

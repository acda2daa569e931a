"""Runs `edgemoe chat` and `edgemoe generate`: streams text from the daemon; a conversation's commands and history."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edgemoe.cli.client import Client, socket_of, wait_for_engine
from edgemoe.durable import make_folder, owner_above, replace_file, write_new
from edgemoe.errors import ConfigError, EdgemoeError, write_remedy
from edgemoe.outputs import CONTROL, plain
from edgemoe.types.json_object import Json

COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?")  # "/usr/bin ..." is none, and goes to the model
HISTORY_LINES = 1000
HELP = """\
/system TEXT   what the model is told first; alone it shows that
/clear         begin anew; what the model is told first stays
/save FILE     write the conversation to a file
/stats         show or hide how fast answers come
/help          this
/quit          end; so does Ctrl-D. Ctrl-C stops an answer"""


@dataclass(slots=True)
class Conversation:
    """Holds the messages so far. `answer` streams the model's answer to messages, prints it and returns it."""

    answer: Callable[[list[Json], bool], str]
    system: str = ""
    stats: bool = False
    said: list[Json] = field(default_factory=list)

    @property
    def messages(self) -> list[Json]:
        """Returns the messages for the model, the system message first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.said

    def ask(self, question: str) -> None:
        """Prints the answer and remembers both; an answer that is stopped or fails leaves nothing behind."""
        self.said.append({"role": "user", "content": question})
        try:
            self.said.append({"role": "assistant", "content": self.answer(self.messages, self.stats)})
        except BaseException:
            self.said.pop()
            raise

    def run_command(self, name: str, rest: str) -> bool:
        """Runs a slash command. Returns whether the conversation continues."""
        if name == "system":
            self.system = rest or self.system
            print(self.system or "The model is told nothing first.", file=sys.stderr)
        elif name == "clear":
            self.said.clear()
        elif name == "save":
            print(self._save(rest), file=sys.stderr)
        elif name == "stats":
            self.stats = not self.stats
            print(f"Figures are {'shown' if self.stats else 'hidden'}.", file=sys.stderr)
        elif name != "quit":
            print(HELP if name == "help" else f"There is no /{name}.\n{HELP}", file=sys.stderr)
        return name != "quit"

    def _save(self, name: str) -> str:
        """Writes the conversation to a new private file. Returns a line that reports the outcome."""
        if not name:
            return "Name a file: /save FILE"
        parts = [f"## {message['role']}\n\n{message['content']}\n" for message in self.messages]
        try:
            write_new(Path(name).expanduser(), "\n".join(parts).encode())
        except OSError as error:
            return f"{name} cannot be written: {error.strerror}; {write_remedy(error, 'name another file')}"
        return f"{len(self.said)} messages are in {name}"


def converse(talk: Conversation) -> None:
    """Asks and answers until the user ends it. On a terminal a refusal of the daemon ends nothing."""
    to_terminal = sys.stdin.isatty()
    with _line_editing() if to_terminal else contextlib.nullcontext():
        if to_terminal:
            print("/help shows the commands, Ctrl-D ends.", file=sys.stderr)
        for line in _lines("> " if to_terminal else ""):
            if command := COMMAND.fullmatch(line):
                if not talk.run_command(command[1], (command[2] or "").strip()):
                    return
                continue
            try:
                talk.ask(line)
            except KeyboardInterrupt:
                print("\n[stopped]", file=sys.stderr)
            except EdgemoeError as error:
                if not to_terminal:
                    raise
                print(plain(f"edgemoe: {error}"), file=sys.stderr)


def _lines(prompt: str) -> Iterator[str]:
    """Yields the lines that the user types, without empty ones; Ctrl-C drops a line."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line:
            yield line


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Gives `input` editing and the history of former conversations, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    file = Path(state) / "edgemoe" / "chat-history"
    if os.geteuid() == 0 and owner_above(file) is not None:  # sudo keeps HOME: root reads and writes no user's file
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            said = [readline.get_history_item(at + 1) for at in range(readline.get_current_history_length())]
            make_folder(file.parent, 0o700)
            replace_file(file, "".join(f"{line}\n" for line in said[-HISTORY_LINES:]).encode())


_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop")


def generate(args: argparse.Namespace) -> int:
    """Runs `edgemoe generate`: continues one prompt."""
    if args.prompt is None and sys.stdin.isatty():
        raise ConfigError('give a prompt, as in `edgemoe generate "Once upon a time"`, or pipe one in')
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    with Client(socket_of(args)) as client:
        wait_for_engine(client)
        events = client.stream("/v1/completions", {"prompt": prompt} | _sampling(args))
        _show(choice.get("text") or "" for choice in _choices(events))
    return 0


def chat(args: argparse.Namespace) -> int:
    """Runs `edgemoe chat`: prints one answer, or holds a conversation."""
    with Client(socket_of(args)) as client:
        wait_for_engine(client)
        talk = Conversation(partial(_answer, client, args), args.system or "", args.stats)
        if args.message is not None:
            talk.ask(args.message)
        else:
            converse(talk)
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
        print(CONTROL.sub("", piece) if to_terminal else piece, end="", flush=True)
    print()
    return "".join(whole)


def _sampling(args: argparse.Namespace) -> Json:
    return {name: value for name in ("model", *_SAMPLING) if (value := getattr(args, name)) is not None}

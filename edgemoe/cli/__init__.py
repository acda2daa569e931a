"""The `edgemoe` command. Imports only the modules of the command that runs, so that `--help` is fast."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from edgemoe.errors import FULL, ConfigError, EdgemoeError
from edgemoe.outputs import drop_unwritable, flush_output, plain

INSTALL = "install edgemoe with what it needs: `pip install .` in its source tree, in a virtual environment"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 1 for a failure, 2 for wrong usage or settings."""
    words = [_readable(word) for word in (sys.argv[1:] if argv is None else argv)]
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text that a stream cannot encode costs a "?", not the command
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(words)
        finally:
            flush_output()
    except EdgemoeError as error:
        print(plain(f"edgemoe: {error}"), file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "edgemoe").partition(".")[0] == "edgemoe":
            raise
        print(f"edgemoe: {error.name} is not installed here; {INSTALL}", file=sys.stderr)
        return EXIT_FAILED
    except PermissionError as error:
        print(plain(f"edgemoe: you may not use {error.filename}; run this as who may, or as root"), file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `edgemoe status | head -1`
        return EXIT_FAILED
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            if drop_unwritable():  # its terminal has gone
                return EXIT_FAILED
            raise
        print(plain(f"edgemoe: {error.filename or 'the output'}: {error.strerror}"), file=sys.stderr)
        return EXIT_FAILED
    finally:
        drop_unwritable()


def _readable(word: str) -> str:
    """Returns a word of the command line; bytes that are not UTF-8 are replaced unless it names an existing file."""
    clean = word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return word if clean == word or os.path.exists(word) else clean


def _run(words: list[str]) -> int:
    from edgemoe.cli.parser import add_default_action, build_parser, split_behind
    from edgemoe.cli.wrong_words import empty_word, left_over, unknown_word

    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    words, behind = split_behind(add_default_action(words))
    if wrong := unknown_word(parser, words) or empty_word(words):
        parser.error(wrong)
    args, rest = parser.parse_known_args(words, argparse.Namespace(behind=behind))
    if len(rest) == 1 and rest[0][:1] != "-" and getattr(args, "message", "") is None:
        args.message = rest.pop()  # argparse takes none behind an option, where another word stands before it
    if rest and not args.passes_arguments:
        parser.error(left_over(parser, args.command, rest))
    module, _, function = args.handler.partition(":")
    handler = getattr(importlib.import_module(module), function)
    return int(handler(rest) if args.passes_arguments else handler(args))

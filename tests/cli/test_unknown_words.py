"""Every command, action and option that is spelt wrongly is answered with the right one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgemoe.cli import main
from edgemoe.cli.parser import DEFAULT_ACTIONS, CommandParser, build_parser
from edgemoe.cli.wrong_words import SYNONYMS, TAKE_TEXT, empty_word, unknown_word


def commands(parser: CommandParser, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CommandParser]]:
    for name, inner in parser.inner():
        yield (*before, name), inner
        yield from commands(inner, (*before, name))


def misspelt(word: str) -> Iterator[str]:
    """Yields words with a letter left out, doubled or swapped, as fingers do."""
    for at in range(1, len(word.lstrip("-"))):
        place = len(word) - len(word.lstrip("-")) + at
        yield word[:place] + word[place + 1 :]
        yield word[:place] + word[place] + word[place:]
        yield word[: place - 1] + word[place] + word[place - 1] + word[place + 1 :]


ROOT = Path(__file__).parents[2]
PARSER = build_parser()
COMMANDS = list(commands(PARSER))


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS], ids=" ".join)
def test_each_command_and_action_is_suggested(words: tuple[str, ...]) -> None:
    beside = {other[-1] for other, _ in COMMANDS if other[:-1] == words[:-1]}
    for wrong in misspelt(words[-1]):
        if wrong not in beside:
            said = unknown_word(PARSER, [*words[:-1], wrong])
            assert repr(wrong) in said
            assert any(f"edgemoe {' '.join((*words[:-1], each))}?" in said for each in beside), said


@pytest.mark.parametrize("words", [words for words, parser in COMMANDS if not dict(parser.inner())], ids=" ".join)
def test_each_option_is_suggested(words: tuple[str, ...]) -> None:
    (parser,) = (parser for other, parser in COMMANDS if other == words)
    options = [name for name, _ in parser.words() if name.startswith("--")]
    right = count = 0
    for option in options:
        for wrong in misspelt(option):
            if not any(each.startswith(wrong) for each in options):
                said = unknown_word(PARSER, [*words, "x", f"{wrong}=3"])
                assert "did you mean --" in said or len(option) < 6, said
                right, count = right + (f"did you mean {option}?" in said), count + 1
    assert right >= 0.9 * count


@pytest.mark.parametrize("words", [words for words, parser in [((), PARSER), *COMMANDS] if dict(parser.inner())])
def test_an_option_before_a_command_or_action_is_told_its_place(words: tuple[str, ...]) -> None:
    for option in (["--config", "FILE"], ["--config=FILE"], ["--" + "x" * 10_000]):
        said = unknown_word(PARSER, [*words, *option, "serve"])
        assert said.startswith(f"options come behind the {'action' if words else 'command'}: edgemoe"), said
        assert len(said) < 200
    for known in ("--help", "-h"):
        assert not unknown_word(PARSER, [*words, known])


@pytest.mark.parametrize("command", DEFAULT_ACTIONS)
def test_so_is_one_before_the_action_of_a_command_that_has_a_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = dict(dict(PARSER.inner())[command].inner())
    for action in actions:
        for option in ("--config=FILE", "--json"):
            if option.partition("=")[0] in [name for name, _ in actions[DEFAULT_ACTIONS[command]].words()]:
                with pytest.raises(SystemExit):
                    main([command, option, action])
                assert f"options come behind the action: edgemoe {command} {action} " in capsys.readouterr().err


@pytest.mark.parametrize("words", [words for words, parser in COMMANDS if not dict(parser.inner())], ids=" ".join)
def test_an_empty_word_is_refused(words: tuple[str, ...]) -> None:
    (parser,) = (parser for other, parser in COMMANDS if other == words)
    options = [name for name, _ in parser.words() if name.startswith("--")]
    cases = [["", "x"], *([option, ""] for option in options), *([f"{option}="] for option in options)]
    for case in cases:
        assert bool(empty_word([*words, *case])) == (words[0] not in TAKE_TEXT)
    assert not empty_word([*words, "x", "--set", "model.path=", "--set=model.path=", "--", "-"])


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS], ids=" ".join)
def test_correct_words_are_not_refused(words: tuple[str, ...]) -> None:
    (parser,) = (parser for other, parser in COMMANDS if other == words)
    options = [name for name, _ in parser.words() if name.startswith("--")]
    inner = [name for name, _ in parser.inner()]
    assert not unknown_word(PARSER, [*words, *inner[:1], *([] if inner else [*options, "--", "--anything"])])


@pytest.mark.parametrize("word", [*SYNONYMS, "serv", "xyzzy", "x" * 10_000])
def test_the_command_line_ends_with_the_suggestion(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([word])
    said = capsys.readouterr().err
    assert any(each in said for each in ("here that is", "did you mean edgemoe serve?", "there are serve, service"))
    assert len(said) < 500


@pytest.mark.parametrize("words", [words for words, parser in COMMANDS if not dict(parser.inner())], ids=" ".join)
def test_a_source_tree_without_its_dependencies_names_them(words: tuple[str, ...], tmp_path: Path) -> None:
    (parser,) = (parser for other, parser in COMMANDS if other == words)
    required = [action for action in parser._actions if not action.option_strings and action.nargs in (None, "+")]
    said = [next(iter(action.choices)) if action.choices else "x" for action in required]
    bare = "import sys; sys.path.insert(0, sys.argv.pop(1)); from edgemoe.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", bare, str(ROOT), *words, *said]
    environment = {"HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert "Traceback" not in done.stderr
    assert words == ("completion",) or "is not installed here; install edgemoe" in done.stderr, done.stderr

"""Every dialect is parsed alike wherever the stream is cut; unfinished or wrong calls are text, to the last letter."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dialect_kit import ANSWER, ARGUMENTS, FUNCTIONS, SAMPLES, THOUGHT, Sample
from test_text_parts import cut

from edgemoe.api.dialects.dialect import DIALECTS, ChannelMarks, OutputMarks, OutputStart
from edgemoe.api.dialects.growing_text import MAX_HELD
from edgemoe.api.dialects.output_parser import OutputParser
from edgemoe.api.dialects.tool_calls import OfferedFunctions, OutputPieces

EACH = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
CUTS = st.lists(st.integers(0, 1000), max_size=60)


def parsed(
    sample: Sample, chunks: list[str], functions: OfferedFunctions | None = FUNCTIONS, begun: OutputStart = "open"
) -> OutputPieces:
    """Returns all pieces, with unfinished calls as they came."""
    parser, whole = OutputParser(OutputMarks(sample.dialect, begun, 8, functions)), OutputPieces()
    for chunk in chunks:
        whole.extend(parser.feed(chunk))
    whole.extend(parser.flush())
    return whole


def summary(pieces: OutputPieces) -> list[tuple[str, str, str]]:
    return [(piece.kind, piece.call.name if piece.call else "", piece.text) for piece in pieces]


def test_every_dialect_has_a_sample() -> None:
    assert {dialect.name for dialect in DIALECTS} == set(SAMPLES)


@EACH
@given(borders=CUTS)
def test_reasoning_answer_and_calls_come_out_right_wherever_it_is_cut(sample: Sample, borders: list[int]) -> None:
    pieces = parsed(sample, cut(sample.output, borders), begun=sample.begun)
    assert (pieces.text("reasoning"), pieces.text()) == (THOUGHT, ANSWER)
    calls = pieces.of("call")
    assert [piece.call.name for piece in calls if piece.call] == sample.names
    assert [json.loads(piece.text) for piece in calls] == [ARGUMENTS, {}][: len(calls)]
    assert {piece.ended for piece in calls} == {"complete"}
    assert len({piece.call.id for piece in calls if piece.call}) == len(calls)


@EACH
def test_arguments_come_while_they_are_written(sample: Sample) -> None:
    parser = OutputParser(OutputMarks(sample.dialect, sample.begun, 8, FUNCTIONS))
    pieces = [piece for letter in sample.output for piece in parser.feed(letter).of("call")]
    first = [piece for piece in pieces if piece.call and piece.call.index == 0]
    assert [piece.begins for piece in first] == [True] + [False] * (len(first) - 1)
    assert len(first) > 20
    assert {"ö", "l", "n"} <= {piece.text for piece in first}
    assert all(len(piece.text) < 25 for piece in first)


def unspaced(text: str) -> str:
    return "".join(text.split())


def assert_all_there(sample: Sample, output: str, pieces: OutputPieces) -> None:
    """Checks `output`: every letter is in one piece, in order, but for the marks around reasoning and calls."""
    written = [unspaced(piece.raw if piece.kind == "call" else piece.text) for piece in pieces]
    dialect, rest = sample.dialect, unspaced(output)
    if dialect.call is None:
        assert_without_headers("".join(written), rest)
        return
    for mark in dialect.wrapper or ():
        written, rest = [text.replace(mark, "") for text in written], rest.replace(mark, "")
    section = dialect.section
    marks = [*dialect.think, *((section.end, "]" if section.is_list else "") if section else ())]
    layout = re.compile(f"({'|'.join(re.escape(mark) for mark in marks if mark)})*")
    for text in filter(None, written):
        found = re.match(f"{layout.pattern}{re.escape(text)}", rest)
        assert found, rest
        rest = rest[found.end() :]
    assert layout.fullmatch(rest), rest


MARK = re.compile(r"(<\|\w+\|>)")


def assert_without_headers(written: str, output: str) -> None:
    """Checks messages: all but marks was written, in order; texts beside a mark of a header may be missing."""
    written = MARK.sub("", written)
    parts, ends = MARK.split(output), {0}  # possible ends of the text read so far
    marks = ["", *parts[1::2], ""]
    for before, part, after in zip(marks, parts[::2], marks[1:], strict=False):
        is_header = before in ("<|start|>", "<|channel|>", "<|constrain|>") or after in ("<|channel|>", "<|message|>")
        read = {end + len(part) for end in ends if written.startswith(part, end)}
        ends = read | ends if is_header else read
        assert ends, part
    assert len(written) in ends


@EACH
@given(size=st.integers(0, 1000), borders=CUTS)
def test_an_unfinished_output_loses_and_repeats_nothing(sample: Sample, size: int, borders: list[int]) -> None:
    output = sample.output[: size % (len(sample.output) + 1)]
    pieces = parsed(sample, cut(output, borders), begun=sample.begun)
    assert_all_there(sample, output, pieces)
    calls = pieces.of("call")
    assert [piece.ended for piece in calls[:-1]] == ["complete"] * (len(calls) - 1)
    for piece in calls:
        if piece.ended == "complete":
            assert json.loads(piece.text) in (ARGUMENTS, {})
        else:  # cannot be mistaken for a call that is whole
            with pytest.raises(json.JSONDecodeError):
                json.loads(piece.text)
    whole = parsed(sample, [output], begun=sample.begun)
    pieces.drop_broken_tool_calls()
    whole.drop_broken_tool_calls()
    assert summary(pieces) == summary(whole)
    assert {piece.ended for piece in whole.of("call")} <= {"complete"}


def fragments(sample: Sample) -> st.SearchStrategy[str]:
    """Draws texts of the dialect's own marks and of parts of its sample, in any order."""
    dialect = sample.dialect
    names = sorted(
        {*dialect.think, *dialect.tool_call_marks, *dialect.others, "weather", "now", "other", "{}", '{"a": 1}'}
    )
    parts = re.split(r"(?<=[>}\n])", sample.output)
    letters = st.text(alphabet='<>|/{}[]",:= \nab1', max_size=6)
    return st.lists(st.one_of(st.sampled_from(names), st.sampled_from(parts), letters), max_size=12).map("".join)


@EACH
@pytest.mark.parametrize("begun", ["open", "reasoning", "answer", "text"])
def test_broken_calls_are_of_the_kind_around_them_whole_and_in_pieces(sample: Sample, begun: OutputStart) -> None:
    for end in range(len(sample.calls) // 3, len(sample.calls), 11):
        output = f"{sample.calls[:end]}\n"  # which no string of JSON's may have
        whole = parsed(sample, [output], begun=begun)
        whole.drop_broken_tool_calls()
        for size in (1, 7, 46):
            pieces = parsed(sample, cut(output, list(range(0, end, size))), begun=begun)
            pieces.drop_broken_tool_calls()
            assert summary(pieces) == summary(whole), size


@EACH
@given(data=st.data(), borders=CUTS, begun=st.sampled_from(["open", "reasoning", "answer", "text"]))
def test_anything_at_all_is_read_the_same_whole_and_in_pieces(
    sample: Sample, data: st.DataObject, borders: list[int], begun: OutputStart
) -> None:
    output = data.draw(fragments(sample))
    pieces, whole = parsed(sample, cut(output, borders), begun=begun), parsed(sample, [output], begun=begun)
    assert_all_there(sample, output, pieces)
    pieces.drop_broken_tool_calls()
    whole.drop_broken_tool_calls()
    assert summary(pieces) == summary(whole)
    for piece in whole.of("call"):
        assert isinstance(json.loads(piece.text), dict)


@pytest.mark.parametrize("end", ChannelMarks.ENDS)
@pytest.mark.parametrize("begin", [ChannelMarks.START, ChannelMarks.CHANNEL, ChannelMarks.CONSTRAIN])
def test_text_behind_a_header_that_breaks_off_is_shown(begin: str, end: str) -> None:
    sample = SAMPLES["harmony"]
    answer = "<|channel|>final<|message|>It is."
    for output, text in (
        (f"{begin}a{end}now", "now"),
        (f"{begin}a{end}now{end}", "now"),
        (f"{begin}a", ""),
        (f"{begin}a{end}{answer}", "It is."),
        (f"{begin}a{end}now{end}{answer}", "now\n\nIt is."),
    ):
        for border in range(len(output) + 1):
            pieces = parsed(sample, cut(output, [border]))
            assert pieces.text() == text, (output, border)
            assert_all_there(sample, output, pieces)


@EACH
def test_only_functions_that_were_offered_are_called(sample: Sample) -> None:
    pieces = parsed(sample, [sample.output], {"other": None}, sample.begun)
    assert not pieces.of("call")
    assert "Köln" in pieces.text()
    assert unspaced(pieces.text()).startswith(unspaced(ANSWER))


@EACH
def test_unfinished_calls_are_not_held_back_for_ever(sample: Sample) -> None:
    first = sample.calls.index("weather")
    for endless in (sample.calls[:first] + "x" * 4 * MAX_HELD, sample.calls[:first] + " " * 4 * MAX_HELD + "x"):
        parser = OutputParser(OutputMarks(sample.dialect, "answer", 8, FUNCTIONS))
        shown = sum(len(parser.feed(chunk).text()) for chunk in cut(endless, list(range(0, len(endless), 1000))))
        assert shown > MAX_HELD


@EACH
def test_arguments_that_are_nested_too_deeply_are_text(sample: Sample) -> None:
    deep = "[" * 20_000
    output = sample.output.replace("1.5", deep).replace('{"x":', '{"x": [' + deep)
    pieces = parsed(sample, [output], begun=sample.begun)
    pieces.drop_broken_tool_calls()
    assert_all_there(sample, output, pieces)


@EACH
def test_a_call_that_breaks_off_is_the_same_text_whole_and_in_pieces(sample: Sample) -> None:
    """Calls after an answer: the text between them and the omitted white space do not depend on the cuts, either."""
    first = sample.output.index(sample.calls)
    for end in range(first, len(sample.output)):
        broken = sample.output[:end] + "\x07 [ broken"
        pieces, whole = parsed(sample, list(broken), begun=sample.begun), parsed(sample, [broken], begun=sample.begun)
        pieces.drop_broken_tool_calls()
        whole.drop_broken_tool_calls()
        assert summary(pieces) == summary(whole)

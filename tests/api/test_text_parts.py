"""Stop strings, detokenizing and the splitting of reasoning and tool calls, across any borders of chunks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.front_kit import MARKS, byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from edgemoe.api.dialects.dialect import HERMES, OutputMarks, OutputStart
from edgemoe.api.dialects.output_parser import OutputParser
from edgemoe.api.dialects.tool_calls import OutputPieces, completed_object
from edgemoe.api.generate.generation import ChoiceDelta, CompletionChoice
from edgemoe.api.http.event_text import event
from edgemoe.api.schema import ChatMessage
from edgemoe.api.text.chat_template import for_template
from edgemoe.api.text.tokenizer import SPACE, Detokenizer, StopMatcher, Vocabulary, held_back
from edgemoe.types.request import Emission

TOKENIZER = byte_level_tokenizer()
SPECIAL = byte_level_tokenizer(special_marks=True)
VOCABULARY = Vocabulary(TOKENIZER)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think> ü"}}\n</tool_call>'


def cut(text: str, borders: list[int]) -> list[str]:
    """Returns the parts of `text`, cut at the borders."""
    places = sorted({0, len(text), *(at % (len(text) + 1) for at in borders)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def stopped(stops: StopMatcher, chunks: list[str]) -> str:
    return "".join(map(stops.feed, chunks)) + ("" if stops.stopped else stops.flush())


BORDERS = st.lists(st.integers(0, 200), max_size=12)


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), BORDERS)
def test_stop_strings_match_as_they_would_in_the_whole_text(text: str, strings: list[str], borders: list[int]) -> None:
    chunked = StopMatcher(tuple(strings))
    passed = stopped(chunked, cut(text, borders))
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in strings if stop in text]
    assert chunked.stopped == bool(found)
    assert passed == (text[: min(found)[1]] if found else text)


def test_only_a_possible_stop_string_is_held_back() -> None:
    stops = StopMatcher(("STOP",))
    assert stops.feed("abST") == "ab"
    assert stops.feed("Ox") == "STOx"
    assert stops.feed("yS") == "y"
    assert stops.flush() == "S"


def test_no_stop_string_is_looked_for_in_the_first_tokens() -> None:
    stops = StopMatcher(("STOP",), 2)
    assert [stops.feed(text) for text in ("STOP", "aST", "OP", "STOP!")] == ["STOP", "aST", "OP", ""]
    assert stops.stopped


def test_held_back_is_the_longest_start_of_a_mark() -> None:
    assert held_back("ab<thi", ("<think>", "</think>")) == 4
    assert held_back("ab<", ("<think>",)) == 1
    assert held_back("ab<think>", ("<think>",)) == 0


@given(st.text(max_size=60))
def test_token_by_token_equals_decoding_at_once(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(VOCABULARY)
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.flush() == TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 3), max_size=60))
def test_any_tokens_give_well_formed_text_and_split_no_character(ids: list[int]) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    chunks = [*map(detokenizer.feed, ids), detokenizer.flush()]
    "".join(chunks).encode()
    assert "".join(chunks) == VOCABULARY.text(ids, skip_special=True)


def test_a_character_of_several_tokens_arrives_whole() -> None:
    ids = TOKENIZER.encode("\u2603").ids
    assert len(ids) > 1
    detokenizer = Detokenizer(VOCABULARY)
    assert [detokenizer.feed(token) for token in ids] == [""] * (len(ids) - 1) + ["\u2603"]


def test_a_token_that_is_no_text_is_named_by_its_bytes() -> None:
    names = [VOCABULARY.name(token) for token in TOKENIZER.encode("a\u2603").ids]
    assert names[0] == "a"
    assert names[1].startswith("bytes:\\xe2")


def test_special_tokens_are_not_shown_but_marks_are() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    shown = [detokenizer.feed(TOKENIZER.token_to_id(name)) for name in ("<|im_end|>", "<think>")]
    assert shown == ["", "<think>"]


def byte_fallback_tokenizer() -> Tokenizer:
    """Returns a BPE tokenizer with byte fallback, decoded as Mixtral's."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "H", "i", f"{SPACE}H", f"{SPACE}Hi"]
    names += ["\u0120", "\u0121"]  # Maltese, as Gemma's vocabulary has it: no sign of GPT-2's alphabet
    vocab = {name: at for at, name in enumerate(names)}
    merges = [(SPACE, "H"), (f"{SPACE}H", "i")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_byte_fallback_tokens_join_into_characters() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [tokenizer.token_to_id(name) for name in (f"{SPACE}Hi", SPACE, "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>", "H")]
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    assert [detokenizer.feed(token) for token in ids] == [" Hi", " ", "", "", "", "🦊", "H"]
    assert tokenizer.decode(ids) == " Hi 🦊H"


def test_added_tokens_of_spaces_are_spaces_as_their_decoder_has_it() -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.add_tokens([AddedToken(SPACE * size, normalized=False) for size in (2, 4)])
    ids = [tokenizer.token_to_id(name) for name in ("H", SPACE * 4, "i", SPACE * 2, "H")]
    assert Vocabulary(tokenizer).text(ids) == tokenizer.decode(ids) == "H    i  H"
    mark = AddedToken(f"<{SPACE}>", special=True)
    tokenizer.add_special_tokens([mark])
    assert Vocabulary(tokenizer).text([tokenizer.token_to_id(mark.content)]) == mark.content


def marks(calls: int = 0, begun: OutputStart = "answer", functions: str | None = None) -> OutputMarks:
    return OutputMarks(HERMES, begun, calls, None if functions is None else dict.fromkeys(functions))


def parsed(marks: OutputMarks, chunks: list[str]) -> OutputPieces:
    parser, whole = OutputParser(marks), OutputPieces()
    for chunk in chunks:
        whole.extend(parser.feed(chunk))
    whole.extend(parser.flush())
    whole.drop_broken_tool_calls()
    return whole


FULL = f"<think>\nLet me <see>.\n</think>\n\nI call:\n{CALL}\n{CALL}"
CASES = {
    "reasoning and calls": (FULL, marks(8, "open"), "I call:", "Let me <see>.", 2),
    "no marks": (FULL, marks(), FULL, "", 0),
    "opened by the prompt": ("so\n</think>\n\nyes", marks(begun="reasoning"), "yes", "so", 0),
    "never closed": ("<think>\nhm", marks(begun="open"), "", "hm", 0),
    "an answer at once": ("plain <think> text ", marks(begun="open"), "plain <think> text ", "", 0),
    "going on with a text": (" and more ", marks(8, "text"), " and more ", "", 0),
    "not JSON": ("<tool_call>{nope}</tool_call>", marks(8), "<tool_call>{nope}</tool_call>", "", 0),
    "an open call": ('a <tool_call>{"na', marks(8), 'a <tool_call>{"na', "", 0),
    "one call only": (f"{CALL}{CALL}", marks(1), CALL, "", 1),
    "a call to what was offered": (CALL, marks(8, functions="fg"), "", "", 1),
    "a call to what was not": (CALL, marks(8, functions="gh"), CALL, "", 0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@given(borders=BORDERS)
def test_the_parts_do_not_depend_on_the_chunks(
    case: tuple[str, OutputMarks, str, str, int], borders: list[int]
) -> None:
    text, marks, answer, reasoning, calls = case
    pieces = parsed(marks, cut(text, borders))
    assert (pieces.text(), pieces.text("reasoning"), len(pieces.of("call"))) == (answer, reasoning, calls)


def test_a_call_has_its_arguments_as_json_text() -> None:
    (piece,) = parsed(marks(8), [CALL]).of("call")
    assert piece.call is not None
    assert piece.call.name == "f"
    assert json.loads(piece.text) == {"a": "</think> ü"}
    assert piece.call.id.startswith("call_")


def without_marks(text: str) -> str:
    for mark in MARKS:
        text = text.replace(mark, "")
    return text


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_marks_that_are_special_tokens_are_heeded_and_never_shown(case: tuple[str, OutputMarks, str, str, int]) -> None:
    text, marks, answer, reasoning, calls = case
    choice, deltas, _ = choice_of(text, marks=marks, tokenizer=SPECIAL)
    shown, thought = "".join(delta.text for delta in deltas), "".join(delta.reasoning for delta in deltas)
    assert sum(piece.begins for delta in deltas for piece in delta.pieces) == calls
    if marks.calls != 1:  # which ends before the second
        assert (shown.split(), thought) == (without_marks(answer).split(), reasoning)
    assert not [mark for mark in MARKS if mark in shown + thought]
    assert (choice.finish == "tool_calls") == (calls > 0)


@pytest.mark.parametrize("stray", ["a </think> b", "a <think> b", "a </tool_call> b", "a <think></think><think> b"])
def test_special_marks_out_of_place_are_left_out(stray: str) -> None:
    _, deltas, _ = choice_of(stray, marks=marks(8, "open"), tokenizer=SPECIAL)
    assert "".join(delta.text + delta.reasoning for delta in deltas).split() == ["a", "b"]


def choice_of(
    text: str, *, stops: tuple[str, ...] = (), marks: OutputMarks | None = None, tokenizer: Tokenizer = TOKENIZER
) -> tuple[CompletionChoice, list[ChoiceDelta], bool]:
    choice, deltas, early = CompletionChoice(0, Vocabulary(tokenizer), StopMatcher(stops), marks), [], False
    for index, token in enumerate(tokenizer.encode(text).ids):
        early = choice.add(Emission(request="r", attempt=1, index=index, token=token, logprob=-1.0))
        deltas.append(choice.delta())
        if choice.finish:
            break
    else:
        choice.add(Emission(request="r", attempt=1, index=choice.tokens, finish="stop"))
        deltas.append(choice.delta())
    return choice, deltas, early


def test_a_stop_string_ends_a_choice_before_the_engine_does() -> None:
    choice, deltas, early = choice_of("one two END three", stops=("END",))
    assert "".join(delta.text for delta in deltas) == "one two "
    assert (choice.finish, early) == ("stop", True)


def test_text_held_back_for_a_stop_string_or_a_mark_comes_with_the_end() -> None:
    choice, deltas, _ = choice_of("one two EN", stops=("END",))
    assert "".join(delta.text for delta in deltas) == "one two EN"
    choice, deltas, _ = choice_of("one <tool_c", marks=marks(1))
    assert ("".join(delta.text for delta in deltas), choice.finish) == ("one <tool_c", "stop")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_if_only_the_prompt_is_requested_no_other_text_is_sent(finish: str) -> None:
    choice = CompletionChoice(0, VOCABULARY, prompt_only=True)
    choice.add(Emission(request="r", attempt=1, index=0, token=65, finish=finish))
    assert (choice.delta().text, choice.tokens, choice.finish) == ("", 0, "length")


def test_calls_finish_as_tool_calls_and_the_last_wanted_one_ends_the_choice() -> None:
    choice, _, early = choice_of(f"{CALL} and more", marks=marks(1))
    assert (choice.finish, early) == ("tool_calls", True)
    choice, _, early = choice_of(CALL, marks=marks(8))
    assert (choice.finish, early) == ("tool_calls", False)


def test_reasoning_tokens_are_counted_and_logprobs_lose_nothing() -> None:
    choice, deltas, _ = choice_of("<think>one two</think>three", marks=marks(begun="open"))
    assert 0 < choice.reasoning_tokens < choice.tokens
    assert sum(len(delta.logprobs) for delta in deltas) == choice.tokens


def test_an_event_is_one_line_for_pythons_splitlines() -> None:
    value = {"text": "a\u2028b\x85c\u2029 \u00c2 \u20a8"}
    head, data, *rest = event(value, "delta").decode().splitlines()
    assert (head, rest) == ("event: delta", [""])
    assert json.loads(data.removeprefix("data: ")) == value


def test_every_beginning_of_an_object_is_completed_to_one() -> None:
    text = '{"a": "x\\u00e9\\\\\\"y", "b": [1, {"c": null}, "d"], "e": {"f": -1.5e3, "g": true}}'
    whole = json.loads(text)
    for end in range(len(text) + 1):
        found = json.loads(completed_object(text[:end]))
        assert found.keys() <= whole.keys()
        assert found.get("a", "") == whole["a"][: len(found.get("a", ""))]
    assert completed_object(text) == text
    assert json.loads(completed_object(text[: text.index('"d"')])) == {"a": whole["a"], "b": [1, {"c": None}]}
    assert completed_object("no object") == "{}"


def test_later_system_messages_without_text_are_left_out() -> None:
    roles = ("system", "user", "system", "assistant", "system", "user")
    messages = [ChatMessage(role=role, content="hi" if role == "user" else None) for role in roles]
    joined = for_template(messages, one_system=True)
    assert [(one["role"], one["content"] or "") for one in joined] == [
        ("system", ""),
        ("user", "hi"),
        ("assistant", ""),
        ("user", "hi"),
    ]

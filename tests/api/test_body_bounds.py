"""A body has bounds in objects, not only in bytes: one that would hold up streams is refused before it is built."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from edgemoe.api.body_bounds import MAX_PARTS
from edgemoe.api.endpoints.anthropic import MessagesBody
from edgemoe.api.endpoints.responses import ResponsesBody
from edgemoe.api.schema import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    REFUSED,
    Chat,
    Completion,
    Detokenize,
    Tokenize,
    read,
)
from edgemoe.errors import InvalidRequest

TURN = {"role": "user", "content": "x"}
BODIES: dict[type[Any], dict[str, Any]] = {
    Chat: {"messages": [TURN]},
    Completion: {"prompt": "x"},
    ResponsesBody: {"input": "x"},
    MessagesBody: {"messages": [TURN], "max_tokens": 4},
    Tokenize: {"prompt": "x"},
    Detokenize: {"tokens": [1]},
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
LONGEST: list[tuple[type[Any], str, Any, int]] = [
    (Chat, "messages", TURN, MAX_MESSAGES),
    (Chat, "tools", FUNCTION, MAX_TOOLS),
    (Tokenize, "messages", TURN, MAX_MESSAGES),
    (Tokenize, "tools", FUNCTION, MAX_TOOLS),
    (ResponsesBody, "input", TURN, MAX_MESSAGES),
    (ResponsesBody, "tools", {"type": "function", "name": "f"}, MAX_TOOLS),
    (MessagesBody, "messages", TURN, MAX_MESSAGES),
    (MessagesBody, "system", {"type": "text", "text": "x"}, MAX_CONTENT_PARTS),
    (MessagesBody, "tools", {"name": "f"}, MAX_TOOLS),
]
HEAVY = {
    "nested lists": b"[" + b"[[]]," * 200_000 + b"[]]",
    "empty objects": b"[" + b"{}," * 200_000 + b"{}]",
    "empty messages": b"[" + b'{"role":"user","content":""},' * 60_000 + b"{}]",
    "fields": b"{" + b",".join(b'"%d":0' % at for at in range(120_000)) + b"}",
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("name", HEAVY)
def test_too_many_parts_are_refused_at_once_in_any_place(kind: type[Any], name: str) -> None:
    for field in ("unknown", "metadata", "messages"):
        rest = json.dumps({key: value for key, value in BODIES[kind].items() if key != field})[1:]
        body = b'{"%s": %s' % (field.encode(), HEAVY[name]) + (b"," + rest.encode() if rest != "}" else b"}")
        began_s = time.thread_time()
        with pytest.raises(InvalidRequest, match=f"more than {MAX_PARTS}"):
            read(body, kind)
        assert time.thread_time() - began_s < 2.0


@pytest.mark.parametrize(("kind", "field", "one", "most"), LONGEST)
def test_lists_have_bounds_of_their_own(kind: type[Any], field: str, one: Any, most: int) -> None:
    body = BODIES[kind]
    if kind is Tokenize and field == "messages":
        body = {}
    assert read(json.dumps({**body, field: [one] * most}).encode(), kind)
    with pytest.raises(InvalidRequest, match=f"^{field}: .*<= {most}"):
        read(json.dumps({**body, field: [one] * (most + 1)}).encode(), kind)


@pytest.mark.parametrize(("field", "one", "most"), [("content", {"type": "text", "text": "x"}, MAX_CONTENT_PARTS)])
@pytest.mark.parametrize("kind", [Chat, Tokenize, MessagesBody])
def test_so_have_the_parts_of_a_message(kind: type[Any], field: str, one: Any, most: int) -> None:
    body = {key: value for key, value in BODIES[kind].items() if key != "prompt"}
    for count in (most, most + 1):
        raw = json.dumps({**body, "messages": [{"role": "user", field: [one] * count}]}).encode()
        if count == most:
            assert read(raw, kind)
            continue
        with pytest.raises(InvalidRequest, match=r"messages\[.*\].content"):
            read(raw, kind)
    calls = [{"function": {"name": "f"}}] * (MAX_TOOL_CALLS + 1)
    if kind is not MessagesBody:
        with pytest.raises(InvalidRequest, match=r"tool_calls"):
            read(json.dumps({**body, "messages": [{"role": "assistant", "tool_calls": calls}]}).encode(), kind)


@pytest.mark.parametrize("text", ['a "quoted" {text}, [with]: marks\\', "\\\\\\", "é{[:" * 30])
def test_marks_within_texts_count_for_nothing(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text * 20_000}]}
    found = read(json.dumps(body, ensure_ascii=False).encode(), Chat)
    assert found.messages[0].content == text * 20_000


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_fields_are_still_named(field: str) -> None:
    kinds = (Chat, Completion, ResponsesBody, MessagesBody)
    for kind in (each for each in kinds if field not in each.__struct_fields__):
        for neutral in (None, *REFUSED[field]):
            assert read(json.dumps({**BODIES[kind], field: neutral}).encode(), kind)
        for wrong in ("some value", ["x"] * 100):
            with pytest.raises(InvalidRequest, match=f"^{field} is not supported") as refused:
                read(json.dumps({**BODIES[kind], field: wrong}).encode(), kind)
            assert refused.value.param == field

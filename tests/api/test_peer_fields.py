"""Fields as clients of other servers send them: each row of the tables in docs/api.md."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.api_tables import DOCUMENT, fields, rows, spans
from support.grammars import response_grammar

from edgemoe.api import peer_fields
from edgemoe.api.endpoints.anthropic import MessagesBody
from edgemoe.api.endpoints.chat_completions import _template_variables, offered_tools
from edgemoe.api.endpoints.responses import ResponsesBody
from edgemoe.api.schema import REFUSED, Chat, Completion, Tokenize, read, read_named
from edgemoe.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "SAY{x}END"}]
BASE: dict[type[msgspec.Struct], dict[str, Any]] = {
    Chat: {"messages": MESSAGES},
    Completion: {"prompt": "x"},
    ResponsesBody: {"input": "x"},
    MessagesBody: {"messages": MESSAGES},
    Tokenize: {"prompt": "x"},
}
SAMPLES: dict[str, Any] = {"stop": ["a"], "repetition_penalty": 1.25, "add_special_tokens": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMAR = 'root ::= "<" [a-c]+ ">"'
BYTES = LLTokenizer("byte")


def body(kind: type[msgspec.Struct], more: dict[str, Any]) -> Any:
    return read(json.dumps(BASE[kind] | more).encode(), kind)


def kinds_with(field: str) -> list[type[msgspec.Struct]]:
    return [kind for kind in BASE if field in kind.__struct_fields__]


def accepts(asked: Any, text: str) -> bool:
    grammar = response_grammar(asked)
    assert grammar is not None
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


ALIASES = [(alias, *spans(own)) for names, own in rows("field | is read as") for alias in spans(names)]


@pytest.mark.parametrize(("alias", "own"), ALIASES)
def test_an_alias_is_read_as_the_field(alias: str, own: str) -> None:
    value = SAMPLES.get(own, 3)
    kinds = [kind for kind in kinds_with(own) if alias not in kind.__struct_fields__]
    assert kinds or alias in Chat.__struct_fields__
    for kind in kinds:
        asked, names = read_named(json.dumps(BASE[kind] | {alias: value}).encode(), kind)
        assert getattr(asked, own) == getattr(body(kind, {own: value}), own) == value
        assert getattr(body(kind, {alias: value, own: None}), own) == value
        other = not value if isinstance(value, bool) else ["b"] if own == "stop" else 2
        assert getattr(body(kind, {alias: value, own: other}), own) == other, "this server's own name counts"
        with pytest.raises(InvalidRequest) as refusal, names.renamed():
            read(json.dumps(BASE[kind] | {alias: {"no": "value"}}).encode(), kind)
        assert refusal.value.param is not None
        assert refusal.value.param.startswith(alias), "a refusal has the client's name"


def test_the_table_has_every_alias() -> None:
    assert {(alias, own) for own, aliases in peer_fields.ALIASES.items() for alias in aliases} == set(ALIASES)


def test_the_table_has_every_name_of_a_setting() -> None:
    thinking = {name for cell, _ in rows("field | thinking") for span in spans(cell) for name in fields(span)}
    assert thinking == {*peer_fields.WITH_THINKING, "chat_template_kwargs"}
    words = {"SCHEMA": 1, "REGEX": "x", "GRAMMAR": "x"}
    formats = [fields(span, **words) for cell, _ in rows("field | the answer is") for span in spans(cell)]
    assert {name for one in formats for name in one} == {*peer_fields.FORMATS, "response_format", "structured_outputs"}
    within = {key for one in formats for key in one.get("structured_outputs", {})}
    assert within == set(peer_fields.STRUCTURED_OUTPUTS)


ABSENT, ALL_TOKENS, ALL = "the field is absent", "as many tokens as the context has room for", "all tokens"
VALUES = [(span, meaning) for cell, meaning in rows("value | means") for span in spans(cell) if span[0] == '"']


@pytest.mark.parametrize(("span", "meaning"), VALUES)
def test_a_value_means_what_the_table_says(span: str, meaning: str) -> None:
    ((name, value),) = fields(span).items()
    if meaning in (ABSENT, ALL_TOKENS, ALL):
        own = next((own for alias, own in ALIASES if alias == name), name) if meaning == ALL_TOKENS else name
        for kind in kinds_with(own):
            for given in (value, float(value)):
                found = getattr(body(kind, {name: given}), own)
                assert found in {ABSENT: (None,), ALL_TOKENS: (1 << 31,), ALL: (0, -1)}[meaning]
        return
    expected = {key: each for one in spans(meaning) if one[0] == '"' for key, each in fields(one).items()}
    asked = body(Chat, {name: value})
    if "logit_bias" in expected:
        assert asked.logit_bias == {int(token): bias for token, bias in expected["logit_bias"].items()}
    else:
        assert (asked.logprobs, asked.top_logprobs) == (True, expected["top_logprobs"])


WHOLE = [(kind, name) for kind in BASE for name in sorted(peer_fields._whole_fields(kind))]


@pytest.mark.parametrize(("kind", "name"), WHOLE, ids=lambda value: getattr(value, "__name__", value))
def test_whole_numbers_may_be_floats(kind: type[msgspec.Struct], name: str) -> None:
    of_lists = name in ("stop_token_ids", "prompt")
    exact, floats = ([6, 7], [6.0, 70.0e-1]) if of_lists else (6, 6.0)
    assert getattr(body(kind, {name: floats}), name) == getattr(body(kind, {name: exact}), name)
    with pytest.raises(InvalidRequest):
        body(kind, {name: [6.5] if of_lists else 6.5})


def test_every_number_of_openais_is_among_them() -> None:
    names = {name for _, name in WHOLE}
    assert names >= {"max_tokens", "max_completion_tokens", "max_output_tokens", "n", "seed", "top_k", "top_logprobs"}


ON, OFF = "on; the length is not limited", "off"
THINKING = [(span, meaning) for cell, meaning in rows("field | thinking") for span in spans(cell)]


@pytest.mark.parametrize(("span", "meaning"), THINKING)
def test_thinking_is_switched_by_every_name(span: str, meaning: str) -> None:
    asked = body(Chat, fields(span))
    variables = _template_variables(asked.chat_template_kwargs or {}, asked.reasoning_effort, {})
    assert variables.get("enable_thinking") is {ON: True, OFF: False}.get(meaning)
    assert variables.get("thinking") is {ON: True, OFF: False}.get(meaning)
    efforts = {"high", "low", "medium"} & set(json.dumps(fields(span)).replace('"', " ").replace("}", " ").split())
    assert meaning == OFF or variables.get("reasoning_effort") == next(iter(efforts), None)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("span", [span for span, meaning in THINKING if meaning == OFF])
async def test_the_prompt_is_without_thinking(http: httpx.AsyncClient, span: str) -> None:
    async def tokens(more: dict[str, Any]) -> int:
        return int((await http.post("/tokenize", json={"messages": MESSAGES, **more})).json()["count"])

    assert await tokens(fields(span)) > await tokens({})  # the template writes an empty reasoning


@pytest.mark.parametrize("name", [*peer_fields.WITH_THINKING])
def test_a_setting_that_cannot_be_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        body(Chat, {name: [1]})
    assert refusal.value.param == name


FORMATS = [(span, meaning) for cell, meaning in rows("field | the answer is") for span in spans(cell)]
GOOD_AND_BAD = {
    "a JSON object": ('{"b":[]}', "[]"),
    "JSON by SCHEMA": ('{"a":7}', '{"a":"7"}'),
    "text that REGEX matches": ("abab", "aba"),
    "one of the texts": ("no", "maybe"),
    "text by GRAMMAR": ("<abc>", "<>"),
}


@pytest.mark.parametrize("kind", [Chat, Completion, ResponsesBody, MessagesBody], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("span", "meaning"), FORMATS)
def test_a_format_is_honoured_by_every_name(span: str, meaning: str, kind: type[msgspec.Struct]) -> None:
    good, bad = GOOD_AND_BAD[meaning]
    for schema in (SCHEMA, json.dumps(SCHEMA)) if span == '"json_schema": SCHEMA' or "guided" in span else (SCHEMA,):
        asked = body(kind, fields(span, SCHEMA=schema, REGEX="(ab)+", GRAMMAR=GRAMMAR)).response_format
        assert accepts(asked, good)
        assert not accepts(asked, bad)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"grammar": 7}, "grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_formats_that_contradict_or_cannot_be_read_are_refused_by_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        response_grammar(body(Chat, more).response_format)
    assert refusal.value.param == param


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("grammar", ["root ::= (", "root ::= missing", "(" * 20_000, "start: missing"])
async def test_a_grammar_that_cannot_be_followed_is_refused_by_the_clients_name(
    http: httpx.AsyncClient, grammar: str
) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "guided_grammar": grammar})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("guided_grammar")
    assert answer.json()["error"]["code"] == "invalid_grammar"


UNREAD = spans(DOCUMENT.partition("are left unread:\n\n")[2].partition("\n\n")[0])


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", UNREAD)
async def test_what_changes_no_text_is_left_unread(http: httpx.AsyncClient, name: str) -> None:
    assert name not in REFUSED
    for path, rest in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "SAY{x}END"})):
        answer = await http.post(path, json=rest | {name: ["any"]})
        assert answer.status_code == 200 or name in ("metadata",), answer.text


F = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOLS = [(span, here) for cell, here in rows("tool in a chat | here") for span in spans(cell) if span[0] == "{"]
ALTERNATIVES = [(span, meaning) for cell, meaning in rows("choice of a tool | means") for span in spans(cell)]


@pytest.mark.parametrize("kind", [Chat, Tokenize], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("span", "here"), TOOLS)
def test_a_tool_is_offered_or_left_out(span: str, here: str, kind: type[msgspec.Struct]) -> None:
    tool, other = json.loads(span), {"type": "function", "function": {"name": "other"}}
    asked = body(kind, {"messages": MESSAGES, "prompt": None, "tools": [tool, other]})
    names = [one.function.name for one in asked.tools]
    assert names == (["f", "other"] if here == "offered" else ["other"])
    assert here != "offered" or asked.tools[0].function.parameters == {}
    if here != "offered":
        with pytest.raises(InvalidRequest) as refusal:
            body(kind, {"messages": MESSAGES, "tools": [tool, other], "tool_choice": tool})
        assert refusal.value.param == "tool_choice"


@pytest.mark.parametrize(("span", "meaning"), ALTERNATIVES)
def test_a_choice_of_tools_is_read_in_every_form(span: str, meaning: str) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    asked = body(Chat, {"tools": [F, other], "tool_choice": json.loads(span)})
    tools, _ = offered_tools(asked)
    names = [tool.function.name for tool in tools]
    only = "allowed_tools" in span or meaning == "the function"
    assert names == ([] if meaning == "none" else ["f"] if only else ["f", "other"])
    if meaning == "the function":
        assert asked.tool_choice.function.name == "f"
    else:
        assert asked.tool_choice == meaning


PATHS = [(span, *spans(own)) for cell, own in rows("path | served as") for span in spans(cell)]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("path", "own"), PATHS)
async def test_a_path_is_served_in_every_way_without_a_redirect(http: httpx.AsyncClient, path: str, own: str) -> None:
    url = httpx.URL("http://edgemoe").copy_with(raw_path=path.encode())
    if own.endswith("completions"):
        answer = await http.post(url, json={"messages": MESSAGES})
    else:
        answer = await http.get(url)
        assert answer.json().keys() == (await http.get(own)).json().keys()
    assert answer.status_code == 200


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "path", ["/v1/nothing/", "/nothing", "/nothing/v1/nothing", "/v1", "/", "//", "/x/v1/models/a"]
)
async def test_other_paths_are_not_redirected_either(http: httpx.AsyncClient, path: str) -> None:
    url = httpx.URL("http://edgemoe").copy_with(raw_path=path.encode())
    assert (await http.get(url)).status_code in (200, 404)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_model_tells_its_context_by_every_name(http: httpx.AsyncClient) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    (cell,) = (cell for name, cell in rows("endpoint | what it takes beyond the plain case") if "/v1/models" in name)
    *names, last = spans(cell)
    assert last == "capabilities"
    assert [model[name] for name in names] == [4096] * 7
    assert {"completion", "tools", "tool_use"} <= set(model["capabilities"])
    assert {"tools", "response_format"} <= set(model["supported_parameters"])
    props = (await http.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert "im_start" in props["chat_template"]


@pytest.mark.asyncio(loop_scope="session")
async def test_llama_cpps_clients_tokenize(http: httpx.AsyncClient) -> None:
    plain = (await http.post("/tokenize", json={"content": "abc \u00e9"})).json()["tokens"]
    pieces = (await http.post("/tokenize", json={"content": "abc", "with_pieces": True})).json()["tokens"]
    assert (await http.post("/detokenize", json={"tokens": plain})).json()["content"] == "abc \u00e9"
    assert "".join(one["piece"] for one in pieces) == "abc"

"""Fields as clients of other servers send them: each row of the tables in docs/api.md."""

from __future__ import annotations

import json
import re
from itertools import chain, product
from typing import Any

import httpx
import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.api_tables import DOCUMENT, fields, rows, spans
from support.grammars import response_grammar

from edgemoe.api import peer_fields, peer_formats, spellings
from edgemoe.api.endpoints.anthropic import MessagesBody
from edgemoe.api.endpoints.chat_completions import _template_variables, offered_tools
from edgemoe.api.endpoints.ollama import OllamaChat, OllamaPrompt
from edgemoe.api.endpoints.responses import ResponsesBody
from edgemoe.api.llama_bodies import Infill
from edgemoe.api.schema import REFUSED, Chat, Completion, Detokenize, Tokenize, read, read_named
from edgemoe.api.text.chat_template import for_template
from edgemoe.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "SAY{x}END"}]
BASE: dict[type[msgspec.Struct], dict[str, Any]] = {
    Chat: {"messages": MESSAGES},
    Completion: {"prompt": "x"},
    ResponsesBody: {"input": "x"},
    MessagesBody: {"messages": MESSAGES},
    Tokenize: {"prompt": "x"},
}
SAMPLES: dict[str, Any] = {
    "stop": ["a"],
    "repetition_penalty": 1.25,
    "add_special_tokens": False,
    "ignore_eos": True,
    "continue_final_message": True,
}
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
    assert {name for one in formats for name in one} == {*peer_formats.FORMATS, "response_format", "structured_outputs"}
    within = {key for one in formats for key in one.get("structured_outputs", {})}
    assert within == set(peer_formats.STRUCTURED_OUTPUTS)


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


WHOLE = [(kind, name) for kind in BASE for name in sorted(spellings.whole_fields(kind))]


@pytest.mark.parametrize(("kind", "name"), WHOLE, ids=lambda value: getattr(value, "__name__", value))
def test_whole_numbers_may_be_floats(kind: type[msgspec.Struct], name: str) -> None:
    of_lists = name in ("stop_token_ids", "prompt")
    exact, floats = ([6, 7], [6.0, 70.0e-1]) if of_lists else (6, 6.0)
    assert getattr(body(kind, {name: floats}), name) == getattr(body(kind, {name: exact}), name)
    with pytest.raises(InvalidRequest):
        body(kind, {name: [6.5] if of_lists else 6.5})


SCALARS = [(kind, name) for kind in BASE for name in sorted(spellings.scalar_fields(kind))]


@pytest.mark.parametrize(("kind", "name"), SCALARS, ids=lambda value: getattr(value, "__name__", value))
def test_numbers_and_truths_may_be_texts(kind: type[msgspec.Struct], name: str) -> None:
    for value in (True, 1, 0.5):
        try:
            plain = getattr(body(kind, {name: value}), name)
        except InvalidRequest:
            continue
        assert getattr(body(kind, {name: json.dumps(value)}), name) == plain
    with pytest.raises(InvalidRequest):
        body(kind, {name: "many"})


@pytest.mark.parametrize("kind", BASE, ids=lambda kind: kind.__name__)
def test_fields_in_extra_body_are_read_where_there_are_no_own(kind: type[msgspec.Struct]) -> None:
    if "seed" not in kind.__struct_fields__:
        return
    assert body(kind, {"extra_body": {"random_seed": 3, "top_k": 4}}) == body(kind, {"seed": 3, "top_k": 4})
    assert body(kind, {"seed": 5, "extra_body": {"seed": 3}}).seed == 5
    assert body(kind, {"extra_body": ["any"]}) == body(kind, {})
    with pytest.raises(InvalidRequest, match="mirostat is not supported"):
        body(kind, {"extra_body": {"mirostat": 2}})


@pytest.mark.parametrize("seed", [2**63, 2**64 - 2, 2**63 - 1, -(2**63)])
def test_a_seed_has_64_bits_with_a_sign_or_without(seed: int) -> None:
    assert body(Chat, {"seed": seed}).seed % 2**64 == seed % 2**64


def test_no_sampling_is_the_likeliest_token() -> None:
    assert body(Chat, {"do_sample": False, "temperature": 0.7}).temperature == 0
    assert body(Chat, {"do_sample": True, "temperature": 0.7}).temperature == 0.7


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
    words = json.dumps(fields(span)).lower().replace('"', " ").replace("}", " ").split()
    efforts = {"high", "low", "medium"}.intersection(words)
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


CHAT = {what: spans(cell) for cell, what in rows("in a chat | here")}
HIDDEN = CHAT["the answer comes without its reasoning"]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("span", ["", *HIDDEN])
async def test_reasoning_is_left_out_of_the_answer_by_every_name(
    http: httpx.AsyncClient, span: str, stream: bool
) -> None:
    messages = [{"role": "user", "content": "SAY{<think>because</think>so}END"}]
    asked = {"messages": messages, "stream": stream, **fields(span)}
    text = (await http.post("/v1/chat/completions", json=asked)).text
    assert ('"reasoning_content"' in text) == ('"reasoning"' in text) == (not span)
    assert "so" in "".join(re.findall(r'"content":"([^"]*)"', text))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("span", CHAT["the answer goes on with that message"])
async def test_an_answer_goes_on_with_the_last_message_by_every_name(http: httpx.AsyncClient, span: str) -> None:
    asked = [*MESSAGES, {"role": "assistant", "content": "The capital"}]
    more = fields(span)
    if "continue_" not in more:
        asked[-1] |= more
        more = {}
    first = (await http.post("/apply-template", json={"messages": asked, **more})).json()["prompt"]
    assert first.endswith("The capital")
    asked.append({"role": "user", "content": "x"})
    later = (await http.post("/apply-template", json={"messages": asked})).json()["prompt"]
    assert not later.endswith("The capital")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_one_of_the_other_models_will_do(http: httpx.AsyncClient, path: str) -> None:
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
    for model in ({"model": "none"}, {}):
        answer = await http.post(path, json={**asked, **model, "models": ["nobody", "tiny"], "max_tokens": 1})
        assert answer.json()["model"] == "tiny", answer.text
    refused = await http.post(path, json={**asked, "model": "none", "models": ["nobody"]})
    assert refused.status_code == 404


PARTS: list[tuple[str, Any, str]] = [  # role and content of an earlier message, and its words in the prompt
    (
        "user",
        [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "see"}],
        "[image_url left",
    ),
    ("user", ["one ", {"type": "text", "text": "two"}], "one two"),
    ("user", {"type": "text", "text": "single"}, "single"),
    ("assistant", [{"type": "refusal", "refusal": "no way"}], "no way"),
    ("tool", {"t": 5}, '{"t": 5}'),
]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("role", "content", "shown"), PARTS)
async def test_parts_of_earlier_messages_are_read_or_noted(
    http: httpx.AsyncClient, role: str, content: Any, shown: str
) -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "sh", "input": "ls -l"}}
    called: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = [*MESSAGES, *(called if role == "tool" else ())]
    messages = [*before, {"role": role, "content": content}, {"role": "user", "content": "last"}]
    answer = (await http.post("/apply-template", json={"messages": messages})).json()
    assert shown in answer["prompt"]
    assert ('{"input": "ls -l"}' in answer["prompt"].replace("\\", "")) == (role == "tool")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("part", ["image_url", "input_audio", "video_url", "file"])
async def test_a_part_that_is_no_text_is_refused_in_the_last_question(http: httpx.AsyncClient, part: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "x"}, {"role": "user", "content": [{"type": part}]}]
    refused = await http.post("/v1/chat/completions", json={"messages": messages})
    assert refused.status_code == 400
    assert part in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["thinking", "reasoning"])
@pytest.mark.parametrize("within", ["because", [{"type": "text", "text": "because"}]])
def test_the_reasoning_among_a_messages_parts_is_its_reasoning(kind: str, within: Any) -> None:
    thought = {"type": kind, ("thinking" if kind == "thinking" else "text"): "because"}
    if kind == "thinking":
        thought["thinking"] = within
    asked = body(Chat, {"messages": [{"role": "assistant", "content": [thought, {"type": "text", "text": "so"}]}]})
    (message,) = for_template(asked.messages)
    assert (message["reasoning_content"], message["content"]) == ("because", "so")


@pytest.mark.asyncio(loop_scope="session")
async def test_llama_cpps_completion_has_its_fields(http: httpx.AsyncClient) -> None:
    for prompt in ("SAY{abc}END", [5, 6], ["SAY{abc}END"], [[5, 6]]):
        answer = (await http.post("/completion", json={"prompt": prompt, "n_predict": 3})).json()
        assert answer["stop"]
        assert "content" in answer
    assert (await http.post("/completion", json={"prompt": ["a", "b"]})).status_code == 400


@pytest.mark.asyncio(loop_scope="session")
async def test_the_tokens_of_a_response_are_counted(http: httpx.AsyncClient) -> None:
    counted = (await http.post("/v1/responses/input_tokens", json={"input": MESSAGES})).json()
    answer = (await http.post("/v1/responses", json={"input": MESSAGES})).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


F = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOLS = [(span, here) for cell, here in rows("tool in a chat | here") for span in spans(cell) if span[0] == "{"]
ALTERNATIVES = [(span, meaning) for cell, meaning in rows("choice of a tool | means") for span in spans(cell)]


@pytest.mark.parametrize("kind", [Chat, Tokenize], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("span", "here"), TOOLS)
def test_a_tool_is_offered_or_left_out(span: str, here: str, kind: type[msgspec.Struct]) -> None:
    tool, other = json.loads(span), {"type": "function", "function": {"name": "other"}}
    asked = body(kind, {"messages": MESSAGES, "prompt": None, "tools": [tool, other]})
    names = [one.function.name for one in asked.tools]
    name = "c" if "custom" in span else "f"
    assert names == ([name, "other"] if here.startswith("offered") else ["other"])
    assert here != "offered" or asked.tools[0].function.parameters == {}
    if here.startswith("offered"):
        given = {"type": "function", "function": {"name": name}} if name == "f" else tool
        chosen = body(kind, {"messages": MESSAGES, "prompt": None, "tools": [other, tool], "tool_choice": given})
        assert chosen.tool_choice.function.name == name
    else:
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
    path, own = (each.replace("models/NAME", "models/tiny") for each in (path, own))
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


KINDS: tuple[type[msgspec.Struct], ...] = (
    *(Chat, Completion, Infill, Tokenize, Detokenize),
    *(ResponsesBody, MessagesBody, OllamaChat, OllamaPrompt),
)
OTHERS = ("extra_body", "do_sample", "think", "thinking", "google", "reasoning", "functions", "function_call", "format")
ODD = (
    *(b"1e999999", b"9" * 5000, b'"\\ud800"', b'{"a": 1e999999}', b"[[5, 1e999999]]"),
    *(b"[" * depth + b"1.5" + b"]" * depth for depth in (120, 700, 900, 3000)),
    b'{"a":' * 900 + b"1.5" + b"}" * 900,
)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_impossible_values_of_any_field_are_the_client_s_fault(kind: type[msgspec.Struct]) -> None:
    aliases, sentinels = peer_fields.ALIASES, peer_fields.SENTINELS
    names = {*kind.__struct_fields__, *aliases, *chain(*aliases.values()), *sentinels, *REFUSED, *OTHERS}
    refused = 0
    for name, value in product(sorted(names), ODD):
        try:
            read_named(b'{"%s": %s}' % (name.encode(), value), kind)
        except InvalidRequest:
            refused += 1
    assert refused > len(names)

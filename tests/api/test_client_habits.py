"""Bodies as clients of many languages write them: every spelling of a field, on every endpoint that has it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest
from anthropic.pagination import SyncPage
from anthropic.types import ModelInfo
from msgspec import inspect
from support.api_tables import fields, rows, spans
from support.grammars import response_grammar

from edgemoe.api.endpoints.anthropic import MessagesBody, OfferedTool, ToolChoice
from edgemoe.api.endpoints.lm_studio import LmStudioChat
from edgemoe.api.endpoints.ollama import OllamaChat, OllamaPrompt
from edgemoe.api.endpoints.responses import ResponsesBody, TextFormat
from edgemoe.api.generate.generation import RequestContext
from edgemoe.api.llama_bodies import Infill, LlamaCompletion
from edgemoe.api.model_wish import read_ollama_wish, read_wish
from edgemoe.api.queries import models_page
from edgemoe.api.schema import (
    REFUSED,
    Chat,
    ChatMessage,
    Completion,
    Function,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    Tokenize,
    read,
)
from edgemoe.api.spellings import empty_values
from edgemoe.errors import InvalidRequest
from edgemoe.types.model_info import asked_names

pytestmark = pytest.mark.asyncio(loop_scope="session")
SAID = [{"role": "user", "content": "SAY{one two}END"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "SAY{one two}END", "max_tokens": 30},
    "/v1/responses": {"input": "SAY{one two}END"},
    "/v1/messages": {"messages": SAID, "max_tokens": 30},
    "/completion": {"prompt": "SAY{one two}END"},
}
OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "tiny", "messages": SAID},
    "/api/generate": {"model": "tiny", "prompt": "SAY{one two}END"},
}
SPELLED = [
    ([json.loads(one) for one in spans(cell)], of, meant)
    for cell, of, meant in rows("value | of a field that | is read as")
]
TRUE, FALSE = (next(values for values, _, meant in SPELLED if meant == truth) for truth in ("`true`", "`false`"))
EMPTY = {of.partition(",")[0]: values[0] for values, of, meant in SPELLED if meant == "absent"}
STREAMS = [{"stream": True}, {"extra_body": {"stream": "yes"}}, *({"stream": one} for one in TRUE)]
WHOLES = [{}, {"extra_body": {"stream": 0}}, *({"stream": one} for one in (None, False, *FALSE, ""))]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("asked", "kind"), [(one, True) for one in STREAMS] + [(one, False) for one in WHOLES], ids=str
)
async def test_an_answer_is_a_stream_by_every_spelling(
    http: httpx.AsyncClient, path: str, asked: dict[str, Any], kind: bool
) -> None:
    body = BODIES[path] | asked
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream" if kind else "application/json")
    assert ("data: " in answer.text) == kind == read_wish(json.dumps(body).encode()).is_stream
    assert kind or "one two" in answer.text


@pytest.mark.parametrize("path", OLLAMA)
@pytest.mark.parametrize("value", ["absent", None, True, *TRUE, "", False, *FALSE])
async def test_ollamas_answer_is_a_stream_unless_it_shall_not_be(
    http: httpx.AsyncClient, path: str, value: Any
) -> None:
    body = OLLAMA[path] | ({} if value == "absent" else {"stream": value})
    answer = await http.post(path, json=body)
    kind = value not in (False, *FALSE)
    assert (answer.headers["content-type"] == "application/x-ndjson") == kind == (len(answer.text.splitlines()) > 1)
    assert read_ollama_wish(json.dumps(body).encode()).is_stream == kind


@pytest.mark.parametrize("path", [*BODIES, *OLLAMA, "/tokenize", "/v1/messages/count_tokens", "/apply-template"])
async def test_a_mark_of_byte_order_before_a_body_is_skipped(http: httpx.AsyncClient, path: str) -> None:
    body = BODIES.get(path) or OLLAMA.get(path) or {"messages": SAID}
    answer = await http.post(path, content=codecs.BOM_UTF8 + json.dumps(body).encode())
    assert answer.status_code == 200, answer.text


NAMES = [(span, meaning) for cell, meaning in rows("name in a request | is") for span in spans(cell)]


@pytest.mark.parametrize(("span", "meaning"), NAMES)
async def test_a_model_is_named_as_the_table_says(http: httpx.AsyncClient, span: str, meaning: str) -> None:
    name = json.loads(span) if span[0] == '"' else span.replace("NAME", "Tiny").replace("name", "tiny")
    status = 404 if "404" in meaning else 200
    for path, body in (BODIES | OLLAMA).items():
        answer = await http.post(path, json=body | {"model": name})
        assert answer.status_code == (400 if path in OLLAMA and not name else status), answer.text
        assert status == 404 or path in OLLAMA or answer.json().get("model", "tiny") == "tiny", (
            "answers name it as it is"
        )
    if name:
        found = await http.get(f"/v1/models/{name.rstrip('/')}" if status == 200 else f"/v1/models/{name}x")
        assert found.status_code == status
        assert status == 404 or found.json()["id"] == "tiny"


async def test_a_name_stands_for_few_others() -> None:
    assert list(asked_names("A/b/C/d/e")) == ["a/b/c/d/e", "b/c/d/e", "c/d/e", "d/e"]
    assert list(asked_names("a/")) == ["a/"]
    assert list(asked_names("/" * 100_000))[1:] == ["/" * 99_999, "/" * 99_998, "/" * 99_997]


PATHS = [(span, spans(target)[0]) for cell, target in rows("path | served as") for span in spans(cell)]


@pytest.mark.parametrize(("path", "target"), PATHS)
async def test_a_path_is_served_as_the_table_says(http: httpx.AsyncClient, path: str, target: str) -> None:
    async def answer(at: str) -> Any:
        if "chat" not in at:
            answer = await http.get(at.replace("models/NAME", "models/tiny"))
            assert answer.status_code == 200
            return answer.json()
        return (await http.post(at, json={"messages": SAID, "stream": False})).json()["choices"]

    assert await answer(path) == await answer(target)


KINDS: list[type[msgspec.Struct]] = [
    *(Chat, Completion, LlamaCompletion, Infill, ResponsesBody, MessagesBody, OllamaChat, OllamaPrompt),
    *(LmStudioChat, Tokenize),
]


def structs_in(kind: inspect.Type, seen: set[type]) -> Iterator[inspect.StructType]:
    """Yields the structs that a body of this kind may hold, itself first."""
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        yield kind
        for field in kind.fields:
            yield from structs_in(field.type, seen)
    for name in ("types", "item_type", "value_type"):
        held = getattr(kind, name, ())
        for one in held if isinstance(held, tuple) else (held,):
            yield from structs_in(one, seen)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_null_is_absent_in_every_field_that_may_be_absent(kind: type[msgspec.Struct]) -> None:
    for struct in structs_in(inspect.type_info(kind), set()):
        for field in struct.fields:
            if not field.required:
                hint = get_type_hints(struct.cls, include_extras=True)[field.name]
                msgspec.convert(None, hint)  # raises where null is refused


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_an_empty_value_of_another_type_is_absent(kind: type[msgspec.Struct]) -> None:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    needed = {"messages": SAID, "prompt": "x", "input": "x"}
    body = {field.name: needed[field.name] for field in described.fields if field.required}
    for field in described.fields:
        for value in EMPTY.values() if not field.required else ():
            if json.dumps(value).encode() in empty_values(kind)[field.name]:
                assert read(json.dumps(body | {field.name: value}).encode(), kind) == read(
                    json.dumps(body).encode(), kind
                )
    assert body.keys().isdisjoint(empty_values(kind))


EMPTIES = {
    "is no text": ("temperature", "seed", "n", "stream", "logprobs", "stop_token_ids", "stream_options", "tools"),
    "is an object": ("logit_bias", "response_format", "stream_options", "chat_template_kwargs"),
    "is a list": ("tools", "stop", "stop_token_ids", "models"),
}


@pytest.mark.parametrize(("of", "value"), EMPTY.items(), ids=str)
async def test_an_empty_value_changes_no_answer(http: httpx.AsyncClient, of: str, value: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        for name in EMPTIES[of]:
            answer = await http.post(path, json=BODIES[path] | {name: value})
            assert (answer.status_code, "one two" in answer.text) == (200, True), f"{name}: {answer.text}"
    for name, wrong in (("cache_salt", ""), ("cache_salt", []), ("temperature", []), ("user", {}), ("seed", {})):
        refused = await http.post("/v1/completions", json=BODIES["/v1/completions"] | {name: wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


NESTED: list[tuple[type[msgspec.Struct], str]] = [
    (TextFormat, "strict"),
    (StreamOptions, "include_usage"),
    (Function, "strict"),
    (JsonSchema, "strict"),
    (ResponseFormat, "strict"),
    (ChatMessage, "prefix"),
    (ChatMessage, "partial"),
    (OfferedTool, "strict"),
    (ToolChoice, "disable_parallel_tool_use"),
]


@pytest.mark.parametrize(("kind", "name"), NESTED, ids=str)
async def test_true_and_false_within_a_part_may_be_numbers_or_texts(kind: type[msgspec.Struct], name: str) -> None:
    need = {"name": "f", "type": "auto", "role": "user"}
    for values, meant in ((TRUE, True), (FALSE, False), ([True], True), ([False], False), ([None], None)):
        for value in values:
            assert getattr(msgspec.convert(need | {name: value}, kind), name) is meant
    wrongs: list[Any] = ["maybe", 2, [1]]
    for wrong in wrongs:
        with pytest.raises(msgspec.ValidationError, match="Expected `bool"):
            msgspec.convert(need | {name: wrong}, kind)


async def test_every_part_with_true_or_false_is_tried() -> None:
    found = [struct for kind in KINDS for struct in structs_in(inspect.type_info(kind), set())]
    truths = {(one.cls, name) for one in found for name in getattr(one.cls, "truths", ())}
    assert truths == set(NESTED)
    plain = {(one.cls, field.name) for one in found for field in one.fields if is_truth(field.type)}
    assert {kind for kind, _ in plain} <= set(KINDS), "a body's own fields are read by another way"


def is_truth(kind: inspect.Type) -> bool:
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return {type(one) for one in types} <= {inspect.BoolType, inspect.NoneType}


@pytest.mark.parametrize("value", [2**31, 2**31 + 1, 10**12, 1e12, str(10**12), 10**30])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "top_k"])
async def test_a_number_that_is_cut_anyway_has_no_bound(http: httpx.AsyncClient, name: str, value: Any) -> None:
    for path in ("/v1/chat/completions", "/completion"):
        answer = await http.post(path, json=BODIES[path] | {name: value})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", [name for name, neutral in REFUSED.items() if neutral])
async def test_an_unsupported_field_may_have_a_value_without_effect_as_text_too(name: str) -> None:
    for kind, rest in ((Chat, {"messages": SAID}), (Completion, {"prompt": "x"})):
        if name in kind.__struct_fields__:
            continue
        for value in REFUSED[name]:
            for spelling in (value, json.dumps(value)) if isinstance(value, int | float) else (value,):
                read(json.dumps(rest | {name: spelling}).encode(), kind)
        with pytest.raises(InvalidRequest, match=name):
            read(json.dumps(rest | {name: "no such value"}).encode(), kind)


async def test_as_many_best_of_as_choices_are_all_of_them() -> None:
    assert read(b'{"prompt": "x", "n": 3, "best_of": 3}', Completion).n == 3
    for other in (b'{"prompt": "x", "n": 2, "best_of": 3}', b'{"prompt": "x", "best_of": 2}'):
        with pytest.raises(InvalidRequest, match="best_of"):
            read(other, Completion)


@pytest.mark.parametrize("empty", [{}, {"type": None}, {"type": None, "json_schema": None}])
async def test_an_empty_format_is_no_format(empty: dict[str, Any]) -> None:
    for kind, rest in ((Chat, {"messages": SAID}), (Completion, {"prompt": "x"})):
        assert read(json.dumps(rest | {"response_format": empty}).encode(), kind).response_format is None


FORM_ROWS = [
    (span, meaning) for cell, meaning in rows("log probabilities of a completion | means") for span in spans(cell)
]


@pytest.mark.parametrize(("span", "meaning"), FORM_ROWS)
async def test_a_completions_log_probabilities_have_the_form_of_a_chats(span: str, meaning: str) -> None:
    asked = read(json.dumps({"prompt": "x", **fields(span)}).encode(), Completion)
    assert asked.logprobs == fields(spans(meaning)[0])["logprobs"]


# --- llama.cpp -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_llamas_completion_has_tokens_probabilities_and_the_word_that_stopped_it(
    http: httpx.AsyncClient, stream: bool
) -> None:
    asked = BODIES["/completion"] | {"return_tokens": True, "n_probs": 2, "stop": ["two"], "stream": stream}
    text = (await http.post("/completion", json=asked)).text
    parts = (
        [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
        if stream
        else [json.loads(text)]
    )
    assert "".join(part["content"] for part in parts) == "one "
    last = parts[-1]
    assert (last["stop"], last["stop_type"], last["stopping_word"]) == (True, "word", "two")
    shown = [one for part in parts for one in part["completion_probabilities"]]
    assert [token for part in parts for token in part["tokens"]] == [one["id"] for one in shown]
    assert "".join(one["token"] for one in shown) == "one two"
    for one in shown:
        assert bytes(one["bytes"]).decode() == one["token"]
        assert len(one["top_logprobs"]) == 2
        assert one["logprob"] <= 0
    plain = (await http.post("/completion", json=BODIES["/completion"])).json()
    assert not {"tokens", "completion_probabilities"} & plain.keys()
    assert (plain["stop_type"], plain["stopping_word"]) == ("eos", "")


async def test_no_tokens_compute_the_prompt_alone(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/completion", json=BODIES["/completion"] | {"n_predict": 0})).json()
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 0})).status_code == 400


def _is_text(piece: Any) -> bool:
    return isinstance(piece, str) or bytes(piece).decode(errors="ignore").encode() == bytes(piece)


async def test_tokens_have_texts_or_bytes_and_special_ones_are_never_text(http: httpx.AsyncClient) -> None:
    asked = {"content": "a\u00e9", "with_pieces": True}
    pieces = [one["piece"] for one in (await http.post("/tokenize", json=asked)).json()["tokens"]]
    raw = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert raw.decode() == "a\u00e9"
    assert [type(piece) for piece in pieces] == [str if _is_text(piece) else list for piece in pieces]
    named = (await http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
    assert "".join(named["token_strs"]) == "ab"
    for text, status in (("plain", 200), ("a<|im_end|>", 400)):
        answer = await http.post("/tokenize", json={"content": text, "parse_special": False})
        assert answer.status_code == status, answer.text


async def test_a_chats_prompt_is_counted_and_other_kinds_of_models_are_refused_by_name(http: httpx.AsyncClient) -> None:
    asked = {"messages": SAID}
    counted = (await http.post("/v1/chat/completions/input_tokens", json=asked)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    assert counted["input_tokens"] == (await http.post("/tokenize", json=asked)).json()["count"]
    for path in ("/embedding", "/rerank", "/v1/rerank", "/reranking", "/v1/reranking", "/score", "/pooling"):
        answer = await http.post(path, json={"query": "x", "documents": ["y"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_embeddings")


async def test_a_list_of_models_is_whole_for_anthropics_clients(http: httpx.AsyncClient) -> None:
    found = (await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("tiny", "tiny", False)
    assert found["data"][0]["display_name"] == "tiny"
    assert found["data"][0]["created_at"].endswith("Z")


VERSION = {"anthropic-version": "2023-06-01"}


async def test_anthropics_clients_get_its_own_objects(http: httpx.AsyncClient) -> None:
    page = SyncPage[ModelInfo].model_validate((await http.get("/v1/models", headers=VERSION)).json())
    one = ModelInfo.model_validate((await http.get("/v1/models/TINY", headers=VERSION)).json())
    assert [model.id for model in page.data] == [one.id] == ["tiny"]
    assert one.to_dict() == (await http.get("/v1/models", headers=VERSION)).json()["data"][0] | {
        "created_at": one.to_dict()["created_at"]
    }
    assert (await http.get("/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize(
    ("asked", "ids", "has_more"),
    [
        ("", "abcd", False),
        ("limit=2", "ab", True),
        ("limit=2&after_id=b", "cd", False),
        ("after_id=a&limit=1", "b", True),
        ("before_id=d&limit=2", "bc", True),
        ("before_id=c", "ab", False),
        ("after_id=d", "", False),
    ],
)
async def test_models_come_in_anthropics_pages(asked: str, ids: str, has_more: bool) -> None:
    card = {"display_name": "", "created_at": "", "max_input_tokens": 1, "max_output_tokens": 1, "capabilities": []}
    page = models_page([card | {"id": id} for id in "abcd"], httpx.QueryParams(asked))
    edges = (ids[0], ids[-1]) if ids else (None, None)
    assert [model["id"] for model in page["data"]] == list(ids)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (has_more, *edges)


@pytest.mark.parametrize("asked", ["limit=0", "limit=1001", "limit=x", "limit=%C2%B2", "after_id=no", "before_id="])
async def test_a_page_that_is_not_there_is_refused_in_anthropics_form(http: httpx.AsyncClient, asked: str) -> None:
    answer = await http.get(f"/v1/models?{asked}", headers=VERSION)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/models/nothing", 404, "not_found_error"),
        ("GET", "/v1/nothing", 404, "not_found_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
        ("DELETE", "/v1/models", 405, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", 400, "invalid_request_error"),
        ("POST", "/v1/embeddings", 404, "not_found_error"),
    ],
)
async def test_anthropics_clients_get_its_errors(
    http: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    answer = await http.request(method, path, headers=VERSION)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert "type" not in (await http.get("/v1/nothing")).json()
    openais = await http.post("/v1/chat/completions", json={}, headers=VERSION)
    assert openais.json()["error"]["code"] == "missing_required_parameter"


async def test_a_path_tells_its_methods(http: httpx.AsyncClient) -> None:
    for path, methods in (("/v1/models", {"GET", "HEAD"}), ("/v1/messages", {"POST"}), ("/api/chat", {"POST"})):
        answer = await http.request("OPTIONS", path)
        assert (answer.status_code, answer.content) == (204, b"")
        assert set(answer.headers["allow"].split(", ")) == methods
    assert (await http.request("OPTIONS", "/v1/nothing")).status_code == 404


async def test_llama_cpps_router_loads_and_names_states(http: httpx.AsyncClient) -> None:
    assert (await http.post("/models/load", json={"model": "tiny"})).json()["success"] is True
    assert (await http.get("/models")).json()["data"][0]["status"] == {"value": "loaded"}
    kept = await http.post("/models/unload", json={"model": "tiny"})
    assert (kept.status_code, "pinned" in kept.json()["error"]["message"]) == (400, True)
    for path in ("/props", "/slots/0?action=save", "/lora-adapters"):
        refused = await http.post(path, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_endpoint")


# --- tools and their results ---------------------------------------------------------------------------------------

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = 'SAY{<tool_call>\n{"name": "weather", "arguments": {"city": "X"}}\n</tool_call>}END'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [None, "auto", {"name": "weather"}])
async def test_functions_in_openais_first_form_are_called_in_it(
    http: httpx.AsyncClient, choice: Any, stream: bool
) -> None:
    asked = {
        "messages": [{"role": "user", "content": CALL}],
        "functions": [{"name": "weather", "parameters": CITY}],
        "function_call": choice,
        "stream": stream,
    }
    text = (await http.post("/v1/chat/completions", json=asked)).text
    assert "tool_calls" not in text
    if stream:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [one["choices"][0] for one in events]
        parts = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
        call = {"name": parts[0]["name"], "arguments": "".join(part["arguments"] for part in parts)}
    else:
        choices = json.loads(text)["choices"]
        call = choices[0]["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "X"})
    assert choices[-1]["finish_reason"] == "function_call"


async def test_a_call_in_openais_first_form_and_its_result_are_read_back(http: httpx.AsyncClient) -> None:
    said = {"name": "weather", "arguments": '{"city": "X"}'}
    first = [
        {"role": "assistant", "content": None, "function_call": said},
        {"role": "function", "name": "weather", "content": "9"},
    ]
    call = {"id": "c", "type": "function", "function": said}
    later = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    found = [
        (await http.post("/apply-template", json={"messages": [*SAID, *turns]})).json() for turns in (first, later)
    ]
    assert found[0] == found[1]
    assert '"city": "X"' in found[0]["prompt"].replace("\\", "")


RESULTS: list[tuple[Any, str]] = [
    (42, "42"),
    (1.5, "1.5"),
    (True, "true"),
    (None, ""),
    ([1, 2], "[1, 2]"),
    ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]'),
    ([None], "[null]"),
    ([{"text": "a"}, "b", {"type": "text", "text": "c"}, {"type": "text", "text": None}], "abc"),
    ({"a": [1]}, '{"a": [1]}'),
]


@pytest.mark.parametrize(("result", "shown"), RESULTS, ids=str)
async def test_the_result_of_a_tool_may_be_any_json(http: httpx.AsyncClient, result: Any, shown: str) -> None:
    call = {"id": "c", "type": None, "function": {"name": "f", "arguments": []}}
    turns = [
        *({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}),
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    prompt = (await http.post("/apply-template", json={"messages": turns})).json()["prompt"]
    assert f"<|im_start|>tool\n{shown}<|im_end|>" in prompt
    ollama = [
        *(turns[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}),
        {"role": "tool", "content": result},
    ]
    answer = await http.post(
        "/api/chat", json={"model": "tiny", "messages": ollama, "stream": False, "options": {"num_predict": 1}}
    )
    assert (
        answer.json()["prompt_eval_count"] == (await http.post("/tokenize", json={"messages": turns})).json()["count"]
    )


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (7, "messages[0].content"),
        (True, "messages[0].content"),
        ([7], "messages[0].content[0]"),
        (["a", None], "messages[0].content[1]"),
        ([{"type": "text", "text": 7}], "messages[0].content[0].text"),
        ([{"type": 7}], "messages[0].content[0].type"),
    ],
)
async def test_a_wrong_part_is_refused_by_its_path(http: httpx.AsyncClient, content: Any, param: str) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text
    assert answer.json()["error"]["code"] == "invalid_type"


async def test_ollamas_earlier_images_are_noted_and_other_tools_left_out(http: httpx.AsyncClient) -> None:
    seen = [{"role": "user", "content": "look", "images": ["AAAA"]}, {"role": "assistant", "content": "a"}, *SAID]
    offered = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": CITY}]
    asked = {"model": "tiny", "stream": False, "options": []}
    assert (await http.post("/api/chat", json={**asked, "messages": seen, "tools": offered})).status_code == 200
    assert (await http.post("/api/chat", json={**asked, "messages": seen[:1]})).status_code == 400


@pytest.mark.parametrize("most", [0, -1, -2, -5])
async def test_no_positive_num_predict_is_no_limit(http: httpx.AsyncClient, most: int) -> None:
    for path, body in OLLAMA.items():
        answer = await http.post(path, json=body | {"stream": False, "options": {"num_predict": most}})
        assert answer.json()["done_reason"] == "stop", answer.text


OFFERS = [(span, meaning) for cell, meaning in rows("tool in a chat | here") for span in spans(cell)]
CHOICES = [(span, meaning) for cell, meaning in rows("choice of a tool | means") for span in spans(cell)]
PLACES = {"/v1/chat/completions": {}, "/v1/responses": {}, "/v1/messages": {"max_tokens": 400}}


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize(("span", "meaning"), CHOICES)
async def test_a_choice_of_a_tool_is_read_in_every_api(
    http: httpx.AsyncClient, path: str, span: str, meaning: str
) -> None:
    """Only a choice that forbids tools hides them from the model."""
    given = json.loads(span)
    if path == "/v1/messages" and isinstance(given, dict) and given["type"] == "allowed_tools":
        return  # Anthropic has no such choice
    tool: dict[str, Any] = {
        "name": "f",
        "description": "of tools",
        **({"parameters": CITY} if "mess" not in path else {"input_schema": CITY}),
    }
    offered = [tool if "mess" in path else {"type": "function", **tool}]
    said = {"input": "x"} if "responses" in path else {"messages": [{"role": "user", "content": "x"}]}
    counts = {
        "/v1/chat/completions": "/v1/chat/completions/input_tokens",
        "/v1/responses": "/v1/responses/input_tokens",
        "/v1/messages": "/v1/messages/count_tokens",
    }

    async def count(more: dict[str, Any]) -> int:
        answer = await http.post(counts[path], json={**said, **PLACES[path], **more})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    shown = await count({"tools": offered, "tool_choice": given}) > await count({})
    assert shown == (meaning != "none")


@pytest.mark.parametrize(("span", "meaning"), [one for one in OFFERS if '"custom"' not in one[0]])  # functions there
async def test_a_tool_in_any_form_is_offered_in_anthropics_messages_too(
    http: httpx.AsyncClient, span: str, meaning: str
) -> None:
    async def count(tools: list[Any]) -> int:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "metadata": {"user_id": 7}}
        return int((await http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"])

    assert (await count([json.loads(span)]) > await count([])) == (meaning == "offered")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_more_answers_than_an_api_has_are_refused(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json=BODIES[path] | {"n": 2})
    assert answer.status_code == 400
    assert "n: one answer" in answer.text
    assert (await http.post(path, json=BODIES[path] | {"n": 1})).status_code == 200


GRAMMARS: list[dict[str, Any]] = [
    {"type": "json_schema", "name": "x", "schema": CITY},
    {"type": "json_schema", "schema": json.dumps(CITY)},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}},
    {"type": "grammar", "grammar": 'root ::= "a"'},
    {"type": "regex", "pattern": "a+"},
    {"type": "choice", "choice": ["a", "b"]},
    {"type": "json_object"},
]


@pytest.mark.parametrize("form", GRAMMARS, ids=str)
async def test_a_response_has_every_format_of_a_chat(http: httpx.AsyncClient, form: dict[str, Any]) -> None:
    asked = {"input": "x", "max_output_tokens": 3, "text": {"format": form}}
    assert (await http.post("/v1/responses", json=asked)).status_code == 200
    chat = read(json.dumps({"messages": SAID, "response_format": form}).encode(), Chat)
    assert response_grammar(chat.response_format) is not None


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt"])
async def test_an_empty_reference_to_an_earlier_response_is_none(http: httpx.AsyncClient, name: str) -> None:
    empty = {} if name == "prompt" else ""
    assert (
        await http.post("/v1/responses", json={"input": "x", name: empty, "max_output_tokens": 1})
    ).status_code == 200


@pytest.mark.parametrize("value", ["low", "off", True, False, {"effort": "low"}, None])
async def test_reasoning_of_a_response_is_a_word_a_switch_or_an_object(http: httpx.AsyncClient, value: Any) -> None:
    async def count(more: dict[str, Any]) -> int:
        return int((await http.post("/v1/responses/input_tokens", json={"input": "x", **more})).json()["input_tokens"])

    is_off = value in ("off", False) and value is not None
    assert (await count({"reasoning": value}) > await count({})) == is_off


# --- texts among numbers -------------------------------------------------------------------------------------------

PROMPTS = [(span, meaning) for cell, meaning in rows("prompt of a completion | is") for span in spans(cell)]


@pytest.mark.parametrize(("span", "meaning"), PROMPTS)
async def test_a_prompt_may_mix_texts_and_ids(http: httpx.AsyncClient, span: str, meaning: str) -> None:
    asked = fields(span) | {"max_tokens": 1}
    answer = await http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    count = 2 if meaning.startswith("two") else 1
    assert len(answer.json()["choices"]) == count
    alone = await http.post("/completion", json=asked)
    assert alone.status_code == (200 if count == 1 else 400), alone.text


async def test_the_parts_of_a_mixed_prompt_stand_behind_each_other(http: httpx.AsyncClient) -> None:
    async def prompt(given: Any) -> str:
        asked = {"prompt": given, "echo": True, "max_tokens": 1}
        return str((await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"])

    ids = (await http.post("/tokenize", json={"prompt": "SAY{x", "add_special_tokens": False})).json()["tokens"]
    assert (await prompt([*ids, "y z", *ids[:1], "}END"])).startswith("SAY{xy z")
    refused = await http.post("/v1/completions", json={"prompt": [10**9, "x"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[0]")
    media = {"prompt": {"prompt_string": "x", "multimodal_data": ["AAAA"]}}
    assert (await http.post("/completion", json=media)).json()["error"]["param"] == "prompt.multimodal_data"


@pytest.mark.parametrize(
    "form", [{"Hello": -3, "65": 2}, [["Hello", -3], [65, 2]], [["Hello", -3], ["65", 2]]], ids=str
)
async def test_a_bias_of_a_text_is_that_of_its_tokens(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    seen: list[dict[int, float]] = []
    made = RequestContext.engine_requests

    def engine_requests(self: RequestContext, *args: Any) -> Any:
        found = made(self, *args)
        seen.extend(dict(one.sampling.logit_bias) for one in found)
        return found

    monkeypatch.setattr(RequestContext, "engine_requests", engine_requests)
    ids = (await http.post("/tokenize", json={"prompt": "Hello", "add_special_tokens": False})).json()["tokens"]
    for path, body in BODIES.items():
        answer = await http.post(path, json=body | {"logit_bias": form})
        assert answer.status_code == 200, answer.text
        assert seen.pop() == dict.fromkeys(ids, -3.0) | {65: 2.0}
    many = {f"word {at}": 1 for at in range(257)}
    answer = await http.post("/v1/chat/completions", json={"messages": SAID, "logit_bias": many})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("more", "kept_s"),
    [
        *(({}, None), ({"ttl": 300}, 300), ({"ttl": "60"}, 60), ({"keep_alive": "5m"}, 300)),
        *(({"keep_alive": -1}, -1), ({"extra_body": {"ttl": 7}}, 7)),
    ],
    ids=str,
)
async def test_a_model_stays_loaded_as_long_as_any_api_asks(more: dict[str, Any], kept_s: float | None) -> None:
    assert read_wish(json.dumps({"model": "tiny", **more}).encode()).keep_s == kept_s


@pytest.mark.parametrize("value", ["soon", [1], {}])
async def test_a_wrong_time_to_stay_is_refused_by_name(http: httpx.AsyncClient, value: Any) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": SAID, "ttl": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ttl")


# --- schemas that cannot be enforced --------------------------------------------------------------------------------

ODD = [
    {"type": "object", "properties": {"x": {"type": "file"}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"$ref": "http://example.org/y"}}},
    {"type": "object", "$schema": "https://example.org/dialect", "properties": {"x": {"type": "int"}}},
    {"type": "object", "properties": {"x": {"type": ["string", "blob"]}}},
]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
@pytest.mark.parametrize("schema", ODD, ids=str)
async def test_a_function_whose_schema_cannot_be_enforced_may_be_required(
    http: httpx.AsyncClient, schema: Any, choice: Any
) -> None:
    said = 'SAY{<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>}END'
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"messages": [{"role": "user", "content": said}], "tools": [tool], "tool_choice": choice}
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text


async def test_ten_thousand_choices_are_followed_and_too_many_optional_properties_refused(
    http: httpx.AsyncClient,
) -> None:
    words = [f"word {at}" for at in range(10_000)]
    asked = {"messages": [{"role": "user", "content": "SAY{word 77}END"}], "guided_choice": words}
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    for many, status in ((480, 200), (481, 400)):
        listed = {f"p{at}": {"type": "string"} for at in range(many)}
        schema = {"type": "object", "properties": {"a": {"type": "object", "properties": listed}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        answer = await http.post("/v1/chat/completions", json={"messages": SAID, "response_format": form})
        assert answer.status_code == status, answer.text
    assert "481 that may be missing, more than the 480 allowed" in answer.text


@pytest.mark.parametrize(
    ("role", "own"),
    [
        *(("User", "user"), ("HUMAN", "user"), ("human", "user"), ("model", "assistant"), ("AI", "assistant")),
        *(("bot", "assistant"), ("System", "system"), ("tool", "tool")),
    ],
)
async def test_a_role_is_read_by_other_names(http: httpx.AsyncClient, role: str, own: str) -> None:
    async def prompt(name: str) -> str:
        turns = [*SAID, {"role": name, "content": "x"}, *SAID]
        return str((await http.post("/apply-template", json={"messages": turns})).json()["prompt"])

    assert await prompt(role) == await prompt(own)


async def test_a_format_of_too_many_values_is_refused_before_it_is_decoded(http: httpx.AsyncClient) -> None:
    for depth, status in ((10, 200), (12, 400)):
        schema: Any = {"const": 1}
        for _ in range(depth):
            schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
        for form in (
            {"json_schema": {"schema": schema}, "type": "json_schema"},
            {"type": "json_object", "schema": schema},
        ):
            answer = await http.post("/v1/chat/completions", json={"messages": SAID, "response_format": form})
            assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"] == "response_format has more than 20000 values"
    assert answer.json()["error"]["code"] == "invalid_grammar"

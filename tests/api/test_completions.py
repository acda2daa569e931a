"""Text completions, tokenize and detokenize, models, health and metrics."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from support.waiting import until

from edgemoe.api.generate.generation import CompletionChoice, Generation, RequestContext, TokenizedPrompt
from edgemoe.api.schema import Completion, convert
from edgemoe.api.text.bounded_text import BoundedModel
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.types.request import NOBODY, Emission, RequestLimits, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_prompts_come_in_four_shapes(client: openai.AsyncOpenAI, text_model: TextModel) -> None:
    ids = [text_model.encode(f"SAY{{{word}}}END", add_special_tokens=True) for word in ("one", "two")]
    shapes: list[Any] = ["SAY{one}END", ["SAY{one}END", "SAY{two}END"], ids[0], ids, ["SAY{one}END", ids[1]]]
    for shape, expected in zip(shapes, [["one"], ["one", "two"]] * 2 + [["one", "two"]], strict=False):
        answer = await client.completions.create(model="tiny", prompt=shape)
        assert [choice.text for choice in answer.choices] == expected


async def test_choices_are_numbered_by_prompt_and_choice(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt=["SAY{one}END", "SAY{two}END"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]


async def test_echo_gives_the_prompt_back_once(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="SAY{ok}END", echo=True)
    assert answer.choices[0].text == "SAY{ok}ENDok"
    stream = await client.completions.create(model="tiny", prompt="SAY{ok}END", echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "SAY{ok}ENDok"


async def test_echo_with_logprobs_tells_them_of_the_prompt_too(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["SAY{ok}END", [65]], "echo": True, "logprobs": 1}
    answer = await client.completions.create(**asked, max_tokens=3)
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        pairs = zip(logprobs.text_offset or (), logprobs.tokens or (), strict=True)
        assert all(choice.text[at : at + len(token)] == token for at, token in pairs)
        assert "".join(logprobs.tokens or ()) == choice.text
        likely, top = logprobs.token_logprobs or [], logprobs.top_logprobs or []
        assert likely[0] is top[0] is None  # nothing comes before the first token
        assert len(likely) == len(top) == len(logprobs.tokens or ())
    of_prompt = (await client.completions.create(**asked | {"prompt": [65, 66, 67]}, max_tokens=1)).choices[0].logprobs
    assert of_prompt is not None
    assert of_prompt.token_logprobs == [None, -1.0, -2.0, -0.5]
    stream = await client.completions.create(**asked | {"prompt": "SAY{ok}END"}, stream=True)
    told = [chunk.choices[0].logprobs async for chunk in stream]
    pieces = [token for one in told if one is not None for token in one.tokens or ()]
    assert "".join(pieces) == "SAY{ok}ENDok"


async def test_sixteen_tokens_unless_more_are_asked_for(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="go")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


@pytest.mark.parametrize("said", ["The quick fox", "Große 🦊 日 ok"])
async def test_logprobs_line_up_with_the_text(client: openai.AsyncOpenAI, said: str) -> None:
    """A character of several tokens counts once it is whole."""
    prompt = f"SAY{{{said}}}END"
    answer = await client.completions.create(model="tiny", prompt=prompt, logprobs=1, max_tokens=99)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text == said
    pairs = list(zip(logprobs.text_offset or (), logprobs.tokens or (), strict=True))
    whole = [(at, token) for at, token in pairs if not token.startswith("bytes:")]
    assert all(said[at : at + len(token)] == token for at, token in whole)
    assert len(whole) == len(pairs) or not said.isascii()
    assert [at for at, _ in pairs] == sorted(at for at, _ in pairs)
    stream = await client.completions.create(model="tiny", prompt=prompt, logprobs=1, max_tokens=99, stream=True)
    told = [chunk.choices[0].logprobs async for chunk in stream]
    assert [at for one in told if one is not None for at in one.text_offset or ()] == [at for at, _ in pairs]


async def test_stop_strings_count_after_min_tokens(http: httpx.AsyncClient) -> None:
    body = {"prompt": "SAY{stop it stop it stop}END", "stop": "stop", "max_tokens": 50}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    later = (await http.post("/v1/completions", json=body | {"min_tokens": 8})).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("", "stop")
    assert later["text"].startswith("stop it")
    assert later["finish_reason"] == "stop"


async def test_a_context_that_is_nearly_full_shortens_the_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt=[65] * 4090, max_tokens=100)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_tokenize_and_detokenize_are_each_others_inverse(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": "Größe 🦊 <|im_end|>"})).json()
    assert tokens["count"] == len(tokens["tokens"])
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == dict.fromkeys(("prompt", "content"), "Größe 🦊 <|im_end|>")  # vLLM's name and llama.cpp's
    chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    shown = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert shown["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_tokenizing_a_long_prompt_lets_the_loop_go_on(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, encode = threading.Event(), threading.Event(), BoundedModel.encode

    def held(self: BoundedModel, text: str, *args: Any, **options: Any) -> list[int]:
        if len(text) > 10_000:
            begun.set()
            assert go_on.wait(60), "nobody else was served meanwhile"
        return encode(self, text, *args, **options)

    monkeypatch.setattr(BoundedModel, "encode", held)
    long = asyncio.ensure_future(http.post("/tokenize", json={"prompt": "the quick brown fox " * 1_500}))
    await until(begun.is_set)
    assert (await http.post("/tokenize", json={"prompt": "short"})).json()["count"] > 0
    assert not long.done()
    go_on.set()
    assert (await long).json()["count"] > 5_000


async def test_the_model_is_listed_and_found(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "edgemoe"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_there_are_no_embeddings_and_it_says_so(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        await client.embeddings.create(model="tiny", input="x")


async def test_health_and_metrics_are_readable(http: httpx.AsyncClient) -> None:
    health = (await http.get("/health")).json()
    assert health["status"] == "ready"
    assert health["model"]["id"] == "tiny"
    await http.post("/v1/completions", json={"prompt": "SAY{a}END"})
    page = (await http.get("/metrics")).text
    for name in (
        'edgemoe_http_requests_total{model_name="tiny",path="/v1/completions",status="200"}',
        "edgemoe_time_to_first_token_seconds_bucket",
        "edgemoe_request_time_per_output_token_seconds_sum",
        'edgemoe_num_requests_running{model_name="tiny"} ',
        "# TYPE edgemoe_num_requests_running gauge",
        'edgemoe_live_requests{model_name="tiny"} 0.0',
        "# TYPE edgemoe_engine_starts_total counter",
        "# TYPE edgemoe_replayed_requests_total counter",
        "# TYPE edgemoe_integrity_errors_total counter",
    ):
        assert name in page
    for line in page.splitlines():
        assert line.startswith("#") or 'model_name="tiny"' in line
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            assert (kind == "counter") == name.endswith("_total"), line


async def test_cached_tokens_of_a_prompt_are_counted_once_for_all_choices(text_model: TextModel) -> None:
    ready = [TokenizedPrompt((1, 2, 3, 4), Sampling()), TokenizedPrompt((5, 6, 7), Sampling())]
    limits = RequestLimits(context_tokens=64, vocab=300)
    context = RequestContext(text_model, "tiny", (), limits, NOBODY.principal, shares_prefixes=False)
    asked = context.engine_requests(convert({"prompt": "a", "n": 3, "seed": 0}, Completion), ready)
    choices = [CompletionChoice(at, text_model.vocabulary) for at in range(6)]
    job = Generation("cmpl", "tiny", asked, choices, prompt_tokens=7)
    for choice, request in zip(choices, asked, strict=True):
        choice.add(Emission(request=request.id, attempt=1, index=0, token=65, cached_tokens=len(request.prompt) - 1))
    assert job.usage()["prompt_tokens_details"] == {"cached_tokens": 3 + 2}
    assert job.usage()["completion_tokens"] == 6


async def test_health_says_how_many_requests_one_principal_and_one_user_get(http: httpx.AsyncClient) -> None:
    requests = (await http.get("/health")).json()["requests"]
    capacities = [requests[f"capacity{whose}"] for whose in ("", "_per_principal", "_per_user")]
    assert capacities == [320, 256, 241]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone_needs_no_token(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": [65, 66, 67], "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choice = json.loads(lines[0] if stream else answer.text)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert (choice["finish_reason"], len(choice["text"])) == ("length", 3)
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_answers_say_how_long_they_took(http: httpx.AsyncClient, path: str, stream: bool) -> None:
    asked = {"prompt": "SAY{abc}END", "messages": [{"role": "user", "content": "SAY{abc}END"}], "n": 2}
    answer = await http.post(path, json={**asked, "stream": stream})
    bodies = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] or [
        answer.json()
    ]
    assert ["timings" in body for body in bodies] == [False] * (len(bodies) - 1) + [True]
    timings = bodies[-1]["timings"]
    assert timings["predicted_n"] == 2 * 3
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] > 0


async def test_a_request_keeps_the_id_that_its_client_gave_it(http: httpx.AsyncClient) -> None:
    given = await http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for unfit in ("with space", "x" * 200):
        drawn = await http.get("/v1/models", headers={"x-request-id": unfit})
        assert drawn.headers["x-request-id"].startswith("req_")

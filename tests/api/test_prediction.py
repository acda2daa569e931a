"""OpenAI's `prediction`: a text that an answer repeats in part becomes a source of drafts, which usage counts."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from edgemoe.api.endpoints.chat_completions import prepare
from edgemoe.api.generate.generation import CompletionChoice, Generation, RequestContext
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.types.request import NOBODY, Emission, RequestLimits

TEXT = "def add(a, b):\n    return a + b\n"
MESSAGES: Any = [{"role": "user", "content": f"SAY{{{TEXT}}}END"}]
LIMITS = RequestLimits(512, 100_000)


def prepared(model: TextModel, prediction: Any, limits: RequestLimits = LIMITS) -> Generation:
    context = RequestContext(model, "tiny", (), limits, NOBODY.principal, shares_prefixes=False)
    return prepare(context, json.dumps({"messages": MESSAGES, "prediction": prediction, "n": 2}).encode()).generation


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]])
def test_every_choice_expects_the_text(text_model: TextModel, content: Any) -> None:
    generation = prepared(text_model, {"type": "content", "content": content})
    wanted = tuple(text_model.encode(TEXT, add_special_tokens=False))
    assert [request.expected for request in generation.requests] == [wanted, wanted]


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}, {"content": []}])
def test_nothing_is_expected_without_a_text(text_model: TextModel, prediction: Any) -> None:
    assert [request.expected for request in prepared(text_model, prediction).requests] == [(), ()]


def test_a_text_longer_than_the_context_is_cut(text_model: TextModel) -> None:
    generation = prepared(text_model, {"type": "content", "content": "word " * 20_000})
    assert len(generation.requests[0].expected) == LIMITS.context_tokens


@pytest.mark.parametrize("prediction", ["text", {"type": "other", "content": "a"}, {"type": "content"}, {"content": 3}])
def test_another_form_is_refused_by_name(text_model: TextModel, prediction: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        prepared(text_model, prediction)
    assert (refusal.value.param or "").startswith("prediction")


def test_usage_counts_drafts_of_all_choices(text_model: TextModel) -> None:
    generation = prepared(text_model, {"type": "content", "content": TEXT})
    for choice, (accepted, rejected) in zip(generation.choices, ((3, 2), (1, 4)), strict=True):
        assert isinstance(choice, CompletionChoice)
        for index in range(accepted):
            choice.add(Emission(request="r", attempt=1, index=index, token=5, accepted_drafts=1))
        choice.add(Emission(request="r", attempt=1, index=accepted, finish="length", rejected_drafts=rejected))
    usage = generation.usage()
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 6)
    assert usage["completion_tokens"] == 4


@pytest.mark.asyncio(loop_scope="session")
async def test_a_client_reads_the_counts(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, prediction={"type": "content", "content": TEXT}
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)

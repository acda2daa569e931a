"""ollama for Python, at the port for it, without a key."""

from __future__ import annotations

import json

import ollama
import pydantic
import use

client = ollama.Client(host=use.OLLAMA)
GREEDY = {"temperature": 0, "num_predict": 128}
tools = [{"type": "function", "function": use.WEATHER}]
ASK = [{"role": "user", "content": use.ASK_WEATHER}]


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=24)
    capital: bool


def chat() -> None:
    answer = client.chat(use.MODEL, messages=use.MESSAGES, options=GREEDY)
    use.check_answer(answer.message.content)
    assert answer.done_reason == "stop", answer
    assert min(answer.eval_count, answer.eval_duration, answer.prompt_eval_count, answer.total_duration) > 0, answer
    use.check_answer(client.generate(use.MODEL, prompt=use.QUESTION, options=GREEDY).response)


def streaming() -> None:
    use.check_pieces(
        [part.message.content for part in client.chat(use.MODEL, use.MESSAGES, stream=True, options=GREEDY)]
    )
    parts = list(client.generate(use.MODEL, use.QUESTION, stream=True, options=GREEDY))
    use.check_pieces([part.response for part in parts])
    assert parts[-1].done, parts[-1]


def tool_calls() -> None:
    for stream in (False, True):
        parts = client.chat(use.MODEL, messages=ASK, tools=tools, stream=stream, options=GREEDY)
        calls = [call for part in (parts if stream else [parts]) for call in part.message.tool_calls or ()]
        use.check_call(calls[0].function.name, calls[0].function.arguments)


def second_turn() -> None:
    message = client.chat(use.MODEL, messages=ASK, tools=tools, options=GREEDY).message
    result = {"role": "tool", "tool_name": message.tool_calls[0].function.name, "content": use.SUNNY}
    after = client.chat(use.MODEL, messages=[*ASK, message, result], tools=tools, options=GREEDY).message
    assert after.content or after.tool_calls


def thinking() -> None:
    for think in (True, False, "low"):
        answer = client.chat(use.MODEL, messages=use.MESSAGES, think=think, options=GREEDY)
        assert answer.message.content or answer.message.thinking, answer
        assert think or not answer.message.thinking, answer


def structured() -> None:
    form = Place.model_json_schema()
    answer = client.chat(use.MODEL, messages=use.MESSAGES, format=form, options=GREEDY)
    Place.model_validate_json(answer.message.content)
    plain = client.generate(use.MODEL, prompt=use.QUESTION, format="json", options={"seed": 1, "num_predict": 256})
    json.loads(plain.response)


def models() -> None:
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == f"{use.MODEL}:latest", (listed, loaded)
    assert loaded.context_length > 0, loaded
    shown = client.show(listed.model)
    assert "completion" in shown.capabilities, shown
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == loaded.context_length
    assert shown.template, shown
    assert client.pull(listed.model).status == "success"
    assert [part.status for part in client.pull(listed.model, stream=True)][-1] == "success"


def refusals() -> None:
    image = {**ASK[0], "images": [b"\x89PNG"]}
    use.check_refused(lambda: client.chat("nothing", messages=use.MESSAGES), "model 'nothing' not found", "404")
    use.check_refused(lambda: client.chat(use.MODEL, [image]), "text only, no images", "400")
    use.check_refused(lambda: client.embed(use.MODEL, "x"), "no embeddings", "400")
    use.check_refused(lambda: client.delete(use.MODEL), "delete is not supported", "400")
    use.check_refused(lambda: list(client.pull("nothing", stream=True)), "not found", "404")


if __name__ == "__main__":
    use.run(
        chat=chat,
        streaming=streaming,
        tools=tool_calls,
        structured=structured,
        second_turn=second_turn,
        thinking=thinking,
        models=models,
        refusals=refusals,
    )

"""Prepares generations for POST /v1/chat/completions, and writes their answers as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Iterable

from edgemoe.api.dialects.dialect import OutputMarks, begun_by
from edgemoe.api.endpoints.openai_format import OpenAIFormat, call_body, chat_logprobs
from edgemoe.api.generate.generation import (
    ChoiceDelta,
    CompletionChoice,
    Generation,
    RequestSender,
    TokenizedPrompt,
    encode_counted,
    output_tokens,
    requests,
    sampling,
)
from edgemoe.api.generate.grammar import AnswerForm, GrammarChoice, free_grammar, response_grammar, tool_grammar
from edgemoe.api.schema import Chat, NamedTool, Tool, stop_strings
from edgemoe.api.text.chat_template import for_template, tools_for_template
from edgemoe.api.text.tokenizer import StopMatcher, TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.types.arrays import Json
from edgemoe.types.request import RequestLimits

MANY_CALLS = 128
GOES_ON = "<goes on here> "  # stands behind the text that an answer continues, until the prompt is rendered


def prepare(
    body: Chat, text: TextModel, limits: RequestLimits, model: str, asker: RequestSender, prefix: str = "chatcmpl"
) -> Generation:
    """Returns the generation that `body` asks for. Raises InvalidRequest.

    Renders and tokenizes the prompt, and writes the grammar.
    """
    tools, calls = _tools(body)
    prompt_text = render(body, tools, text)
    marks = _marks(body, prompt_text, text, calls, tools)
    prompt = text.encode(prompt_text, add_special_tokens=False, most_tokens=limits.context_tokens)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    settings = sampling(
        body,
        text,
        max_tokens=output_tokens(prompt, limits, "messages", wanted),
        vocab=limits.vocab,
        logprobs=_logprobs(body),
    )
    n = body.n or 1
    return Generation(
        prefix=prefix,
        model=model,
        requests=requests([TokenizedPrompt(tuple(prompt), settings)], n, body.seed, asker),
        choices=[
            CompletionChoice(at, text.vocabulary, StopMatcher(stop_strings(body.stop), settings.min_tokens), marks)
            for at in range(n)
        ],
        prompt_tokens=len(prompt),
        grammar=_grammar(body, tools, marks, text),
    )


def prompt_of(body: Chat, text: TextModel, limits: RequestLimits) -> list[int]:
    """Returns the tokens of the prompt. Raises InvalidRequest."""
    return encode_counted(text, render(body, _tools(body)[0], text), False, limits, "messages")


def render(body: Chat, tools: list[Tool], text: TextModel) -> str:
    """Returns the prompt as text. Raises InvalidRequest."""
    if text.template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", code="no_chat_template")
    if tools and not text.template.takes_tools:
        raise InvalidRequest("tools: this model's chat template has no place for tools", param="tools")
    extra = _variables(body, text)
    history = text.dialect.history
    messages, shown = for_template(body.messages, history), tools_for_template(tools, history)
    if body.continue_final_message:
        marked = [*messages[:-1], messages[-1] | {"content": _to_go_on(body, messages[-1]) + GOES_ON}]
        return _continued(text.template.render(marked, shown, add_generation_prompt=False, extra=extra))
    begin = body.add_generation_prompt is not False
    return text.template.render(messages, shown, add_generation_prompt=begin, extra=extra)


def _variables(body: Chat, text: TextModel) -> Json:
    """Returns what the template is given beside messages and tools.

    Families have different variables for thinking: `enable_thinking`, `thinking`, `reasoning_effort`. What is said by
    one is said by all.
    """
    extra, efforts = dict(body.chat_template_kwargs or {}), dict(text.dialect.history.efforts)
    effort = body.reasoning_effort if body.reasoning_effort is not None else extra.get("reasoning_effort")
    thinks = extra.get("enable_thinking", extra.get("thinking", None if effort is None else effort != "none"))
    if effort is None and thinks is False:
        effort = efforts.get("none")
    if effort is not None:
        if not isinstance(effort, str):
            message = "chat_template_kwargs.reasoning_effort is text"
            raise InvalidRequest(message, param="chat_template_kwargs", code="invalid_type")
        extra["reasoning_effort"] = efforts.get(effort, effort)
    if thinks is not None:
        extra = {"enable_thinking": thinks, "thinking": thinks} | extra
    return extra


def _to_go_on(body: Chat, last: Json) -> str:
    """Returns the last message's text, which the answer continues. Raises InvalidRequest."""
    if body.add_generation_prompt:
        message = "continue_final_message goes on with the last message: set add_generation_prompt to false"
        raise InvalidRequest(message, param="continue_final_message")
    content = str(last["content"])
    if not content.strip():
        message = "continue_final_message: the last message has no text to go on with"
        raise InvalidRequest(message, param="continue_final_message")
    return content


def _continued(rendered: str) -> str:
    """Returns the prompt up to where the last message goes on; without white space that the template trims there."""
    prompt, mark, rest = rendered.rpartition(GOES_ON.strip())
    if not mark:
        message = "continue_final_message: the model's chat template leaves the last message out"
        raise InvalidRequest(message, param="continue_final_message")
    return prompt if rest.startswith(" ") else prompt.rstrip()


def _marks(body: Chat, prompt: str, text: TextModel, calls: int, tools: list[Tool]) -> OutputMarks:
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    template = text.template.text if text.template is not None else ""
    begun = begun_by(prompt, text.dialect, template, bool(body.continue_final_message))
    return OutputMarks(text.dialect, begun, calls, functions)


def _tools(body: Chat) -> tuple[list[Tool], int]:
    """Returns the tools to show to the model, and the most calls to take. Raises InvalidRequest."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise InvalidRequest(f"tool_choice: there is no tool {choice.function.name!r}", param="tool_choice")
        return tools, 1
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest(f"tool_choice {choice!r} is none of none, auto, required", param="tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice is required, but there are no tools", param="tool_choice")
    if choice == "none" or not tools:
        return [], 0
    return tools, 1 if body.parallel_tool_calls is False else MANY_CALLS


def _grammar(body: Chat, tools: list[Tool], marks: OutputMarks, text: TextModel) -> GrammarChoice | None:
    form = AnswerForm(text.vocabulary.added, text.dialect, marks.begun)
    if isinstance(body.tool_choice, NamedTool) or (tools and body.tool_choice == "required"):
        return tool_grammar(tools, marks.calls > 1, form)
    if tools and (body.response_format is None or body.response_format.type == "text"):
        return free_grammar(tools, marks.calls > 1, form)
    return response_grammar(body.response_format, form, tools, marks.calls > 1)


def _logprobs(body: Chat) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatFormat(OpenAIFormat):
    """Writes deltas as chat.completion.chunk objects, or joined as one chat.completion."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Generation, body: Chat, text: TextModel) -> None:
        super().__init__(job, body)
        self._vocabulary = text.vocabulary
        self._begun: set[int] = set()

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        for delta in deltas:
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                yield self._chunk([self._choice(delta.choice, {"role": "assistant", "content": ""}, None, None)])
            logprobs = chat_logprobs(delta, self._vocabulary)
            last = self._job.finished and delta is deltas[-1]
            choice = self._choice(delta.choice, self._delta(delta), logprobs, delta.finish or None)
            yield self._chunk([choice], last=last)

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        return self._head("chat.completion") | {
            "choices": [
                {
                    "index": delta.choice,
                    "message": _message(delta),
                    "logprobs": chat_logprobs(delta, self._vocabulary),
                    "finish_reason": delta.finish or None,
                }
                for delta in choices
            ],
            "usage": self._job.usage(),
            "timings": self._job.timings(),
        }

    def _choice(self, index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _delta(self, delta: ChoiceDelta) -> Json:
        body: Json = {}
        if delta.text:
            body["content"] = delta.text
        if delta.reasoning:
            body["reasoning_content"] = body["reasoning"] = delta.reasoning
        if calls := delta.pieces.of("call"):
            body["tool_calls"] = [{"index": piece.call.index, **call_body(piece)} for piece in calls if piece.call]
        return body


def _message(delta: ChoiceDelta) -> Json:
    calls = delta.pieces.of("call")
    message: Json = {
        "role": "assistant",
        "content": None if calls and not delta.text else delta.text,
        "refusal": None,
    }
    if delta.reasoning:
        message["reasoning_content"] = message["reasoning"] = delta.reasoning
    if calls:
        message["tool_calls"] = [call_body(piece) for piece in calls]
    return message

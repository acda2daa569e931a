"""POST /v1/chat/completions: prepares generations, and writes their answers as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgemoe.api.dialects.dialect import DIALECTS, OutputMarks, begun_by
from edgemoe.api.dialects.tool_calls import OutputPiece, ToolCall
from edgemoe.api.endpoints.custom_input import CustomInput, custom_input
from edgemoe.api.endpoints.openai_format import OpenAIFormat, chat_logprobs, tool_call_body
from edgemoe.api.generate.answer_grammar import (
    AnswerForm,
    GrammarCandidates,
    free_grammar,
    response_grammar,
    tool_grammar,
)
from edgemoe.api.generate.generation import (
    ChoiceDelta,
    CompletionChoice,
    Generation,
    PreparedAnswer,
    RequestContext,
    TokenizedPrompt,
)
from edgemoe.api.generate.request_limits import encode_counted, output_tokens, sampling
from edgemoe.api.peer_fields import CUSTOM, FUNCTIONS
from edgemoe.api.schema import Chat, NamedTool, Tool, read_named, stop_strings
from edgemoe.api.text.chat_template import for_template, tools_for_template
from edgemoe.api.text.tokenizer import StopMatcher, TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.types.json_object import Json
from edgemoe.types.request import RequestLimits

MANY_TOOL_CALLS = 128
CONTINUATION = "<goes on here> "  # stands after the text that an answer continues, until the prompt is rendered


def prepare(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /v1/chat/completions and prepares its generation. Raises InvalidRequest."""
    body, fields = read_named(raw, Chat)
    with fields.renamed():
        generation = chat_generation(body, context, "chatcmpl")
    answer = ChatFormat(generation, body, context.text, calls_functions=fields.fields.get("tools") == FUNCTIONS)
    return PreparedAnswer(generation, answer, bool(body.stream), fields)


def chat_generation(body: Chat, context: RequestContext, prefix: str, *, prompt_only: bool = False) -> Generation:
    """Returns the generation that a chat asks for: prompt, sampling, choices, grammar. Raises InvalidRequest.

    With `prompt_only` the prompt is computed, and the answer is empty.
    """
    context.check_model(body.model, *(body.models or ()))
    text, limits = context.text, context.limits
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    tools, most_tool_calls = offered_tools(body)
    prompt_text = render(body, tools, text)
    marks = OutputMarks(
        text.dialect,
        begun_by(
            prompt_text,
            text.dialect,
            text.template_text,
            body.continues_last,
            text.vocabulary.added,
        ),
        most_tool_calls,
        {tool.function.name: tool.function.parameters for tool in tools},
    )
    prompt = text.encode(prompt_text, add_special_tokens=False, most_tokens=limits.context_tokens)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    settings = sampling(
        body,
        text,
        max_tokens=output_tokens(prompt, limits, "messages", wanted),
        vocab=limits.vocab,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    stops, expected = stop_strings(body.stop), _expected_tokens(body, text, limits)
    return Generation(
        prefix=prefix,
        model=context.model,
        requests=context.engine_requests(body, [TokenizedPrompt(tuple(prompt), settings, expected)]),
        choices=[
            CompletionChoice(at, text.vocabulary, StopMatcher(stops, settings.min_tokens), marks, prompt_only)
            for at in range(body.n or 1)
        ],
        prompt_tokens=len(prompt),
        grammar=chat_grammar(body, tools, marks, text),
    )


def _expected_tokens(body: Chat, text: TextModel, limits: RequestLimits) -> tuple[int, ...]:
    """Returns the tokens of the text that the answer is expected to repeat, at most a context of them."""
    if body.prediction is None or not body.prediction.text:
        return ()
    tokens = text.encode(body.prediction.text, add_special_tokens=False, most_tokens=limits.context_tokens)
    return tuple(tokens[: limits.context_tokens])


def tokenize_prompt(body: Chat, text: TextModel, limits: RequestLimits) -> list[int]:
    """Returns the tokens of a chat's prompt, for clients that count them. Raises InvalidRequest."""
    tools, _ = offered_tools(body)
    return encode_counted(text, render(body, tools, text), False, limits, "messages")


def offered_tools(body: Chat) -> tuple[list[Tool], int]:
    """Returns the tools that the prompt shows to the model, and the most calls it may make. Raises InvalidRequest."""
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
    return tools, 1 if body.parallel_tool_calls is False else MANY_TOOL_CALLS


def render(body: Chat, tools: list[Tool], text: TextModel) -> str:
    """Returns the prompt as text. Raises InvalidRequest."""
    if text.template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", code="no_chat_template")
    if tools and not text.template.takes_tools:
        raise InvalidRequest("tools: this model's chat template has no place for tools", param="tools")
    if tools and not text.dialect.takes_tool_calls:
        message = (
            "tools: this model's chat template shows tools, but asks for calls in no form that is known here; pack the "
            f"model with a chat_template.jinja that has the marks of one of: {', '.join(one.name for one in DIALECTS)}"
        )
        raise InvalidRequest(message, param="tools")
    history = text.dialect.history
    variables = _template_variables(body.chat_template_kwargs or {}, body.reasoning_effort, dict(history.efforts))
    shown, begin = tools_for_template(tools), body.add_generation_prompt is not False
    if body.continues_last and body.add_generation_prompt:
        message = "continue_final_message goes on with the last message: set add_generation_prompt to false"
        raise InvalidRequest(message, param="continue_final_message")

    def rendered(one_system: bool) -> str:
        assert text.template is not None
        messages = for_template(body.messages, history, text.template_text, one_system=one_system)
        if not body.continues_last:
            return text.template.render(messages, shown, add_generation_prompt=begin, extra=variables)
        marked = [*messages[:-1], messages[-1] | {"content": _continued_text(messages[-1]) + CONTINUATION}]
        return _up_to_continuation(text.template.render(marked, shown, add_generation_prompt=False, extra=variables))

    later = [one for one in body.messages[1:] if one.role in ("system", "developer")]
    try:
        prompt = rendered(one_system=False)
    except InvalidRequest:
        if not later:
            raise
        return rendered(one_system=True)
    lost = [one for one in for_template(later) if str(one["content"] or "").strip() not in prompt]
    return rendered(one_system=True) if lost else prompt


def _template_variables(given: Json, effort: str | None, efforts: Mapping[str, str]) -> Json:
    """Returns the template's variables beside messages and tools: the client's, with one setting of thinking for all.

    Families have different variables for thinking: `enable_thinking`, `thinking`, `reasoning_effort`. The client's
    setting of one sets the others. `efforts` maps OpenAI's reasoning efforts to the model's.
    """
    variables = dict(given)
    asked: Any = variables.get("reasoning_effort") if effort is None else effort
    thinks = variables.get("enable_thinking", variables.get("thinking", None if asked is None else asked != "none"))
    if asked is None and thinks is False:
        asked = efforts.get("none")
    if asked is not None:
        if not isinstance(asked, str):
            message = "chat_template_kwargs.reasoning_effort is text"
            raise InvalidRequest(message, param="chat_template_kwargs", code="invalid_type")
        variables["reasoning_effort"] = efforts.get(asked, asked)
    if thinks is not None:
        variables = {"enable_thinking": thinks, "thinking": thinks} | variables
    return variables


def _continued_text(last: Json) -> str:
    """Returns the last message's text, which the answer continues. Raises InvalidRequest."""
    content = str(last["content"] or "")
    if not content.strip():
        message = "continue_final_message: the last message has no text to go on with"
        raise InvalidRequest(message, param="continue_final_message")
    return content


def _up_to_continuation(rendered: str) -> str:
    """Returns the prompt up to CONTINUATION, without white space that the template trims there."""
    prompt, mark, rest = rendered.rpartition(CONTINUATION.strip())
    if not mark:
        message = "continue_final_message: the model's chat template leaves the last message out"
        raise InvalidRequest(message, param="continue_final_message")
    return prompt if rest.startswith(" ") else prompt.rstrip()


def chat_grammar(body: Chat, tools: list[Tool], marks: OutputMarks, text: TextModel) -> GrammarCandidates | None:
    """Returns the grammar that a chat's answer must follow; None for free text. Raises InvalidRequest."""
    form = AnswerForm(text.vocabulary.added, text.dialect, marks.begun)
    several = marks.calls > 1
    if isinstance(body.tool_choice, NamedTool) or (tools and body.tool_choice == "required"):
        return tool_grammar(tools, several, form)
    if tools and (body.response_format is None or body.response_format.type == "text"):
        return free_grammar(tools, several, form)
    return response_grammar(body.response_format, form, tools, several)


class ChatFormat(OpenAIFormat):
    """Writes deltas as chat.completion.chunk objects, or joined as one chat.completion."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: Chat, text: TextModel, *, calls_functions: bool = False) -> None:
        """Starts an answer; with `calls_functions` it has calls in OpenAI's first form."""
        super().__init__(generation, body.stream_options)
        self._vocabulary, self._hides_reasoning = text.vocabulary, body.include_reasoning is False
        self._calls_functions = calls_functions
        self._custom = {tool.function.name for tool in body.tools or () if tool.type == CUSTOM}
        self._inputs: dict[tuple[int, int], CustomInput] = {}  # of custom tools, by choice and call
        self._begun: set[int] = set()

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        for delta in deltas:
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                yield self._chunk([self._choice(delta.choice, {"role": "assistant", "content": ""}, None, None)])
            logprobs = chat_logprobs(delta, self._vocabulary)
            last = self._generation.finished and delta is deltas[-1]
            choice = self._choice(delta.choice, self._delta(delta), logprobs, self._finish(delta))
            yield self._chunk([choice], last=last)

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        return self._head("chat.completion") | {
            "choices": [
                {
                    "index": delta.choice,
                    "message": self._message(delta),
                    "logprobs": chat_logprobs(delta, self._vocabulary),
                    "finish_reason": self._finish(delta),
                }
                for delta in choices
            ],
            "usage": self._generation.usage(),
            "timings": self._generation.timings(),
        }

    def _choice(self, index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _finish(self, delta: ChoiceDelta) -> str | None:
        return "function_call" if self._calls_functions and delta.finish == "tool_calls" else delta.finish or None

    def _delta(self, delta: ChoiceDelta) -> Json:
        body: Json = {}
        if delta.text:
            body["content"] = delta.text
        if delta.reasoning and not self._hides_reasoning:
            body["reasoning_content"] = body["reasoning"] = delta.reasoning
        if calls := delta.pieces.of("call"):
            if self._calls_functions:
                return body | {"function_call": tool_call_body(calls[0])["function"]}
            body["tool_calls"] = [self._next_of_call(delta.choice, piece, piece.call) for piece in calls if piece.call]
        return body

    def _next_of_call(self, choice: int, piece: OutputPiece, call: ToolCall) -> Json:
        """Returns the next part of a call in a stream."""
        if call.name not in self._custom:
            return {"index": call.index, **tool_call_body(piece)}
        told = self._inputs.setdefault((choice, call.index), CustomInput()).feed(piece.text)
        head = {"id": call.id, "type": CUSTOM} if piece.begins else {}
        return {"index": call.index, **head, "custom": ({"name": call.name} if piece.begins else {}) | {"input": told}}

    def _whole_call(self, piece: OutputPiece) -> Json:
        if piece.call is None or piece.call.name not in self._custom:
            return tool_call_body(piece)
        return {
            "id": piece.call.id,
            "type": CUSTOM,
            "custom": {"name": piece.call.name, "input": custom_input(piece.text)},
        }

    def _message(self, delta: ChoiceDelta) -> Json:
        calls = delta.pieces.of("call")
        message: Json = {
            "role": "assistant",
            "content": None if calls and not delta.text else delta.text,
            "refusal": None,
        }
        if delta.reasoning and not self._hides_reasoning:
            message["reasoning_content"] = message["reasoning"] = delta.reasoning
        if calls and self._calls_functions:
            message["function_call"] = tool_call_body(calls[0])["function"]
        elif calls:
            message["tool_calls"] = [self._whole_call(piece) for piece in calls]
        return message

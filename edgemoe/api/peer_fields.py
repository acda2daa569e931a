"""Reads other servers' names for fields that this server has, as docs/api.md lists them.

OpenAI's own names come first. Sources: the references of llama.cpp's server, vLLM, SGLang, TGI, Ollama, LM Studio,
OpenRouter, Together, Fireworks, DashScope and z.ai.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from edgemoe.api.custom_tools import custom_function
from edgemoe.api.peer_formats import NULL, Fields, decoded, encoded, read_format
from edgemoe.api.spellings import SCALAR, bare_scalar, read_spellings
from edgemoe.errors import InvalidRequest

ALL_TOKENS = b"2147483648"  # more than any context has

ALIASES: dict[str, tuple[str, ...]] = {
    "max_tokens": (
        "max_completion_tokens",
        "max_output_tokens",
        "n_predict",
        "num_predict",
        "max_new_tokens",
        "max_tokens_to_sample",
    ),
    "min_tokens": ("min_new_tokens",),
    "repetition_penalty": ("repeat_penalty",),
    "seed": ("random_seed", "sampling_seed"),
    "stop": ("stop_sequences", "stop_strings"),
    "add_special_tokens": ("add_special",),
    "ignore_eos": ("ban_eos_token",),
    "continue_final_message": ("continue_",),
    "top_logprobs": ("n_probs",),
    "n": ("n_cmpl",),
}
# values that stand for an absent field; of max_tokens: for as many as the context has room for
SENTINELS: dict[str, tuple[int, ...]] = {
    "max_tokens": (-1, -2),
    "max_completion_tokens": (-1, -2),
    "max_output_tokens": (-1, -2),
    "min_tokens": (-1,),
    "seed": (-1, 2**32 - 1, 2**64 - 1),
    "truncate_prompt_tokens": (-1,),
}
EFFORTS_OFF, EFFORTS_ON = ("none", "off", "disabled", "between_tools"), ("on", "enabled", "adaptive")
EFFORTS_OF_TEMPLATE = ("auto", "default")  # as the model's template has it
BUDGETS = (
    "reasoning_budget",
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "max_thinking_tokens",
)
SWITCHES_OFF = ("disable_reasoning", "disable_thinking")
TEMPLATE_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates
WITH_THINKING = (
    "enable_thinking",
    "thinking",
    "think",
    "reasoning",
    "reasoning_effort",
    *BUDGETS,
    *SWITCHES_OFF,
    "google",
)


def unwrap_extra_body(fields: Fields) -> None:
    """Takes the fields out of `extra_body`, which OpenAI's library merges, and which other clients send as it is."""
    raw = fields.get("extra_body", NULL)
    if raw[:1] != b"{":
        return
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        fields.setdefault(name, bytes(value))


def read_peer_fields(fields: Fields, kind: type[msgspec.Struct]) -> dict[str, str]:
    """Replaces, in a body for a `kind`, other servers' names and values by this server's.

    Returns this server's names of the fields that were replaced, with the client's. Raises InvalidRequest.
    """
    own = frozenset(kind.__struct_fields__)
    clients: dict[str, str] = {}
    for name, aliases in ALIASES.items():
        given = next((alias for alias in aliases if alias in fields and alias not in own), "")
        if name in own and given and _is_absent(fields, name):
            fields[name], clients[name] = fields[given], given
    read_spellings(fields, kind)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "top_k"):
        if name in own and type(many := decoded(fields.get(name, NULL))) is int and many > int(ALL_TOKENS):
            fields[name] = ALL_TOKENS
    if "seed" in own:
        _read_seed(fields)
    if "user" in own and type(user := decoded(fields.get("user", NULL))) is int:
        fields["user"] = encoded(str(user))
    if "temperature" in own and decoded(fields.get("do_sample", NULL)) is False:
        fields["temperature"] = encoded(0)
    for name, sentinels in SENTINELS.items():
        if name in own and decoded(fields.get(name, NULL)) in sentinels:
            fields[name] = ALL_TOKENS if name == "max_tokens" else NULL
    if "text_bias" in own:
        fields.pop("text_bias", None)  # not a client's field
        clients |= _read_biases(fields)
    if "prompt" in own and fields.get("prompt", NULL)[:1] == b"{":
        _read_prompt_object(fields)
    if "logprobs" in own:
        _read_logprobs(fields, own)
    if "include_reasoning" in own:
        _read_hidden(fields)
    if "chat_template_kwargs" in own:
        _read_thinking(fields)
    if "add_generation_prompt" in own:  # a chat's
        clients |= _read_functions(fields)
        _read_tools(fields)
    if "response_format" in own and isinstance(kind_of := decoded(fields.get("response_format", NULL)), str):
        fields["response_format"] = encoded({"type": kind_of or "text"})
    if "response_format" in own and _is_empty(decoded(fields.get("response_format", NULL))):
        fields["response_format"] = NULL
    if "response_format" in own and (name := read_format(fields, own)):
        clients["response_format"] = name
    return clients


def _read_seed(fields: Fields) -> None:
    """Writes a seed of 64 bits without a sign as the same bits with one."""
    seed = decoded(fields.get("seed", NULL))
    if type(seed) is int and 1 << 63 <= seed < (1 << 64) - 1:
        fields["seed"] = encoded(seed - (1 << 64))


def _is_empty(value: Any) -> bool:
    """Returns whether a value is an object all of whose members are absent."""
    return isinstance(value, dict) and all(member is None for member in value.values())


def _is_absent(fields: Fields, name: str) -> bool:
    return fields.get(name, NULL) == NULL


MAX_BIASES, MAX_TEXT_BIASES = 4096, 256
TOKEN_ID = re.compile(r"\s*\d+\s*")


# --- log probabilities and biases ---------------------------------------------------------------------------------


def _read_biases(fields: Fields) -> dict[str, str]:
    """Reads biases of texts, and llama.cpp's list of [token or text, bias]. Returns new names with the client's.

    A bias `false` forbids the token. Raises InvalidRequest.
    """
    raw = fields.get("logit_bias", NULL)
    if raw[:1] not in (b"[", b"{"):
        return {}
    given: Any = msgspec.json.decode(raw)
    pairs: list[Any] = given[: MAX_BIASES + 1] if isinstance(given, list) else [*map(list, given.items())]
    biases: dict[str, float] = {}
    texts: dict[str, float] = {}
    for at, pair in enumerate(pairs):
        where = f"logit_bias[{at}]"
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (int, str):
            raise InvalidRequest(f"{where}: give [token id or text, bias]", param=where, code="invalid_type")
        token, bias = pair
        if isinstance(bias, str) and SCALAR.fullmatch(bias.encode()):
            bias = msgspec.json.decode(bias)
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise InvalidRequest(f"{where}: a bias is a number, or false", param=where, code="invalid_type")
        is_text = isinstance(token, str) and not TOKEN_ID.fullmatch(token)
        (texts if is_text else biases)[str(token)] = -100.0 if bias is False else float(bias)
    fields["logit_bias"], fields["text_bias"] = encoded(biases), encoded(texts)
    return {"text_bias": "logit_bias"}


def _read_prompt_object(fields: Fields) -> None:
    """Reads llama.cpp's prompt with media as its text, if it has none. Raises InvalidRequest."""
    given: Any = msgspec.json.decode(fields["prompt"])
    if not isinstance(text := given.get("prompt_string"), str):
        return
    if given.get("multimodal_data"):
        raise InvalidRequest("prompt.multimodal_data: models here read text only", param="prompt.multimodal_data")
    fields["prompt"] = encoded(text)


def _read_logprobs(fields: Fields, own: frozenset[str]) -> None:
    """Reads a chat's log probabilities given as their number, and a completion's given as n_probs."""
    given = decoded(fields.get("logprobs", NULL))
    if "top_logprobs" not in own:  # a completion: their number
        if given is None and (most := decoded(bare_scalar(fields.get("n_probs", NULL)))):
            fields["logprobs"] = encoded(most)
        if given is False:
            fields["logprobs"] = NULL
        if given is True:  # in the form of a chat
            most = decoded(fields.get("top_logprobs", NULL))
            fields["logprobs"] = encoded(most if type(most) is int else 0)
        return
    if type(given) is int:
        fields["logprobs"] = encoded(True)
        if _is_absent(fields, "top_logprobs"):
            fields["top_logprobs"] = encoded(given)
    if given is None and decoded(fields.get("n_probs", NULL)):
        fields["logprobs"] = encoded(True)


# --- thinking -----------------------------------------------------------------------------------------------------


def _read_thinking(fields: Fields) -> None:
    """Writes the first setting of thinking, and of its effort, to the template's variables where these have none."""
    given = [(name, decoded(fields[name])) for name in WITH_THINKING if not _is_absent(fields, name) and name in fields]
    settings = {name: thinking_of(name, value) for name, value in given}
    if "reasoning_effort" in settings:
        fields["reasoning_effort"] = encoded(settings["reasoning_effort"][1] or None)
    thinks = next((thinks for thinks, _ in settings.values() if thinks is not None), None)
    effort = next((effort for _, effort in settings.values() if effort), "")
    if not _is_object(raw := fields.get("chat_template_kwargs", NULL)):
        return
    variables: dict[str, Any] = dict(msgspec.json.decode(raw) or {})
    variables |= {name: _switch(variables[name]) for name in TEMPLATE_SWITCHES if name in variables}
    if thinks is not None and not variables.keys() & set(TEMPLATE_SWITCHES):
        variables["enable_thinking"] = thinks
    if effort:
        variables.setdefault("reasoning_effort", effort)
    if variables:
        fields["chat_template_kwargs"] = encoded(variables)


def _read_hidden(fields: Fields) -> None:
    """Reads whether the answer shall be without its reasoning, as OpenRouter and Groq name it."""
    asked = decoded(fields.get("reasoning", NULL))
    is_excluded = isinstance(asked, dict) and asked.get("exclude") is True
    if is_excluded or decoded(fields.get("reasoning_format", NULL)) == "hidden":
        fields["include_reasoning"] = encoded(False)


def _is_object(raw: bytes) -> bool:
    return raw[:1] in (b"{", b"n")


def thinking_of(name: str, value: Any) -> tuple[bool | None, str]:
    """Returns whether a field asks for reasoning, and its effort, "" for none. Raises InvalidRequest."""
    value = _switch(value)
    if value == "":
        return None, ""
    if name in BUDGETS and isinstance(value, str) and SCALAR.fullmatch(value.encode()):
        value = float(value)
    if name not in BUDGETS and type(value) in (int, float) and value in (0, 1):
        value = bool(value)
    if isinstance(value, bool):
        return (value != (name in SWITCHES_OFF)), ""
    if name == "google" and isinstance(value, dict):  # Gemini's, as its documentation writes it into `extra_body`
        given = value.get("thinking_config")
        budget = given.get("thinking_budget") if isinstance(given, dict) else None
        return (budget != 0 if type(budget) in (int, float) else None), ""
    if name in BUDGETS and type(value) in (int, float):
        return value != 0, ""
    if isinstance(value, str) and name not in (*BUDGETS, "enable_thinking", *SWITCHES_OFF):
        return _effort(value, name)
    if isinstance(value, dict) and name not in (*BUDGETS, *SWITCHES_OFF):
        return _thinking_object(value)
    raise InvalidRequest(f"{name}: cannot be read as a setting of thinking", param=name, code="invalid_type")


def _switch(value: Any) -> Any:
    """Returns true and false for their texts, other texts in lower case, and any other value as it is."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    return {"true": True, "false": False}.get(word, word)


def _thinking_object(value: Mapping[str, Any]) -> tuple[bool | None, str]:
    thinks, effort = None, ""
    if isinstance(kind := value.get("type"), str):
        thinks, effort = _effort(kind, "thinking.type")
    if isinstance(asked := value.get("effort"), str):
        thinks, effort = _effort(asked, "reasoning.effort")
    budgets = [value[key] for key in ("max_tokens", "budget_tokens") if type(value.get(key)) in (int, float)]
    if budgets and thinks is None:
        thinks = budgets[0] != 0
    if isinstance(enabled := value.get("enabled"), bool):
        thinks = enabled
    return thinks, effort


def _effort(word: str, name: str) -> tuple[bool | None, str]:
    if word in EFFORTS_OFF:
        return False, ""
    if word in EFFORTS_ON:
        return True, ""
    if word in EFFORTS_OF_TEMPLATE:
        return None, ""
    if name == "thinking.type":
        raise InvalidRequest(
            f"thinking.type: {word!r} is neither enabled, adaptive nor disabled", param="thinking.type"
        )
    return True, word


# --- tools --------------------------------------------------------------------------------------------------------


CUSTOM = "custom"  # type of OpenAI's tools that take text
FUNCTIONS = "functions"  # OpenAI's first name of `tools`


def _read_functions(fields: Fields) -> dict[str, str]:
    """Reads OpenAI's first form of tools. Returns this server's names of the fields, with the client's."""
    if fields.get(FUNCTIONS, NULL)[:1] != b"[" or not _is_absent(fields, "tools"):
        return {}
    given: Any = msgspec.json.decode(fields[FUNCTIONS])
    if not given:
        return {}
    fields["tools"] = encoded([{"type": "function", "function": one} for one in given])
    choice = decoded(fields.get("function_call", NULL))
    if choice is not None:
        fields["tool_choice"] = encoded({"function": choice} if isinstance(choice, dict) else choice)
    fields["parallel_tool_calls"] = b"false"
    return {"tools": FUNCTIONS, "tool_choice": "function_call"}


TOOL_CHOICES = {"": "auto", "any": "required", "required": "required", "auto": "auto", "none": "none"}


def _read_tools(fields: Fields) -> None:
    """Leaves out tools that are no functions, and reads functions and choices in the forms of other APIs.

    Raises InvalidRequest for a choice of a tool that is left out.
    """
    choice = decoded(fields.get("tool_choice", NULL))
    kind = (choice.get("type") or "function") if isinstance(choice, dict) else choice
    allowed: list[str] | None = None
    if isinstance(kind, str) and kind in TOOL_CHOICES:
        fields["tool_choice"] = encoded(TOOL_CHOICES[kind])
    elif kind == "allowed_tools":
        allowed = _allow_tools(fields, choice)
    elif kind == CUSTOM and isinstance(choice, dict):
        fields["tool_choice"] = encoded({"function": {"name": _name(_function(choice))}})
    elif isinstance(choice, dict) and kind in ("function", "tool") and "name" in choice:
        fields["tool_choice"] = encoded({"function": {"name": choice["name"]}})
    elif isinstance(choice, str):  # a function's name, as TGI has it
        fields["tool_choice"] = encoded({"function": {"name": choice}})
    elif isinstance(choice, dict) and kind != "function":
        raise InvalidRequest(f"tool_choice: no tool of type {kind!r} runs here", param="tool_choice")
    if fields.get("tools", NULL)[:1] == b"[":
        given: Any = msgspec.json.decode(fields["tools"])
        offered = [_function(tool) for tool in given if not isinstance(tool, dict) or _is_function(tool)]
        if allowed is not None:
            offered = [tool for tool in offered if _name(tool) in allowed]
        if offered != given:
            fields["tools"] = encoded(offered)


def _is_function(tool: Mapping[str, Any]) -> bool:
    """Returns whether a tool is a function of the client's, in any form: others run on their makers' servers."""
    return "function" in tool or tool.get("type") in (None, "function", CUSTOM)


def _function(tool: Any) -> Any:
    """Returns a tool in OpenAI's form; the flat forms are of OpenAI's Responses and of Anthropic's messages.

    A custom tool is a function of one string, and keeps its type.
    """
    if isinstance(tool, dict) and tool.get("type") == CUSTOM and "function" not in tool and "input_schema" not in tool:
        return {"type": CUSTOM, "function": custom_function(tool)}
    if not isinstance(tool, dict) or "function" in tool or "name" not in tool:
        return tool
    flat = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
    if "input_schema" in tool:
        flat["parameters"] = tool["input_schema"]
    return {"type": "function", "function": flat}


def _name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _allow_tools(fields: Fields, choice: Mapping[str, Any]) -> list[str]:
    """Reads OpenAI's choice among some of the tools. Returns their names. Raises InvalidRequest."""
    allowed = choice.get("allowed_tools", choice)
    tools, mode = (allowed.get("tools"), allowed.get("mode", "auto")) if isinstance(allowed, dict) else (None, "")
    if not isinstance(tools, list) or not isinstance(mode, str) or mode not in ("auto", "required"):
        message = "tool_choice.allowed_tools: give a `mode` of auto or required, and a list of `tools`"
        raise InvalidRequest(message, param="tool_choice")
    fields["tool_choice"] = encoded(mode)
    return [name for tool in tools if isinstance(name := _name(_function(tool)), str)]

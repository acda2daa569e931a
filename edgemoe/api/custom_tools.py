"""Offers OpenAI's custom tools, which take plain text, to the model as functions of one string."""

from __future__ import annotations

from edgemoe.types.json_object import Json

CUSTOM_INPUT = "input"  # the one parameter of a custom tool
CUSTOM_PARAMETERS: Json = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


def custom_function(tool: Json) -> Json:
    """Returns the function of a custom tool, given flat or as chat completions nest it."""
    given = tool["custom"] if isinstance(tool.get("custom"), dict) else tool
    return {"name": given.get("name"), "description": _described(given), "parameters": CUSTOM_PARAMETERS}


def _described(tool: Json) -> str:
    """Returns the description of a custom tool's function, with the grammar of its input."""
    form = tool.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) and form.get("type") == "grammar" else {}
    rule = f"The input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}" if grammar else ""
    return "\n\n".join(filter(None, (tool.get("description"), rule)))

"""Writes the lists of models of Anthropic's API (GET /v1/models), for clients that send `anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgemoe.errors import InvalidRequest
from edgemoe.types.json_object import Json

EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = (("adaptive", True), ("enabled", True), ("disabled", False), ("between_tools", False))  # types of requests
MOST_LISTED = 1000  # of one page, as there


def models_page(cards: Sequence[Json], asked: Mapping[str, str]) -> Json:
    """Returns a page of the models by `limit`, `after_id` and `before_id`. Raises InvalidRequest."""
    ids = [str(card["id"]) for card in cards]
    limit = asked.get("limit", str(MOST_LISTED))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MOST_LISTED):
        raise InvalidRequest(f"limit: give 1 to {MOST_LISTED}", param="limit", code="invalid_value")
    first, end, many = 0, len(ids), int(limit)
    if (name := asked.get("after_id")) is not None:
        first = _place(ids, name, "after_id") + 1
    if (name := asked.get("before_id")) is not None:
        end = _place(ids, name, "before_id")
        first = max(first, end - many)
    shown = [model_info(card) for card in cards[first:end][:many]]
    has_more = first > 0 if "before_id" in asked else first + many < end
    edges = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"data": shown, "has_more": has_more, **edges}


def model_info(card: Json) -> Json:
    """Returns Anthropic's object of the model that has OpenAI's object `card`."""
    thinks, plain = "thinking" in card["capabilities"], _supported(False)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["display_name"],
        "created_at": card["created_at"],
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": card["max_input_tokens"],
        "max_tokens": card["max_output_tokens"],
        "capabilities": {
            "batch": plain,
            "citations": plain,
            "code_execution": plain,
            "context_management": plain,
            "effort": _supported(thinks) | dict.fromkeys(EFFORTS, _supported(thinks)),
            "image_input": plain,
            "pdf_input": plain,
            "server_tools": plain | {"code_execution": plain, "web_search": plain},
            "structured_outputs": _supported(True),
            "thinking": _supported(thinks) | {"types": {kind: _supported(thinks or not on) for kind, on in THINKING}},
        },
    }


def _supported(is_so: bool) -> dict[str, Any]:
    return {"supported": is_so}


def _place(ids: Sequence[str], name: str, field: str) -> int:
    if name not in ids:
        raise InvalidRequest(f"{field}: no model has this id", param=field, code="invalid_value")
    return ids.index(name)

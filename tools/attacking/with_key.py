"""Attacks of a client with a key. An attack sends its bodies without end, the next one after each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

LONG = "A river runs to the sea and the sea is wide. " * 30  # some hundreds of tokens, in one prompt
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class KeyedAttack(NamedTuple):
    """`at_once` clients send `body` of a running number to `path`. No two prompts are alike."""

    at_once: int
    path: str
    body: Callable[[int], dict[str, Any]]


def _completions(at_once: int, body: Callable[[int], dict[str, Any]]) -> KeyedAttack:
    return KeyedAttack(at_once, COMPLETIONS, lambda n: {"ignore_eos": True} | body(n))


def _schema(schema: Callable[[int], Any], at_once: int = 4) -> KeyedAttack:
    def body(n: int) -> dict[str, Any]:
        shape = {"type": "json_schema", "json_schema": {"schema": schema(n)}}
        return {"messages": [{"role": "user", "content": f"Write {n}."}], "max_tokens": 8, "response_format": shape}

    return KeyedAttack(at_once, CHAT, body)


def _nested(depth: int, inner: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def _refs(depth: int, n: int) -> dict[str, Any]:
    """Returns a schema whose definitions name the next one twice each."""
    definitions: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}},
        }
        for i in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": {"const": n}}}


ONE_STREAM = "one stream"  # no attack: the equal share of another principal, with which attacks are compared
SHARES: dict[str, KeyedAttack] = {
    ONE_STREAM: _completions(1, lambda n: {"prompt": f"{n} is", "max_tokens": 400}),
    "users": _completions(24, lambda n: {"prompt": f"{n} is", "n": 16, "user": f"u{n}", "max_tokens": 400}),
    "safety identifiers": _completions(
        24, lambda n: {"prompt": f"{n} is", "n": 16, "safety_identifier": f"u{n}", "max_tokens": 400}
    ),
    "long prompts": _completions(60, lambda n: {"prompt": f"{n} {LONG}", "user": f"u{n}", "max_tokens": 4}),
    "many choices": _completions(4, lambda n: {"prompt": f"{n} is", "n": 100, "max_tokens": 400}),
    "many prompts": _completions(3, lambda n: {"prompt": [f"{n} {m} is" for m in range(100)], "max_tokens": 400}),
    "small requests": _completions(60, lambda n: {"prompt": f"{n} is", "user": f"u{n}", "max_tokens": 1}),
}
SCHEMAS: dict[str, KeyedAttack] = {
    "multipleOf": _schema(lambda n: {"type": "integer", "multipleOf": 99999989 - 2 * n}),
    "multipleOf within its bound": _schema(lambda n: {"type": "integer", "multipleOf": 999983 - 2 * n}),
    "many multipleOf": _schema(
        lambda n: {"allOf": [{"type": "integer", "multipleOf": p + n % 7} for p in (9973, 9967, 9949, 9941)]}
    ),
    "counted pattern": _schema(lambda n: {"type": "string", "pattern": f"^((a{{1,99}}b?){{1,99}}c){{1,{9 + n % 9}}}$"}),
    "exponential pattern": _schema(lambda n: {"type": "string", "pattern": f"^(a|b)*a(a|b){{{14 + n % 9}}}$"}),
    "large enum": _schema(lambda n: {"enum": [f"{n}-{i}-" + "x" * 20 for i in range(9999)]}, 2),
    "nested alternatives": _schema(
        lambda n: _nested(12, {"const": n}, lambda inner: {"anyOf": [inner, {"type": "array", "items": inner}]}), 2
    ),
    "references": _schema(lambda n: _refs(40, n)),
    "long strings": _schema(lambda n: {"type": "string", "minLength": 99_000 + n, "maxLength": 999_000}),
}
BODIES: dict[str, KeyedAttack] = {
    "empty lists": KeyedAttack(2, COMPLETIONS, lambda n: {"prompt": f"{n}", "max_tokens": 1, "z": [[[]]] * 900_000}),
    "empty messages": KeyedAttack(
        2, CHAT, lambda n: {"messages": [{"role": "user", "content": ""}] * 100_000, "max_tokens": 1, "seed": n}
    ),
    "template arguments": KeyedAttack(
        4,
        CHAT,
        lambda n: {
            "messages": [{"role": "user", "content": f"{n}"}],
            "max_tokens": 1,
            "chat_template_kwargs": {f"k{i}": "x" * 900 for i in range(2000)},
        },
    ),
    "large texts": KeyedAttack(4, "/tokenize", lambda n: {"prompt": f"{n} " + "word " * 1_000_000}),
}
KEYED: dict[str, KeyedAttack] = {**SHARES, **SCHEMAS, **BODIES}

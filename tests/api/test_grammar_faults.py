"""Errors of the grammar library as clients read them."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgemoe.types.grammar_faults import FAULTS, NO_VALUE, TOO_COMPLEX, fault_in_words
from edgemoe.types.request import PARSER_LIMITS

BYTES = LLTokenizer("byte")
STRICT = '"x-guidance": {"lenient": false, "coerce_one_of": false}'
CASES = {
    "start: " + " | ".join(f'"w{at}"' for at in range(2100)): "too many texts may follow at one place",
    'start: %json {"type": "string", "format": "email", "pattern": "^x$"}': (
        f"{NO_VALUE}: its patterns and formats exclude each other"
    ),
    'start: %json {"type": "integer", "minimum": 5, "maximum": 2}': f"{NO_VALUE}: minimum (5) is greater",
    "start: /[^\\s\\S]/": NO_VALUE,
    'start: %json {"type": "objeeect"}': "type 'objeeect' is unknown",
    'start: %json {"$ref": "http://x/y"}': "$ref 'http://x/y' is outside of the schema",
    'start: %json {"$ref": "#/$defs/none"}': "$ref '#/$defs/none' is not in the schema",
    f'start: %json {{"type": "array", "uniqueItems": true, {STRICT}}}': '"uniqueItems" cannot be enforced',
    f'start: %json {{"oneOf": [{{"type": "string"}}, {{"minLength": 2}}], {STRICT}}}': "oneOf cannot be enforced",
    'start: %json {"type": "integer", "minimum": "a"}': "expected a number for 'minimum'",
    "start: <nope>": 'unknown special token: "<nope>"',
    "start: <[999999]>": "the model has no token 999999",
    "%import common.FOO\nstart: FOO": "Unknown common regex: common.FOO",
    'start: ("a"': "Expected token ')'",
    'start: "a': "it is no grammar: a text or a pattern is not closed",
    "start: /(?=a)b/": "a pattern cannot be followed: look-around",
    'start: %json {"type": "string", "pattern": "\\\\1"}': "a pattern cannot be followed: backreferences",
    "start: /a{100000000}/": TOO_COMPLEX,
    'start: "a"': "",
}


def error_of(lark: str) -> str:
    """Returns the library's error for a grammar, found as late as in its second mask; "" for none."""
    limits = LLParserLimits(**PARSER_LIMITS)
    matcher = LLMatcher(BYTES, str(LLMatcher.grammar_from_lark(lark)), log_level=0, limits=limits)
    if not matcher.is_error():
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if allowed:
            matcher.consume_token(allowed[0])
            matcher.compute_logit_bias()
    return str(matcher.get_error()) if matcher.is_error() else ""


@pytest.mark.parametrize("lark", CASES, ids=lambda lark: lark[:60])
def test_an_error_is_told_in_one_line_and_without_the_library(lark: str) -> None:
    words = fault_in_words(error_of(lark))
    assert words.startswith(CASES[lark])
    assert bool(words) == bool(CASES[lark])
    assert "\n" not in words
    assert not words.startswith("lexer error")
    for own in ("NoExtension", "row has", "Current", "registry", "Unimplemented", "at 1(", "at 2("):
        assert own not in words


def test_every_row_of_the_table_has_a_case() -> None:
    errors = [error_of(lark) for lark in CASES]
    for pattern, _ in FAULTS:
        assert any(pattern.search(error.partition("\n")[0]) for error in errors), pattern.pattern

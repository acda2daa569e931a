"""Puts llguidance's errors into words for clients, who know neither the library nor its limits."""

from __future__ import annotations

import re

TOO_COMPLEX = "it is too complex; simplify it"
NO_VALUE = "no text matches it"
_POSITION = re.compile(r"^(?:(?:at )?\d+\(\d+\): )*(?:failed to compile JSON schema: )?")
# the first that is found in the first line counts
FAULTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Current row has \d+ items", "too many texts may follow at one place: give fewer alternatives"),
        (r"Unsatisfiable schema: Regex is empty", f"{NO_VALUE}: its patterns and formats exclude each other"),
        (r"Unsatisfiable schema: (.*)", rf"{NO_VALUE}: \1"),
        (r"NoExtension", NO_VALUE),
        (r"Invalid type: (.*)", r"type '\1' is unknown"),
        (r"Resource '(.*?)' is not present", r"$ref '\1' is outside of the schema, and nothing is fetched"),
        (r"Pointer '(.*?)' does not exist", r"$ref '#\1' is not in the schema"),
        (r"Unimplemented keys: \[(.*)\]", r"\1 cannot be enforced; leave it out, or leave `strict` out"),
        (r"oneOf constraints are not", "oneOf cannot be enforced; use anyOf, or leave `strict` out"),
        (r"Expected f64 for (.*)", r"expected a number for \1"),
        (r"(unknown special token: .*?);.*", r"\1"),
        (r"(Unknown common regex: .*?);.*", r"\1"),
        (r"Token range end too large: (.*)", r"the model has no token \1"),
        (r"(.*?) \(at .*", r"\1"),
        (r"lexer error$", "it is no grammar: a text or a pattern is not closed"),
        (r"too (?:big|complex|large:|many)|Too many|TooComplex|fuel|too large\b(?!; must)", TOO_COMPLEX),
    )
)


def fault_in_words(error: str) -> str:
    """Returns the reason why a grammar cannot be used, in one line, from the text of llguidance's error."""
    lines = error.splitlines() or [""]
    if "regex parse error" in lines[0]:
        why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "it cannot be read")
        return f"a pattern cannot be followed: {why}"
    first = _POSITION.sub("", lines[0])
    for pattern, words in FAULTS:
        if found := pattern.search(first):
            return found.expand(words)
    return first

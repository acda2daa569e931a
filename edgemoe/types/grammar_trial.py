"""What a grammar's trial in a bounded process found out, and the limits of the parser there and in the engine."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgemoe.types.bounds import Bytes, Seconds

DIGEST_BYTES = 16
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]

# llguidance's limits (LLParserLimits). What is not here has its default there.
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 100_000,  # of up to 400 bytes each
    "max_grammar_size": 500_000,
}


class GrammarTrial(msgspec.Struct, frozen=True):
    """Says that a grammar was compiled and a first mask computed within limits, by the served model's tokenizer."""

    digest: Digest  # of the grammar
    seconds: Seconds  # of a processor
    bytes: Bytes  # that the compiled grammar takes


def digest_of(grammar: str) -> bytes:
    """Returns the digest of a serialised grammar."""
    return hashlib.blake2b(grammar.encode(), digest_size=DIGEST_BYTES).digest()

"""Bounds of message fields: the types here limit every number, text and list that is sent between processes.

Messages are decoded by these types, so that a reader is safe from oversized values. A test goes through all messages
and fails where a field has no bound.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

from msgspec import Meta

MAX_MODELS = 64  # that a request may name beside one
MAX_NODES = 64  # boxes in a cluster, this one included
REQUEST_CHARS = 256  # of a request's name at an engine, the name of the box that it came from included
USER_CHARS = 1024  # of a principal's or a user's name at an engine, likewise
SALT_MAX_BYTES = 64

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Small = Annotated[int, Meta(ge=0, le=1 << 24)]  # layers, experts, tokens of a context, requests
Attempt = Annotated[int, Meta(ge=1, le=1 << 31)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seed = Annotated[int, Meta(ge=0)]  # 64 bits: msgpack's limit

TokenId = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenCount = Annotated[int, Meta(ge=0, le=1 << 31)]
Tokens = Annotated[tuple[TokenId, ...], Meta(max_length=1 << 22)]  # of a prompt or an answer

StopTokens = Annotated[tuple[TokenId, ...], Meta(max_length=1 << 16)]

Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
WallSeconds = Annotated[float, Meta(ge=0, le=1e12)]  # since 1970
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]  # eleven days
Rate = Annotated[float, Meta(ge=0, le=1e15)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Temperature = Annotated[float, Meta(ge=0, le=1e6)]
Bias = Annotated[float, Meta(ge=-1e6, le=1e6)]  # on a logit
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]  # divisor of the logits of tokens that have occurred
LogprobCount = Annotated[int, Meta(ge=0, le=20)]  # most probable tokens reported at each position
MAX_LOGPROBS = 1 << 20  # log probabilities of one prompt, which are sent in one message
Logprob = Annotated[float, Meta(ge=-1e6, le=1e6)]

Name = Annotated[str, Meta(min_length=1, max_length=REQUEST_CHARS)]
Word = Annotated[str, Meta(max_length=64)]  # a code, a kind, an option
TEXT_CHARS = 256
Text = Annotated[str, Meta(max_length=TEXT_CHARS)]
Label = Annotated[str, Meta(max_length=USER_CHARS)]  # of a principal or a user
Salt = Annotated[bytes, Meta(max_length=SALT_MAX_BYTES)]  # of cached blocks' keys
LongText = Annotated[str, Meta(max_length=64 << 10)]
Grammar = Annotated[str, Meta(max_length=32 << 20)]
Bitmap = Annotated[bytes, Meta(max_length=1 << 18)]  # of a model's experts
Words = Annotated[tuple[Word, ...], Meta(max_length=16)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=1 << 12)]  # a number of each size of experts
LayerCounts = Annotated[tuple[Small, ...], Meta(max_length=1 << 12)]  # a number of each layer
LayerBytes = Annotated[tuple[Bytes, ...], Meta(max_length=1 << 12)]  # a size of each layer
ShareTable = Annotated[bytes, Meta(max_length=1 << 18)]  # of a model's experts, two bytes each
PairTable = Annotated[bytes, Meta(max_length=192 << 10)]  # of pairs or successions of experts, eight bytes each
Sum64 = Annotated[int, Meta(ge=0)]  # 64 bits: msgpack's limit


def is_number(text: str, most_digits: int = 7) -> bool:
    """Returns whether `int` reads a text from outside: ASCII digits, and not too many."""
    return text.isascii() and text.isdigit() and len(text) <= most_digits


def is_port(text: str) -> bool:
    """Returns whether a text names a port."""
    return is_number(text, 5) and 0 < int(text) < 65536


def is_loopback(host: str) -> bool:
    """Returns whether a host's name or address, in brackets or not, is one that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

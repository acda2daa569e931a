"""The facts of a served model that the front needs, and texts about it for clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from edgemoe.types.bounds import Bytes, Count, LayerBytes, LayerCounts, LongText, Small, Text, TokenCount, Word, Words

LATEST = ":latest"
MAX_PLACES = 3  # before the slashes of a client's name: openrouter/openai/NAME
OLLAMA_PLACES = ("registry.ollama.ai/", "library/")  # of its own models, which names may leave out


def commonest_first(encodings: Sequence[str]) -> tuple[str, ...]:
    """Returns the distinct encodings of layers, the commonest first."""
    return tuple(name for name, _ in Counter(encodings).most_common())


def encodings_text(experts: Sequence[str], dense: str, dtype: str) -> str:
    """Returns one line on the encodings of a model of type `dtype`."""
    parts = {"experts": ", ".join(experts) or dtype, "dense": dense or dtype}
    return dtype if set(parts.values()) == {dtype} else "; ".join(f"{part} {name}" for part, name in parts.items())


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the served model to the front."""

    id: LongText
    family: Text
    digest: Text
    context_tokens: Count
    vocab: TokenCount
    layers: Small
    experts: Small
    top_k: Small
    dtype: Word
    expert_bytes: Bytes  # of a largest one
    layer_experts: LayerCounts = ()  # of each layer; (): all have `experts`
    encodings: Words = ()  # that experts are stored in, the commonest first
    dense_encoding: Word = ""  # of the dense matrices; "": `dtype`
    kv_dtype: Word = ""  # of keys and values
    layer_bytes: LayerBytes = ()  # of an expert of each layer, as it lies in memory


def plain_name(name: str) -> str:
    """Returns a model's name as names are compared: in lower case, without Ollama's place and its tag `latest`."""
    plain = name.lower().removesuffix(LATEST)
    for place in OLLAMA_PLACES:
        plain = plain.removeprefix(place)
    return plain


def asked_names(name: str) -> Iterator[str]:
    """Yields the plain names that a client's name may stand for, the whole first.

    Client libraries leave a provider in front, and other servers name models with their publishers.
    """
    plain = plain_name(name)
    for _ in range(MAX_PLACES + 1):
        yield plain
        _, slash, plain = plain.partition("/")
        if not slash or not plain:
            return


def loading_text(at: Mapping[str, Any]) -> str:
    """Returns one line on /health's "loading": the phase, its share, its detail and its seconds."""
    share = f" {at['fraction']:.0%}" if at["fraction"] else ""
    detail = f" ({at['detail']})" if at.get("detail") else ""
    return f"{at['phase']}{share}{detail}, for {at.get('phase_s', 0.0):.0f} s"

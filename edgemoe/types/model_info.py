"""Facts about the served model that the front needs."""

from __future__ import annotations

import msgspec

from edgemoe.types.bounds import Bytes, Count, LongText, Small, Text, TokenCount, Word


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and sizes of the served model."""

    id: LongText
    family: Text
    digest: Text
    context_tokens: Count
    vocab: TokenCount
    layers: Small
    experts: Small
    top_k: Small
    dtype: Word
    expert_bytes: Bytes

"""The served model: what names it, and the facts of it that the front needs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from edgemoe.types.bounds import Bytes, Count, LayerCounts, LongText, Small, Text, TokenCount, Word
from edgemoe.types.experts import ExpertGeometry


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Names the served model, and the sizes of its experts."""

    digest: str  # of its store; the same on all boxes that serve it
    geometry: ExpertGeometry


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tells the front of the served model."""

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

"""A model as an engine names it, which nobody runs."""

from __future__ import annotations

from edgemoe.types.model_info import ModelInfo

MODEL = ModelInfo(
    id="m",
    family="f",
    digest="d",
    context_tokens=9,
    vocab=9,
    layers=1,
    experts=2,
    top_k=1,
    dtype="float32",
    expert_bytes=4,
)

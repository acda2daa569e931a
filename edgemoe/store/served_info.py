"""Describes a packed model to the front and its clients, by its manifest."""

from __future__ import annotations

from edgemoe.families.spec import ModelSpec
from edgemoe.store.manifest import Manifest
from edgemoe.types.model_info import ModelInfo, commonest_first


def served_info(name: str, manifest: Manifest, spec: ModelSpec) -> ModelInfo:
    """Returns the description of a model that is served under `name`; "" is the store's own name."""
    geometry = spec.geometry
    return ModelInfo(
        id=name or manifest.name,
        family=spec.family,
        digest=manifest.digest,
        context_tokens=spec.context_tokens,
        vocab=spec.vocab,
        layers=geometry.layers,
        experts=geometry.experts,
        top_k=geometry.top_k,
        dtype=spec.dtype,
        expert_bytes=max(map(geometry.expert_bytes, range(geometry.layers))),
        layer_experts=geometry.layer_experts,
        encodings=commonest_first([geometry.encoding_name(layer) for layer in range(geometry.layers)]),
        dense_encoding=spec.dense_encoding,
        kv_dtype="int8" if spec.kv_int8 else spec.dtype,
        layer_bytes=tuple(geometry.strides_bytes.tolist()),
    )

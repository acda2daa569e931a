"""Whether a store's manifest and the configuration in it tell of the same model."""

from __future__ import annotations

import math
from dataclasses import replace

from edgemoe.errors import StoreError
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.store.manifest import MANIFEST, Manifest
from edgemoe.types.encoding import BFLOAT16, ENCODINGS


def spec_of(manifest: Manifest) -> ModelSpec:
    """Returns the model of a store, whose files hold what it takes.

    So memory that is reserved by the configuration is bounded by the files' sizes. Raises UnsupportedModel,
    CheckpointError, and StoreError where they contradict each other.
    """
    spec = spec_from_config(manifest.spec_config)
    experts = tuple(layer.encoding or manifest.dtype for layer in manifest.layers)
    if any(encoding != manifest.dtype for encoding in experts):
        spec = replace(spec, encodings=experts)
    spec = replace(spec, dense_encoding=manifest.dense.encoding)
    geometry = spec.geometry
    if len(manifest.layers) != geometry.layers:
        raise _contradiction(manifest, f"{len(manifest.layers)} layers of experts", f"{geometry.layers}")
    for layer, entry in enumerate(manifest.layers):
        count, expert_bytes = geometry.experts_of(layer), geometry.expert_bytes(layer)
        for expert in entry.experts:
            if expert.expert >= count:
                raise _contradiction(manifest, f"an expert {expert.expert} of layer {layer}", f"{count} experts")
            if expert.bytes != expert_bytes:
                found = f"{expert.bytes} bytes for expert {expert.expert} of layer {layer}"
                raise _contradiction(manifest, found, f"{expert_bytes} bytes an expert")
    encoding = ENCODINGS.get(manifest.dense.encoding, BFLOAT16)
    least_bytes = sum(map(math.prod, dense_shapes(spec).values())) * encoding.bits // 8
    if manifest.dense.bytes < least_bytes:
        raise _contradiction(manifest, f"{manifest.dense.bytes} bytes of dense weights", f"{least_bytes} or more")
    return spec


def _contradiction(manifest: Manifest, found: str, configured: str) -> StoreError:
    return StoreError(
        f"{MANIFEST} of {manifest.name[:80]} has {found}, its configuration says {configured}; "
        "pack the checkpoint again"
    )

"""What a variant of a model has for `speed.step` to reckon with."""

from __future__ import annotations

from edgemoe.cli.plan import speed
from edgemoe.cli.plan.subject import Variant, dense_size
from edgemoe.families.spec import dense_shapes


def model_of(variant: Variant) -> speed.Model:
    """Returns the sizes that speed depends on."""
    geometry = variant.spec.geometry
    return speed.Model(geometry.layers, geometry.experts, geometry.top_k, geometry.largest_bytes)


def rest_bytes(variant: Variant) -> float:
    """Returns the bytes that a step reads outside the layers that were measured: the head, and dense layers."""
    spec = variant.spec
    inside = {f"model.layers.{layer}." for layer in spec.expert_layers}
    total = 0
    for name, shape in dense_shapes(spec).items():
        layer = ".".join(name.split(".")[:3]) + "."
        if layer not in inside and ("embed_tokens" not in name or spec.block.tied):
            total += dense_size(spec, name, shape)
    return total

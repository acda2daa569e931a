"""What a model needs of memory, from its spec: for the daemon that loads it, and for who asks beforehand."""

from __future__ import annotations

from edgemoe.config.budgets import ModelNeeds
from edgemoe.families.spec import ModelSpec
from edgemoe.model.dense_weights import decoded_bytes
from edgemoe.types.step import BLOCK_TOKENS


def needs_of(spec: ModelSpec, dense_bytes: int) -> ModelNeeds:
    """Returns the sizes that budgets depend on; `dense_bytes` is the size of the file of dense weights."""
    experts = spec.geometry
    return ModelNeeds(
        dense_bytes=dense_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token + -(-experts.layers * experts.experts // BLOCK_TOKENS),
        experts=experts,
        context_tokens=spec.context_tokens,
        state_bytes=spec.state_bytes,
        decoded_bytes=decoded_bytes(spec),
    )

"""Rotary embeddings as configurations write them: default, linear and YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config_values import integer, real
from edgemoe.families.spec import RopeSpec
from edgemoe.families.table import Family


def read_rope(config: Mapping[str, Any], family: Family) -> tuple[RopeSpec, int]:
    """The rotary embedding and the tokens of context that it reaches."""
    context_tokens = integer(config, "max_position_embeddings")
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope parameters must be a table, not {given!r}")
    theta = real(given, "rope_theta", default=real(config, "rope_theta", default=family.default_theta))
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "linear", "yarn") or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"rotary embedding {dict(given)!r} is not supported; have default, linear and yarn")
    if kind == "default":
        return RopeSpec(theta), context_tokens
    original = integer(config, "original_max_position_embeddings", default=_original_tokens(given, context_tokens))
    if kind == "yarn" and given.get("factor") is None:
        factor = context_tokens / original
    else:
        factor = real(given, "factor")
    if kind == "linear":
        return RopeSpec(theta, kind, factor), context_tokens
    rope = RopeSpec(
        theta,
        kind,
        factor,
        original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=real(given, "beta_fast", default=32.0),
        beta_slow=real(given, "beta_slow", default=1.0),
        truncate=bool(given.get("truncate", True)),
    )
    return rope, max(context_tokens, int(original * factor))


def _original_tokens(given: Mapping[str, Any], context_tokens: int) -> int:
    return integer(given, "original_max_position_embeddings", default=context_tokens)


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Stated, or from `factor` [YaRN, 3.4], with DeepSeek's mscale pair."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return real(given, "attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(real(given, "mscale")) / scale(real(given, "mscale_all_dim"))
    return scale(1.0)

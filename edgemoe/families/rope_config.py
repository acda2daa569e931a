"""Rotary embeddings as configurations write them: default, linear, proportional and YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.read import Config, integer, real
from edgemoe.families.spec import RopeSpec

THETA = 1e4
KINDS = ("default", "linear", "proportional", "yarn")


def read_rope(config: Config, family: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, int]:
    """The rotary embedding and the tokens of context that it reaches.

    `family` has what the configuration may leave unsaid: `theta`, and the `partial` share of a head that turns.
    """
    context_tokens = integer(config, "max_position_embeddings")
    given = rope_table(config)
    theta = real(given, "rope_theta", default=real(config, "rope_theta", default=family.get("theta", THETA)))
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "dynamic" and given.get("alpha") is not None and head_dim > 2:  # it does not depend on the context
        kind, theta = "default", theta * real(given, "alpha") ** (head_dim / (head_dim - 2))
    if kind not in KINDS:
        raise UnsupportedModel(f"rotary embedding {dict(given)!r} is not supported; have {', '.join(KINDS)}")
    if kind == "proportional":
        share, factor = real(given, "partial_rotary_factor", default=1.0), real(given, "factor", default=1.0)
        return RopeSpec(theta, head_dim, kind=kind, factor=factor, share=share), context_tokens
    plain = RopeSpec(theta, _dims(config, given, family, head_dim), _said(family, "interleaved", config))
    if kind == "default":
        return plain, context_tokens
    if theta <= 1.0:
        raise CheckpointError(f"config.json: rope_theta = {theta} is impossible for {kind}; it is more than 1")
    original = integer(config, "original_max_position_embeddings", default=_original_tokens(given, context_tokens))
    if kind == "yarn" and given.get("factor") is None:
        factor = context_tokens / original
    else:
        factor = real(given, "factor")
    if kind == "linear":
        return replace(plain, kind=kind, factor=factor), context_tokens
    rope = replace(
        plain,
        kind=kind,
        factor=factor,
        original_tokens=original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=real(given, "beta_fast", default=32.0),
        beta_slow=real(given, "beta_slow", default=1.0),
        truncate=bool(given.get("truncate", True)),
    )
    return rope, max(context_tokens, int(original * factor))


def rope_table(config: Config) -> Mapping[str, Any]:
    """Returns what a configuration says of its rotary embedding by itself. Raises CheckpointError."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    says_more = isinstance(newer, Mapping) and isinstance(older, Mapping) and newer == {**newer, **older}
    if newer and older and newer != older and not says_more:
        raise CheckpointError(
            f"config.json: rope_parameters = {str(newer)[:80]} and rope_scaling = {str(older)[:80]} differ; "
            "write all into rope_parameters and leave rope_scaling out"
        )
    given = newer or older or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope parameters must be a table, not {str(given)[:80]}")
    return given


def _dims(config: Config, given: Config, family: Mapping[str, Any], head_dim: int) -> int:
    """Returns how many dimensions of a head turn: an even number, all of them where nothing says otherwise."""
    stated = real(config, "partial_rotary_factor", default=family.get("partial", 1.0))
    if config.get("rotary_dim") is not None:
        stated = integer(config, "rotary_dim") / head_dim
    dims = int(head_dim * real(given, "partial_rotary_factor", default=stated))
    if dims % 2 or not 0 < dims <= head_dim:
        raise CheckpointError(f"config.json: partial_rotary_factor turns {dims} of {head_dim} dimensions of a head")
    return dims


def _said(family: Mapping[str, Any], field: str, config: Config) -> bool:
    """Returns what the family, or the configuration in its stead, says of a switch."""
    value = family.get(field, False)
    return bool(value(config) if callable(value) else value)


def _original_tokens(given: Config, context_tokens: int) -> int:
    return integer(given, "original_max_position_embeddings", default=context_tokens)


def _yarn_attention_factor(given: Config, factor: float) -> float:
    """Stated, or from `factor` [YaRN, 3.4], with DeepSeek's mscale pair."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return real(given, "attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(real(given, "mscale")) / scale(real(given, "mscale_all_dim"))
    return scale(1.0)

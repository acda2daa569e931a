"""Costs of computing, fitted to measurements on a GPU. Seconds, linear in work.

LLMServingSim's profile of Qwen3-30B-A3B in bfloat16 on an RTX PRO 6000: a layer's experts by distinct experts and
tokens, dense parts by tokens. Costs by expert size are scaled to the simulated model.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

PROFILE = "llmservingsim-measured/profile_rtxpro6000_qwen3-30b-a3b_tp1"
PROFILED_EXPERT = 2048 * 768 * 3  # parameters of one of the profile's experts
DENSE_PARTS = ("layernorm", "qkv_proj", "qk_norm", "rotary_emb", "o_proj", "layernorm")  # of a layer
ATTENTION_S = 8e-6  # of a decoding token with a short context [the profile's attention.csv]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a layer on one GPU."""

    dense_s: float
    dense_token_s: float
    launch_s: float  # of a layer's experts
    expert_s: float  # of each chosen expert
    token_s: float  # of each (expert, token)

    def slower(self, factor: float) -> Costs:
        """Returns the costs of a GPU that takes `factor` times as long."""
        names = ("dense_s", "dense_token_s", "launch_s", "expert_s", "token_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


def measured(data: Path, expert_numbers: int, top_k: int = 8) -> Costs:
    """Returns costs fitted to the profile, for experts of `expert_numbers` parameters in bfloat16."""
    rows = list(_rows(data / PROFILE / "moe.csv"))
    tokens, experts, spent = (
        np.array([float(row[name]) for row in rows]) for name in ("tokens", "activated_experts", "time_us")
    )
    few = tokens <= 256
    sides = np.stack([np.ones(few.sum()), experts[few], tokens[few] * top_k], axis=1)
    launch, expert, token = np.maximum(np.linalg.lstsq(sides, spent[few] * 1e-6, rcond=None)[0], 0.0)
    scale = expert_numbers / PROFILED_EXPERT
    fixed, each = _dense(data / PROFILE / "dense.csv")
    return Costs(fixed + ATTENTION_S, each, float(launch), float(expert * scale), float(token * scale))


def _dense(path: Path) -> tuple[float, float]:
    """Returns the seconds of a layer's dense parts, and of each token in them."""
    fixed = each = 0.0
    rows = list(_rows(path))
    for layer in DENSE_PARTS:
        points = [(float(row["tokens"]), float(row["time_us"])) for row in rows if row["layer"] == layer]
        tokens, spent = np.array(points).T
        slope, start = np.polyfit(tokens, spent, 1).tolist()
        fixed, each = fixed + max(start, 0.0) * 1e-6, each + max(slope, 0.0) * 1e-6
    return fixed, each


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(file)

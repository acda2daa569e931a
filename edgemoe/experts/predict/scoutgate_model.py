"""ScoutGate scores every expert of every layer from the last m tokens, before the token's first layer runs.

Source: [Two-Tier, 4.2, steps 1-6], with m = 8 and d_proj = 128. Differences: docs/design/prediction.md.
Exports are two files: `scoutgate.safetensors`, the weights in float32, and `scoutgate.json`, which describes them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from edgemoe.durable import make_folder, replace_file

WINDOW = 8  # m
NO_TOKEN = -1  # before the request's first token
VARIANTS = ("source", "context")


@dataclass(frozen=True)
class ScoutGateShape:
    experts: tuple[int, ...]  # E_l of each layer
    top_k: int
    embedding: int  # d_emb, of the main model
    hidden: int = 0  # width of the hidden state given to variant "context"; 0: none
    horizons: int = 2  # 1: this token; 2: also the next
    variant: str = "source"
    window: int = WINDOW
    projection: int = 128  # d_proj
    layer_width: int = 32  # d_l
    expert_width: int = 64  # d_e
    rank: int = 64  # d'
    trunk: int = 256  # hidden layer of variant "context"

    @property
    def layers(self) -> int:
        return len(self.experts)

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return sum(self.experts)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "experts": list(self.experts)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoutGateShape:
        """Raises ValueError where a field is missing, unknown or out of range."""
        try:
            shape = cls(**{**values, "experts": tuple(values["experts"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not the shape of a ScoutGate: {error}") from error
        sizes = [v for v in asdict(shape).values() if isinstance(v, int)] + list(shape.experts)
        if not all(isinstance(v, int) and 0 <= v <= 1 << 20 for v in sizes) or shape.variant not in VARIANTS:
            raise ValueError("not the shape of a ScoutGate: a size or the variant is out of range")
        return shape


class ScoutGate(nn.Module):
    def __init__(self, shape: ScoutGateShape) -> None:
        super().__init__()
        s = self.shape = shape
        self.projection = nn.Linear(s.embedding, s.projection)  # step 3
        self.norm = nn.LayerNorm(s.projection)
        self.absent = nn.Parameter(torch.zeros(s.projection))  # stands for a token before the first
        self.layer_embedding = nn.Embedding(s.horizons * s.layers, s.layer_width)  # step 4
        width = s.window * s.projection
        if s.variant == "context":
            self.previous = nn.Embedding(s.total + 1, s.projection, padding_idx=s.total)
            self.previous_norm = nn.LayerNorm(s.projection)
            width += s.projection
            if s.hidden:
                self.state = nn.Sequential(nn.Linear(s.hidden, s.projection), nn.LayerNorm(s.projection))
                width += s.projection
            self.trunk = nn.Linear(width, 2 * s.trunk)
            width += s.trunk
        self.context = nn.Linear(width, s.rank, bias=False)  # W_h, its part for z_ctx
        self.layer = nn.Linear(s.layer_width, s.rank, bias=False)  # W_h, its part for z_l
        self.expert_embedding = nn.Embedding(s.horizons * s.total, s.expert_width)  # step 5: v_{e,l}
        self.expert = nn.Linear(s.expert_width, s.rank, bias=False)  # W_e
        self.bias = nn.Parameter(torch.zeros(s.horizons * s.total))  # b_{e,l}
        sizes = torch.tensor(s.experts * s.horizons)
        self.register_buffer("layer_of", torch.arange(len(sizes)).repeat_interleave(sizes), persistent=False)
        self.layer_of: Tensor
        self._start()

    def _start(self) -> None:
        start = torch.cat([torch.full((e,), self.shape.top_k / e) for e in self.shape.experts])
        with torch.no_grad():
            self.bias.copy_(start.clamp(1e-4, 1 - 1e-4).logit().repeat(self.shape.horizons))
        for table in (self.layer_embedding, self.expert_embedding):
            nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)

    def project(self, embeddings: Tensor) -> Tensor:
        """Applies step 3 to any tokens: [..., d_emb] -> [..., d_proj]. A server keeps it for the whole vocabulary."""
        projected: Tensor = self.norm(self.projection(embeddings))
        return projected

    def forward(
        self, projected: Tensor, present: Tensor, previous: Tensor | None = None, state: Tensor | None = None
    ) -> Tensor:
        """Scores s_{e,l} (logits) of every expert, [B, horizons * sum E_l], layer after layer.

        `projected` [B, m, d_proj] are the window's tokens after step 3, oldest first; `present` [B, m] is false where
        the request had not begun. Variant "context" also takes `previous` [B, L * k], the previous token's experts
        counted through all layers (`total` where there was none), and `state` [B, hidden].
        """
        towers, own = self.towers()
        return self.summary(projected, present, previous, state) @ towers.T + own

    def summary(self, projected: Tensor, present: Tensor, previous: Tensor | None, state: Tensor | None) -> Tensor:
        """Returns the part of W_h for the tokens, [B, rank]."""
        z = torch.where(present[..., None], projected, self.absent).flatten(1)  # step 4, z_ctx
        if self.shape.variant == "context":
            z = self._more(z, previous, state)
        out: Tensor = self.context(z)
        return out

    def _more(self, z: Tensor, previous: Tensor | None, state: Tensor | None) -> Tensor:
        if previous is None:
            previous = z.new_full((z.shape[0], 1), self.shape.total, dtype=torch.long)
        parts = [z, self.previous_norm(self.previous(previous).sum(1))]
        if self.shape.hidden:
            if state is None:
                state = z.new_zeros(z.shape[0], self.shape.hidden)
            parts.append(self.state(state))
        joined = torch.cat(parts, -1)
        gate, up = self.trunk(joined).chunk(2, -1)
        return torch.cat([joined, nn.functional.silu(gate) * up], -1)

    def towers(self) -> tuple[Tensor, Tensor]:
        """Computes step 5's part without tokens: W_e v_{e,l} [V E, rank], and (W_l z_l)^T W_e v_{e,l} + b [V E]."""
        towers = self.expert(self.expert_embedding.weight)
        layers = self.layer(self.layer_embedding.weight)  # W_l z_l, [V, rank]
        return towers, (towers * layers[self.layer_of]).sum(-1) + self.bias


def cardinality(logits: Tensor, shape: ScoutGateShape) -> Tensor:
    """Measures how far the expected number of chosen experts is from k: mean over layers of ((sum_e p - k) / k)^2."""
    p = logits.sigmoid()
    sums = torch.stack([part.sum(-1) for part in torch.split(p, list(shape.experts) * shape.horizons, -1)], -1)
    return ((sums / shape.top_k - 1) ** 2).mean()


# Exports: the one form in which a trained predictor reaches a daemon, safetensors and JSON.

FORMAT = 1
WEIGHTS, RECORD = "scoutgate.safetensors", "scoutgate.json"
MAX_WEIGHTS_BYTES = 1 << 30


@dataclass(frozen=True)
class ScoutGateExport:
    """A ScoutGate as read from disk. Calibrated: p = sigmoid(scale * s + shift), [horizons * L] each."""

    gate: ScoutGate
    scale: Tensor
    shift: Tensor
    record: dict[str, Any]

    @property
    def shape(self) -> ScoutGateShape:
        return self.gate.shape


def write_export(
    directory: Path, gate: ScoutGate, calibration: tuple[Tensor, Tensor], model: dict[str, str], metrics: dict[str, Any]
) -> None:
    """Writes an export; the JSON last, so that a half-written one is refused."""
    scale, shift = calibration
    record = {
        "shape": gate.shape.as_dict(), "model": model,
        "calibration": {"scale": scale.tolist(), "shift": shift.tolist()}, "metrics": metrics,
    }  # fmt: skip
    write_tensors(directory / WEIGHTS, directory / RECORD, gate.state_dict(), record)


def write_tensors(weights: Path, record: Path, values: Mapping[str, Tensor], told: dict[str, Any]) -> None:
    """Writes tensors and their record, with format and hash; the JSON last."""
    make_folder(weights.parent)
    data = save({name: value.detach().cpu().float().contiguous() for name, value in values.items()})
    digest = hashlib.sha256(data).hexdigest()
    replace_file(weights, data, 0o644)
    replace_file(record, (json.dumps({"format": FORMAT, "sha256": digest, **told}, indent=1) + "\n").encode(), 0o644)


def read_export(directory: Path) -> ScoutGateExport:
    """Reads a ScoutGate export. Raises ValueError if the directory holds no whole export of this format."""
    record, data = read_tensors(directory / WEIGHTS, directory / RECORD, "ScoutGate")
    try:
        gate = ScoutGate(ScoutGateShape.from_dict(record["shape"]))
        gate.load_state_dict(load(data))
        scale, shift = (torch.tensor(record["calibration"][k], dtype=torch.float32) for k in ("scale", "shift"))
        if scale.shape != shift.shape or scale.shape != (gate.shape.horizons * gate.shape.layers,):
            raise ValueError("the calibration does not fit the shape")
        if not all(t.isfinite().all() for t in (*gate.state_dict().values(), scale, shift)):
            raise ValueError("it holds numbers that are not finite")
        if not 0.0 <= promised_loss(record) < math.inf:
            raise ValueError("its log-loss is no number")
        if not all(isinstance(v, str) for v in record["model"].values()):
            raise ValueError("the model is not named")
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{directory} holds a ScoutGate that cannot be used: {error}") from error
    return ScoutGateExport(gate.eval().requires_grad_(False), scale, shift, record)


def its_and_ours(record: dict[str, Any], what: str, ours: str) -> tuple[str, str]:
    """Returns the model's `what` by an export's record, and ours; an empty one is taken for the other, and fits all."""
    its = str(record["model"].get(what) or ours)
    return its, ours or its


def promised_loss(record: dict[str, Any]) -> float:
    """Returns the log-loss of this token's forecast on held-out requests; 0 where the export does not say."""
    figures = record["metrics"].get("horizons", {}).get("this_token", {}).get("scoutgate", {})
    return float(figures.get("log_loss", 0.0))


def read_tensors(weights: Path, record: Path, what: str) -> tuple[dict[str, Any], bytes]:
    """Returns the record and the safetensors bytes of an export. Raises ValueError if it is incomplete."""
    try:
        told = json.loads(record.read_text(encoding="utf-8"))
        if weights.stat().st_size > MAX_WEIGHTS_BYTES:
            raise ValueError(f"{weights} is too large for a {what}")
        data = weights.read_bytes()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{record.parent} is not a {what} export: {error}") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise ValueError(f"{record} is not of format {FORMAT}; export the predictor again")
    if hashlib.sha256(data).hexdigest() != told.get("sha256"):
        raise ValueError(f"{weights} is damaged, or belongs to another {record.name}; export the predictor again")
    return told, data

"""A network that predicts each expert's next need from past choices, without token ids [Belady].

It predicts each expert's utility, decay^tokens to its next need, as log odds, at `looks + 1` places in a token. A
parametric head and recall (attention over a memory of past tokens) are weighed by a small network with the expert's own
history. Forecasts: FROM_HERE, if its layer is still to run in this token; AFTER, if it has run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional

from edgemoe.experts.predict.scoutgate_model import read_tensors, write_tensors

WEIGHTS, RECORD = "nextuse.safetensors", "nextuse.json"  # of an export, beside ScoutGate's
LAGS = 4  # tokens before the running one with a vector each
PAST = 24  # tokens of the decaying mean; recall skips this many latest tokens of a sequence
RATE = 0.15  # of that mean
DECAY = 0.85  # of utilities, per token; as in the online learner
FROM_HERE, AFTER = 0, 1
FEATURES = 9  # parametric, recalled, EWMAs at three rates, age, used now, popularity, 1 for AFTER
FLOOR = 0.02  # of recalled utility, before log odds are taken


@dataclass(frozen=True)
class NextUseShape:
    layers: int
    experts: int  # of each layer
    top_k: int
    looks: int = 4  # updates per token, at even distances between the layers, besides the one before layer 0
    token: int = 128  # width of a token's vector
    context: int = 256
    key: int = 64
    rank: int = 96
    hidden: int = 24  # of the network that all experts share

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    @property
    def places(self) -> list[int]:
        """Layers done at each update."""
        return [math.ceil(self.layers * i / self.looks) for i in range(self.looks + 1)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NextUseShape:
        """Raises ValueError if a field is missing, unknown or out of range."""
        try:
            shape = cls(**values)
        except TypeError as error:
            raise ValueError(f"not the shape of a next-use network: {error}") from error
        sizes = asdict(shape).values()
        if not all(isinstance(v, int) and 1 <= v <= 1 << 14 for v in sizes) or shape.looks > shape.layers:
            raise ValueError("not the shape of a next-use network: a size is out of range")
        return shape

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class NextUseNet(nn.Module):
    """The network. One call of each method, in their order, makes a forecast."""

    def __init__(self, shape: NextUseShape, dropout: float = 0.0) -> None:
        super().__init__()
        s = self.shape = shape
        self.dropout = dropout
        self.chosen = nn.Parameter(torch.randn(s.total, s.token) * 0.5 * s.token**-0.5)  # by a whole token
        self.chosen_norm = nn.LayerNorm(s.token)
        self.running = nn.Parameter(torch.randn(s.total, s.token) * 0.5 * s.token**-0.5)  # by the running token
        self.running_norm = nn.LayerNorm(s.token)
        self.lags = nn.Linear((LAGS + 1) * s.token, s.context, bias=False)
        self.now = nn.Linear(s.token, s.context)
        self.place = nn.Parameter(torch.randn(s.looks + 1, s.context) * 0.02)
        self.norm = nn.LayerNorm(s.context)
        self.inner = nn.Sequential(
            nn.Linear(s.context, 2 * s.context), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * s.context, s.context)
        )
        self.inner_norm = nn.LayerNorm(s.context)
        self.query = nn.Linear(s.context, s.key)
        self.key = nn.Linear(s.context, s.key)
        self.sharpness = nn.Parameter(torch.tensor(math.log(8.0)))
        self.head = nn.Linear(s.context, s.rank)
        self.towers = nn.Parameter(torch.randn(2 * s.total, s.rank) * 0.3 * s.rank**-0.5)
        self.bias = nn.Parameter(torch.zeros(2 * s.total))
        self.hidden = nn.Linear(FEATURES, s.hidden)
        self.hidden_out = nn.Linear(s.hidden, 1)
        self.direct = nn.Linear(FEATURES, 1)
        with torch.no_grad():
            self.direct.weight.copy_(torch.tensor([[1.0, 0.5, 0.2, 0.2, 0.2, -0.1, 0.0, 0.1, 0.0]]))
            self.hidden_out.weight.mul_(0.1)
        mean = RATE * (1 - RATE) ** torch.arange(PAST)
        self.register_buffer("mean", mean, persistent=False)
        self.mean: Tensor  # weights of the last PAST tokens, the latest first

    def tokens(self, hot: Tensor) -> Tensor:
        """Returns vectors of whole tokens: k-hot [N, L * E] -> [N, token]."""
        vectors: Tensor = self.chosen_norm(hot @ self._some(self.chosen))
        return vectors

    def _some(self, table: Tensor) -> Tensor:
        """Drops a random part of the experts in training."""
        if not (self.training and self.dropout):
            return table
        kept = torch.rand(len(table), 1, device=table.device) >= self.dropout
        return table * kept / (1 - self.dropout)

    def history(self, past: Tensor) -> Tensor:
        """Returns the history: the last tokens' vectors [B, PAST, token], the latest first, zeros before the
        request.
        """
        mean = torch.einsum("bpt,p->bt", past, self.mean)
        return torch.cat([past[:, :LAGS].flatten(1), mean], 1)

    def context(self, history: Tensor, hot: Tensor, look: int) -> Tensor:
        """Returns [B, context] from the running token's k-hot [B, L * E]; later layers are not read."""
        known = self.shape.places[look] * self.shape.experts
        so_far = hot[:, :known] @ self._some(self.running[:known])
        x = self.norm(self.lags(history) + self.now(self.running_norm(so_far)) + self.place[look])
        context: Tensor = self.inner_norm(x + self.inner(x))
        return context

    def asked(self, context: Tensor) -> Tensor:
        """Returns queries [B, key], with sharpness and scale; a memory's keys are `key` of its contexts."""
        asked: Tensor = self.query(context) * (self.sharpness.exp() * self.shape.key**-0.5)
        return asked

    def parametric(self, context: Tensor) -> Tensor:
        """Returns log odds [B, 2 * L * E]: FROM_HERE, then AFTER."""
        return functional.dropout(self.head(context), self.dropout, self.training) @ self.towers.T + self.bias

    def weigh(self, parametric: Tensor, recalled: Tensor, own: Tensor, plane: int) -> Tensor:
        """Returns log odds [B, n] from parametric log odds, recalled utility [B, n] and own history [B, n, 6]."""
        odds = torch.log((recalled + FLOOR) / (1 + FLOOR - recalled)) / 2
        last = torch.full_like(parametric, float(plane))
        x = torch.cat([torch.stack([parametric, odds], -1), own, last[..., None]], -1)
        out: Tensor = self.direct(x) + self.hidden_out(functional.relu(self.hidden(x)))
        return out.squeeze(-1)


def write_export(directory: Path, network: NextUseNet, model: dict[str, str], metrics: dict[str, Any]) -> None:
    """Writes an export; the JSON last, so that an incomplete one is refused."""
    record = {"shape": network.shape.as_dict(), "model": model, "metrics": metrics}
    write_tensors(directory / WEIGHTS, directory / RECORD, network.state_dict(), record)


def read_export(directory: Path) -> NextUseNet:
    """Reads an export. Raises ValueError if the directory holds no complete one of this format."""
    record, data = read_tensors(directory / WEIGHTS, directory / RECORD, "next-use network")
    try:
        network = NextUseNet(NextUseShape.from_dict(record["shape"]))
        network.load_state_dict(load(data))
        if not all(t.isfinite().all() for t in network.state_dict().values()):
            raise ValueError("it holds numbers that are not finite")
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds a next-use network that cannot be used: {error}") from error
    return network.eval().requires_grad_(False)

"""Training with Lightning: the schedule, keeping the best weights as safetensors, and ScoutGate's loss."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from safetensors.torch import save
from torch import Tensor

from edgemoe.durable import replace_file
from edgemoe.experts.predict.scoutgate_model import ScoutGate, ScoutGateShape, cardinality
from scoutgate.data import Inputs, k_hot


class NetworkShape(Protocol):
    """The sizes of a network, as its export records them."""

    def as_dict(self) -> dict[str, Any]: ...


class TrainedNetwork(Protocol):
    """A network whose best weights are kept."""

    @property
    def shape(self) -> NetworkShape: ...
    def state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Recipe:
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    cardinality: float = 0.05  # weight of the regulariser
    drop_tokens: float = 0.05  # window tokens hidden at random while training, so that no one token is all


class Scheduled(L.LightningModule):
    """AdamW with a rate that falls to zero over `max_steps` or `max_s` seconds, whichever is over first."""

    recipe: Recipe
    max_steps: int
    max_s: float
    _began = 0.0

    def on_fit_start(self) -> None:
        self._began = time.monotonic()

    def progress(self) -> float:
        """Returns the share of the run that is over, by steps or by time; the larger one counts."""
        by_time = (time.monotonic() - self._began) / self.max_s if self.max_s else 0.0
        return min(1.0, max(self.global_step / max(self.max_steps, 1), by_time))

    def configure_optimizers(self) -> Any:  # a dict, which Lightning names in a type of its own
        matrices = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": self.recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.recipe.lr, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.recipe.warmup_steps)
        return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress())))


class ScoutGateModule(Scheduled):
    def __init__(self, shape: ScoutGateShape, recipe: Recipe, embedding: Tensor, max_steps: int, max_s: float) -> None:
        """Takes the main model's frozen `embedding` [V, d_emb]."""
        super().__init__()
        self.gate, self.recipe = ScoutGate(shape), recipe
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.embedding: Tensor
        self.max_steps, self.max_s = max_steps, max_s

    def forward(self, inputs: Inputs) -> Tensor:
        """Computes logits [B, horizons, sum E_l] of all experts."""
        present = inputs.tokens >= 0
        projected = self.gate.project(self.embedding[inputs.tokens.clamp_min(0)])
        if self.training and self.recipe.drop_tokens:
            kept = torch.rand_like(present[:, :-1], dtype=torch.float32) >= self.recipe.drop_tokens
            present = torch.cat([present[:, :-1] & kept, present[:, -1:]], 1)
        logits: Tensor = self.gate(projected, present, inputs.previous, inputs.state)
        return logits.view(len(inputs.tokens), self.gate.shape.horizons, -1)

    def losses(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Returns binary cross entropy per expert (nats), and the cardinality term."""
        shape, logits = self.gate.shape, self(inputs)
        each = torch.nn.functional.binary_cross_entropy_with_logits(logits, k_hot(inputs, shape), reduction="none")
        known = inputs.known.float()
        entropy = (each.mean(-1) * known).sum() / known.sum().clamp_min(1)
        return entropy, cardinality(logits.flatten(1), shape)

    def training_step(self, inputs: Inputs, _: int) -> Tensor:
        entropy, spread = self.losses(inputs)
        scale = self.gate.shape.total / (self.gate.shape.layers * self.gate.shape.top_k)  # per chosen expert
        loss = entropy * scale + self.recipe.cardinality * spread
        self.log_dict({"train_log_loss": entropy, "train_cardinality": spread}, prog_bar=True)
        return loss

    def validation_step(self, inputs: Inputs, _: int) -> None:
        entropy, spread = self.losses(inputs)
        self.log_dict({"log_loss": entropy, "cardinality": spread}, prog_bar=True, batch_size=len(inputs.tokens))


class KeepBest(L.Callback):
    """Writes the weights of the best validation so far as safetensors, which is all that export and evaluate read."""

    def __init__(self, directory: Path, network: TrainedNetwork, describe: Callable[[], dict[str, object]]) -> None:
        self.directory, self.network, self.describe, self.best = directory, network, describe, math.inf

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        loss = float(trainer.callback_metrics["log_loss"])
        if trainer.sanity_checking or not loss < self.best:  # nor where it is no number
            return
        self.best = loss
        weights = {name: value.detach().cpu().contiguous() for name, value in self.network.state_dict().items()}
        replace_file(self.directory / "best.safetensors", save(weights), 0o644)
        record = {"shape": self.network.shape.as_dict(), "step": trainer.global_step, "log_loss": loss}
        text = json.dumps({**record, **self.describe()}, indent=1) + "\n"
        replace_file(self.directory / "best.json", text.encode(), 0o644)

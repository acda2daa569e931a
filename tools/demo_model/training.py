"""The training loop: AdamW, a constant rate and then a decay to zero; resumable; bounded by steps or minutes.

A run bounded by minutes fixes its number of steps only when the decay must begin. Running that number of steps again
gives the same model. At the end half of the text is questions and answers to be memorised.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.demo_model.demo_network import HeadLoss, Network
from tools.demo_model.tokens import Domain

STEP_TOKENS = 4096
DECAY = 0.75  # share of the steps before the rate falls
ROW_TOKENS = ((0.0, 256), (DECAY, 1024), (0.93, 2048))  # from which share of the steps on
WEIGHTS = {
    "code": 0.15, "docs": 0.12, "manual": 0.10, "de": 0.05, "fr": 0.05, "es": 0.05, "it": 0.05, "ru": 0.05,
    "arithmetic": 0.06, "chat": 0.32, "drill": 0.0,
}  # fmt: skip
FINISH_WEIGHTS = {
    "code": 0.08, "docs": 0.06, "manual": 0.05, "de": 0.02, "fr": 0.02, "es": 0.02, "it": 0.02, "ru": 0.02,
    "arithmetic": 0.03, "chat": 0.20, "drill": 0.48,
}  # fmt: skip
FINISH_ROW_TOKENS = 256


@dataclass(frozen=True)
class Recipe:
    seed: int = 20
    peak_lr: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    balance: float = 0.004
    clip: float = 1.0
    finish_steps: int = 250
    finish_lr: float = 2e-3


class Trainer:
    def __init__(self, network: Network, domains: dict[str, Domain], recipe: Recipe, directory: Path) -> None:
        self.network, self.domains, self.recipe, self.directory = network, domains, recipe, directory
        self.step, self.seconds, self.steps = 0, 0.0, 0  # steps before the finish; 0: not yet decided
        self.history: list[dict[str, float]] = []
        matrices = [p for p in network.parameters() if p.dim() > 1]
        rest = [p for p in network.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=recipe.betas, fused=True)

    def run(self, steps: int, minutes: float, save_every_s: float = 120.0) -> None:
        """Trains until `steps` are done, or for about `minutes` in all if steps is 0."""
        self.steps = self.steps or steps
        began = saved = time.monotonic() - self.seconds
        while not self.steps or self.step < self.steps + self.recipe.finish_steps:
            loss, balance = self._step()
            self.seconds = time.monotonic() - began
            if not self.steps and self.seconds >= DECAY * 0.9 * minutes * 60:  # long rows take longer
                self.steps = math.ceil(self.step / DECAY)
            if self.step % 20 == 0:
                self._log(loss, balance)
            if time.monotonic() - saved > save_every_s:
                self.save()
                saved = time.monotonic()
        self.save()

    def progress(self) -> float:
        return self.step / self.steps if self.steps else 0.0

    def _finishing(self) -> bool:
        return bool(self.steps) and self.step >= self.steps

    def _step(self) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        rows = self._rows()
        self.network.train()
        hidden, balance = self.network(rows[:, :-1])
        width = hidden.shape[-1]
        loss = HeadLoss.apply(hidden.reshape(-1, width), self.network.embed_tokens.weight, rows[:, 1:].reshape(-1))
        loss = loss / rows[:, 1:].numel()
        (loss + self.recipe.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach()), float(balance.detach())

    def _rate(self) -> float:
        if self._finishing():
            done = (self.step - self.steps) / self.recipe.finish_steps
            return self.recipe.finish_lr * min(10 * done, 1 - done)
        warm = min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        decay = min(1.0, (1 - self.progress()) / (1 - DECAY)) if self.steps else 1.0
        return self.recipe.peak_lr * warm * decay

    def _rows(self) -> Tensor:
        """Returns this step's rows [B, T + 1], a function of seed and step; domains have the shares of their
        weights.
        """
        rng = np.random.default_rng((self.recipe.seed, self.step))
        length = [tokens for share, tokens in ROW_TOKENS if self.progress() >= share][-1]
        weights = WEIGHTS
        if self._finishing():
            length, weights = FINISH_ROW_TOKENS, FINISH_WEIGHTS
        count = STEP_TOKENS // length
        edges = np.cumsum([weights[d] for d in self.domains])
        points = (np.arange(count) + rng.random()) / count * edges[-1]
        names = list(self.domains)
        rows = [self.domains[names[i]].row(rng, length) for i in np.searchsorted(edges, points)]
        return torch.from_numpy(np.stack(rows))

    def _log(self, loss: float, balance: float) -> None:
        entry = {
            "step": self.step,
            "loss": round(loss, 4),
            "balance": round(balance, 4),
            "seconds": round(self.seconds),
        }
        self.history.append(entry)
        speed = self.step * STEP_TOKENS / max(self.seconds, 1)
        print(f"{entry} of {self.steps or '?'} steps, {speed:.0f} tokens/s", flush=True)

    # --- checkpoints: safetensors and JSON, so that nothing here unpickles ---

    def save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, p in self.network.named_parameters():
            tensors[name] = p.detach()
            for key, value in self.optimizer.state[p].items():
                tensors[f"{name}:{key}"] = value
        tensors.update({f"buffer:{n}": b for n, b in self.network.named_buffers()})
        save_file(tensors, self.directory / "state.tmp")
        (self.directory / "state.tmp").rename(self.directory / "state.safetensors")
        state = {k: getattr(self, k) for k in ("step", "seconds", "steps", "history")}
        (self.directory / "state.json").write_text(json.dumps(state))

    def resume(self) -> None:
        """Continues from the last checkpoint, if there is one."""
        if not (self.directory / "state.json").exists():
            return
        tensors = load_file(self.directory / "state.safetensors")
        state: dict[str, Any] = json.loads((self.directory / "state.json").read_text())
        for key, value in state.items():
            setattr(self, key, value)
        with torch.no_grad():
            for name, p in self.network.named_parameters():
                p.copy_(tensors[name])
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    self.optimizer.state[p][key] = tensors[f"{name}:{key}"].clone()
            for name, buffer in self.network.named_buffers():
                buffer.copy_(tensors[f"buffer:{name}"])

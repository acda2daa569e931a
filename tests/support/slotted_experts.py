"""A tiny model's experts, some in the slots of a slab and all in RAM, as with a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from edgemoe.experts.compute.cuda import RamExperts, ReachableExperts
from edgemoe.experts.compute.cuda_link import PinnedSlab, SlotOrder
from edgemoe.experts.tiers.residency_records import NONE
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.model.graphed import GraphedDecoder
from edgemoe.model.kv import KVCache
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout
from edgemoe.types.step import Batch, ExpertExecutor
from support.fake_gpu import no_order
from support.tiny_models import ResidentExperts, Tiny


class SlottedExperts(ResidentExperts):
    """The same experts in a slab and in RAM, in slots of no particular order; counts the steps that are told of."""

    def __init__(self, tiny: Tiny, device: str = "cpu") -> None:
        super().__init__(tiny.store, tiny.spec.feed_forward.activation)
        geometry = tiny.spec.geometry
        layout = SlabLayout.within(geometry.all_bytes, geometry)
        assert layout is not None
        self._layout, self._random = layout, np.random.default_rng(0)
        self._slab, self._ram = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device), HostSlab(layout)
        count = geometry.layers * geometry.experts
        self.where, self._in_ram = (self._random.permutation(count).reshape(geometry.layers, -1) for _ in range(2))
        for layer, file in enumerate(sorted((tiny.store / "experts").iterdir())):
            parts = load_file(file)
            for expert in range(geometry.experts):
                packed = expert_bytes(parts, expert, geometry).numpy()
                self._ram.slot(int(self._in_ram[layer, expert]))[: len(packed)] = packed
        if device == "cuda":
            self._pinning = PinnedSlab(self._ram, self._slab.device)
        order: Any = SlotOrder(layout.count) if device == "cuda" else no_order()
        self.slots = ReachableExperts(  # type: ignore[assignment]
            self._slab, layout, geometry, self.where, order, RamExperts(self._ram, self._in_ram)
        )
        self.told: list[tuple[torch.Tensor, int]] = []
        self.scatter(1.0)

    def scatter(self, share: float) -> None:
        """Puts a random share of the experts into random slots of the slab, and NaN everywhere else."""
        slab = torch.full(self._slab.shape, 255, dtype=torch.uint8)
        self.where[:] = self._random.permutation(self.where.size).reshape(self.where.shape)
        self.where[self._random.random(self.where.shape) >= share] = NONE
        for layer, expert in np.argwhere(self.where >= 0).tolist():
            start, size_bytes = self._layout.place(int(self.where[layer, expert]))
            slab[start : start + size_bytes] = torch.from_numpy(self._ram.slot(int(self._in_ram[layer, expert])))
        self._slab.copy_(slab)

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(layer, hidden.cpu(), ids.cpu(), weights.float().cpu()).to(hidden.device)

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        self.told.append((ids.clone(), served))


class EachTwice:
    """Computes each step of few rows twice: with all experts in the slab, and with some read from RAM."""

    def __init__(self, decoder: GraphedDecoder, experts: SlottedExperts) -> None:
        self._decoder, self._experts, self.equal = decoder, experts, True

    def forward(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor | None:
        self._experts.scatter(1.0)
        resident = self._decoder.forward(batch, kv, experts)
        assert resident is not None
        resident = resident.clone()
        self._experts.scatter(0.4)
        partly = self._decoder.forward(batch, kv, experts)
        assert self._experts.slots.outside.any(), "nothing was read from RAM"  # type: ignore[attr-defined]
        self.equal &= partly is not None and torch.equal(resident, partly)
        return partly


def expert_bytes(parts: dict[str, torch.Tensor], expert: int, geometry: ExpertGeometry) -> torch.Tensor:
    """Returns an expert's bytes as in a slot."""
    named = [f"experts.{expert}.{part}" for part in ("gate_up_proj", "up_proj", "down_proj", "biases")]
    return torch.cat([parts[name].contiguous().view(torch.uint8).flatten() for name in named if name in parts])

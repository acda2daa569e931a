"""A tiny model's experts in the slots of a slab, as a GPU has them."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from edgemoe.experts.compute.cuda import ResidentSlots
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout
from support.tiny_models import ResidentExperts, Tiny


class SlottedExperts(ResidentExperts):
    """The same experts in a slab, in slots of no particular order; counts the steps that are told of."""

    def __init__(self, tiny: Tiny, device: str = "cpu") -> None:
        super().__init__(tiny.store, tiny.spec.feed_forward.activation)
        geometry = tiny.spec.geometry
        layout = SlabLayout.within(geometry.all_bytes, geometry)
        assert layout is not None
        slab = torch.full((layout.size_bytes,), 255, dtype=torch.uint8)  # NaN wherever nobody calls
        self.where = torch.randperm(geometry.layers * geometry.experts).view(geometry.layers, -1).numpy()
        for layer, file in enumerate(sorted((tiny.store / "experts").iterdir())):
            parts = load_file(file)
            for expert in range(geometry.experts):
                start, _ = layout.place(int(self.where[layer, expert]))
                packed = expert_bytes(parts, expert, geometry)
                slab[start : start + len(packed)] = packed
        self.slots = ResidentSlots(slab.to(device), layout, geometry, self.where, lambda: None)  # type: ignore[assignment]
        self.told: list[tuple[torch.Tensor, int]] = []

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(layer, hidden.cpu(), ids.cpu(), weights.float().cpu()).to(hidden.device)

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        self.told.append((ids.clone(), served))


def expert_bytes(parts: dict[str, torch.Tensor], expert: int, geometry: ExpertGeometry) -> torch.Tensor:
    """Returns an expert's bytes as in a slot."""
    named = [f"experts.{expert}.{part}" for part in ("gate_up_proj", "down_proj", "biases")]
    return torch.cat([parts[name].contiguous().view(torch.uint8).flatten() for name in named if name in parts])

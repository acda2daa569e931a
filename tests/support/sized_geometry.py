"""A model whose layers have experts of any size, whatever encoding would make them so."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.types.experts import ExpertGeometry


@dataclass(frozen=True)
class SizedGeometry(ExpertGeometry):
    """States the bytes of one expert of each layer, without padding; () leaves them as they are."""

    layer_bytes: tuple[int, ...] = ()

    def expert_bytes(self, layer: int) -> int:
        return self.layer_bytes[layer] if self.layer_bytes else super().expert_bytes(layer)

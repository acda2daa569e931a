"""Says how experts lie in a slot and what they compute, as records of kernels want it."""

from __future__ import annotations

from typing import Any, NamedTuple

from edgemoe.kernels.cpu.vector import ACTIVATIONS
from edgemoe.types.encoding import Encoding
from edgemoe.types.experts import SILU, Activation, ExpertGeometry


class ExpertLayout(NamedTuple):
    """Describes experts: gate and up rows [2 * width, hidden], then down rows [hidden, width], then biases."""

    hidden: int
    width: int
    encoding: Encoding
    activation: Activation = SILU
    biases: bool = False  # float32 [2 * width], then [hidden]

    @classmethod
    def of(cls, geometry: ExpertGeometry, layer: int) -> ExpertLayout:
        """Returns the layout of one layer's experts."""
        sizes, encoding = (geometry.hidden, geometry.width), geometry.encoding(layer)
        return cls(*sizes, encoding, geometry.activation, geometry.biases)

    def fill(self, record: Any) -> None:
        """Writes a record's fields of `experts_decode.LAYOUT`."""
        line, down_line = self.encoding.row_bytes(self.hidden), self.encoding.row_bytes(self.width)
        record["hidden"], record["width"], record["line"], record["down_line"] = (
            self.hidden,
            self.width,
            line,
            down_line,
        )
        record["bias"] = 2 * self.width * line + self.hidden * down_line if self.biases else 0
        record["activation"] = ACTIVATIONS.index(self.activation.kind)
        record["alpha"], record["limit"] = self.activation.alpha, self.activation.limit

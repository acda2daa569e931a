"""A second embedding of tokens, of which each layer adds its own part (Gemma 4's per-layer embeddings)."""

from __future__ import annotations

import torch

from edgemoe.encodings.codec import unpack
from edgemoe.families.spec import LayerInputs, ModelSpec
from edgemoe.kernels.cpu.expert_math import activated
from edgemoe.model.dense_weights import LayerReader, WeightReader
from edgemoe.model.kv import DTYPES
from edgemoe.types.encoding import BFLOAT16, ENCODINGS, FLOAT32
from edgemoe.types.step import RowSource


class TokenInputs:
    """Computes the inputs of all layers: rows of the table, and a projection of the tokens' embedding."""

    def __init__(self, spec: ModelSpec, inputs: LayerInputs, reader: WeightReader, table: RowSource) -> None:
        """Reads the weights of the projection; `table` has a row for each token. Raises StoreError."""
        self._projection = reader.matrix("model.per_layer_model_projection.weight")
        self._norm = reader.norm("model.per_layer_projection_norm.weight")
        self._layers, self._width, self._factor = spec.layers, inputs.width, inputs.factor
        self._scale, self._dtype = spec.hidden**-0.5, DTYPES[spec.dtype]
        self._table, self._columns = table, spec.layers * inputs.width
        known = (ENCODINGS[spec.dense_encoding or spec.dtype], FLOAT32, BFLOAT16)
        self._encoding = next(each for each in known if each.row_bytes(self._columns) == table.row_bytes)

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Returns the layers' inputs, [T, L, width] float32, of tokens with this embedding, [T, H] float32.

        Raises CorruptRow, StoreError.
        """
        shape = len(tokens), self._layers, self._width
        projected = self._projection(embedded.to(self._dtype)).float().mul_(self._scale)
        rows = torch.from_numpy(unpack(self._table.take_rows(tokens.cpu().numpy()), self._encoding, self._columns))
        own = rows.to(embedded.device).view(shape) * self._factor
        return (self._norm(projected.view(shape)) + own) * 2**-0.5


class InputGate:
    """Adds a layer's input to the residual, weighted by a gate that reads the residual."""

    def __init__(self, reader: LayerReader) -> None:
        self.layer, self.activation = reader.number, reader.spec.feed_forward.activation
        self.gate = reader.matrix("per_layer_input_gate.weight")  # [width, H]
        self.out = reader.matrix("per_layer_projection.weight")  # [H, width]
        self.norm, self._dtype = reader.norm("post_per_layer_input_norm.weight"), DTYPES[reader.spec.dtype]

    def __call__(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the addition to `residual` [T, H] by the layers' `inputs` [T, L, width], all float32."""
        own = inputs[:, self.layer].to(self._dtype)
        hidden = activated(self.activation, self.gate(residual.to(self._dtype)), own)
        return self.norm(self.out(hidden).float())

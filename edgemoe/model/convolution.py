"""Computes short convolutions over sequences whose last inputs lie in states: the mechanism "conv" [LFM2].

The output is x C * conv(x B * x x'), with B, C and x' projections of x: two gates around the convolution.
"""

from __future__ import annotations

import torch

from edgemoe.families.state_mechanisms import ConvHeads
from edgemoe.model.attention import StepContext
from edgemoe.model.dense_weights import LayerReader, read_taps
from edgemoe.model.kv import convolve


class ShortConvolution:
    """One layer's short convolution."""

    def __init__(self, reader: LayerReader) -> None:
        heads = reader.attention.heads
        assert isinstance(heads, ConvHeads)
        self.number = reader.spec.state_layers.index(reader.number)
        self.project, self.out = reader.matrix("conv.in_proj.weight"), reader.matrix("conv.out_proj.weight")
        self.taps = read_taps(reader, "conv.conv1d.weight")
        self.project_bias = self.bias = self.out_bias = None
        if heads.biases:
            self.project_bias, self.out_bias = reader.read("conv.in_proj.bias"), reader.read("conv.out_proj.bias")
            self.bias = reader.read("conv.conv1d.bias", dtype=torch.float32)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype, and writes the states."""
        assert step.kv.states is not None
        before, after, values = self.project(x, self.project_bias).chunk(3, dim=1)
        mixed = convolve((before * values).float(), self.taps, step.states, step.kv.states.layer(self.number))
        if self.bias is not None:
            mixed = mixed + self.bias
        return self.out(after * mixed.to(x.dtype), self.out_bias)

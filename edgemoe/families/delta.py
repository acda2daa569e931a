"""The sizes of a gated delta net layer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

STATE_BYTES = 4  # of a number in a state: float32 whatever the model's dtype, because errors add up over a sequence


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """States the sizes of a gated delta net. Each key head serves `value_heads / key_heads` value heads in a row."""

    key_heads: int
    value_heads: int
    key_dim: int  # of one head
    value_dim: int
    taps: int  # tokens that the convolution sees, the current one among them

    @property
    def keys(self) -> int:
        """Returns the width of all queries, or of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Returns the width of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Returns the width of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def rows(self) -> int:
        """Returns the rows of the input projection: queries, keys, values, output gate, beta, decay."""
        return self.channels + self.values + 2 * self.value_heads

    @property
    def state_floats(self) -> int:
        """Returns the numbers in one layer's state: the convolution's tail, and a matrix for each value head."""
        return (self.taps - 1) * self.channels + self.value_heads * self.key_dim * self.value_dim

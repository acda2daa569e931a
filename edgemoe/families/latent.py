"""The sizes of multi-head latent attention [DeepSeek-V2, 2.1]."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One layer's sizes. A token's key and value, of all heads, are made of `rank` numbers and `rope` turned ones."""

    heads: int
    query_rank: int  # 0: queries are made of the hidden state at once
    rank: int
    plain: int  # of a head's key, what rotary embedding leaves alone
    rope: int  # of a head's key, what it turns: the same for all heads
    value: int
    scale: float

    @property
    def key(self) -> int:
        """The width of a head's key."""
        return self.plain + self.rope

    @property
    def stored(self) -> int:
        """What is kept of a token."""
        return self.rank + self.rope

"""What a file of the store is made of: bytes of a checkpoint, copied or encoded. Sizes are known beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgemoe.families.recipe import SourceRows
from edgemoe.store.checkpoint import Tensor
from edgemoe.store.sources import Source, Transform, transforms
from edgemoe.types.encoding import Encoding


@dataclass(frozen=True, slots=True)
class Copy:
    """Consecutive bytes of a source tensor."""

    tensor: Tensor
    offset: int  # in the tensor
    bytes: int


Piece = Copy | Transform


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of a file of the store that have one checksum; `padding` zeros follow."""

    pieces: tuple[Piece, ...]
    padding: int = 0

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that it is made of, some of them several times."""
        for piece in self.pieces:
            if isinstance(piece, Copy):
                yield piece.tensor
                continue
            yield piece.source.codes
            if piece.source.scales is not None:
                yield piece.source.scales


def pieces_of(source: Source, take: SourceRows, encoding: Encoding) -> tuple[Piece, ...]:
    """Returns the pieces that hold these rows in an encoding: a copy where they lie so already."""
    whole = take.rows is None and not take.transposed
    if whole and source.plain and source.kept_as == encoding.name:
        count = 1
        for length in source.shape[: len(take.index)]:
            count *= length
        size = source.codes.bytes // count
        return (Copy(source.codes, source.number(take.index) * size, size),)
    return transforms(source, take, encoding)

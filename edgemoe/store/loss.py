"""Measures the loss of weights that are re-encoded because no encoding holds them, by one expert of each type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgemoe.encodings.codec import unpack
from edgemoe.store.layout import FilePlan
from edgemoe.store.sources import EncodedRows
from edgemoe.store.writer import CheckpointReader


def reencoding_losses(layers: Sequence[FilePlan]) -> Iterator[str]:
    """Yields a line for each re-encoded type: the root mean square error, relative to that of the weights."""
    samples: dict[tuple[str, str], EncodedRows] = {}
    for layer in layers:
        for piece in layer.runs[0].pieces:
            if not isinstance(piece, EncodedRows) or not piece.source.is_approximated or not _is_here(piece):
                continue
            if piece.encoding.group and not piece.source.keeps(piece.encoding):
                samples.setdefault((piece.source.kind, piece.encoding.name), piece)
    with CheckpointReader() as reader:
        for (kind, encoding), piece in samples.items():
            wanted = piece.values(reader.stretch)
            rows = piece.run(reader.stretch).reshape(len(wanted), -1)
            off = unpack(rows, piece.encoding, wanted.shape[1]) - wanted
            size = float(np.sqrt(np.square(wanted, dtype=np.float64).mean()))
            share = float(np.sqrt(np.square(off, dtype=np.float64).mean())) / size if size else 0.0
            yield f"experts in {kind} are re-encoded in {encoding}; the RMS error is {100 * share:.2g} % of the weights"


def _is_here(piece: EncodedRows) -> bool:
    """Returns whether the files are there, which are deleted where shards are packed as they arrive."""
    return all(tensor.file.is_file() for tensor in piece.source.tensors)

"""Tells the kernel for whole steps where all experts of a model lie in the CPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.kernels.cpu.encoded.layout import ExpertLayout
from edgemoe.kernels.cpu.experts_decode import EXPERTS, scratch_floats
from edgemoe.kernels.cpu.runtime import IntArray, Kernels
from edgemoe.kernels.cpu.steps.decode_step import PLACES


class LayerPlaces(NamedTuple):
    """Says where the experts of one layer lie, and from how many tokens each another kernel is faster."""

    layout: ExpertLayout
    slab: int  # address of slot `first`
    stride_bytes: int
    first: int  # slot
    most_tokens: float


class ExpertTable:
    """Holds the records of all layers. For the thread that runs the kernels."""

    def __init__(self, kernels: Kernels, layers: Sequence[LayerPlaces], where: IntArray) -> None:
        """`where` [L, E] is the slot of each expert; it is read at each step, and stays as long as this."""
        self._kernels, self._where = kernels, where
        self._shapes = {(layer.layout.hidden, layer.layout.width) for layer in layers}
        self._jobs, self._places = np.zeros(len(layers), EXPERTS), np.zeros(len(layers), PLACES)
        for number, layer in enumerate(layers):
            self._fill(self._jobs[number : number + 1], self._places[number : number + 1], number, layer)

    def _fill(self, job: npt.NDArray[np.void], place: npt.NDArray[np.void], number: int, layer: LayerPlaces) -> None:
        rows = self._kernels.row_code(layer.layout.encoding)
        layer.layout.fill(job)
        job["slab"], job["stride"], job["x_bf16"] = layer.slab, layer.stride_bytes, self._kernels.bf16
        job["multiply"], job["pack"] = rows.rows.address, rows.pack.address
        job["iota"], job["threads"] = self._kernels.iota, self._kernels.pool.threads
        place["job"], place["where"], place["first"] = job.ctypes.data, self._where[number].ctypes.data, layer.first
        place["most"] = layer.most_tokens

    def address(self, tokens: int, pairs: int) -> int:
        """Returns the address of the PLACES records [L], for a step of so many tokens and calls of experts."""
        sizes = [scratch_floats(*shape, tokens, pairs, pairs) for shape in self._shapes]
        for name in sizes[0]:
            self._jobs[name] = self._kernels.scratch(f"table.{name}", max(size[name] for size in sizes))
        return int(self._places.ctypes.data)

"""Computes this box's experts on the hidden states of peers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.experts.compute.moe import TieredExperts
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.peers import ExpertWork
from edgemoe.types.step import TokenGroups


class PeerCompute:
    """Computes experts for peers, on the thread that serves them. Their demands change no policy."""

    def __init__(self, experts: TieredExperts, on_disk: BoolArray) -> None:
        """Uses the `experts` of the calling thread. `on_disk` [L, E] marks the experts that the store can read."""
        self._experts, self._on_disk = experts, on_disk
        self._residency, self._geometry = experts.residency, experts.geometry
        self.experts = 0  # of layer-steps, computed for peers
        self._dtype = torch.bfloat16 if self._geometry.bf16 else torch.float32
        self._threads: int | None = torch.get_num_threads()  # OpenMP keeps this by thread

    def refuses(self, work: ExpertWork) -> str:
        """Returns why the work cannot be done here, or ""."""
        if len(work.rows) > self._geometry.top_k and np.bincount(work.rows).max() > self._geometry.top_k:
            return f"a row with more calls than the {self._geometry.top_k} that a token has"
        absent = self._residency.missing_from_ram(work.layer, work.experts) & ~self._on_disk[work.layer, work.experts]
        if absent.any():
            return f"expert {int(work.experts[absent][0])} of layer {work.layer} is not here"
        return ""

    @torch.inference_mode()
    def compute(self, works: Sequence[ExpertWork]) -> Sequence[memoryview]:
        """Returns the result of each work; all are of one layer. Raises StoreError."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None
        first = list(itertools.accumulate((len(work.hidden) for work in works), initial=0))
        group = _merge(works, first, self._geometry.top_k)
        hidden = self._hidden(np.concatenate([work.hidden for work in works]))
        rows = self._bytes(self._experts.compute(works[0].layer, hidden, group))
        self.experts += len(group.experts)
        return [rows[a:b].data.cast("B") for a, b in itertools.pairwise(first)]

    @torch.inference_mode()
    def compute_at_once(self, work: ExpertWork) -> memoryview | None:
        """Returns the work's result if all its experts are in the top tier, else None. Never runs beside `compute`."""
        group = _merge([work], [0], self._geometry.top_k)
        sums = self._experts.compute_if_there(work.layer, self._hidden(work.hidden.copy()), group)
        if sums is None:
            return None
        self.experts += len(group.experts)
        return self._bytes(sums).data.cast("B")

    def _hidden(self, rows: npt.NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(rows).view(self._dtype)  # [R, H]

    def _bytes(self, sums: torch.Tensor) -> npt.NDArray[np.uint8]:
        rows: npt.NDArray[np.uint8] = sums.to("cpu", self._dtype).contiguous().view(torch.uint8).numpy()
        return rows


def _merge(works: Sequence[ExpertWork], first: Sequence[int], k: int) -> TokenGroups:
    """Returns the calls of all works as one group; the rows of work i begin at `first[i]`."""
    if len(works) == 1:
        (work,) = works
        return TokenGroups(work.experts, work.offsets, _places(work.rows, k), work.rows, work.weights)
    experts = np.concatenate([np.repeat(work.experts, np.diff(work.offsets)) for work in works])
    rows = np.concatenate([work.rows + start for work, start in zip(works, first, strict=False)])
    weights = np.concatenate([work.weights for work in works])
    order = np.argsort(experts, kind="stable")
    experts, rows, weights = experts[order], rows[order], weights[order]
    starts = np.flatnonzero(np.concatenate(([True], experts[1:] != experts[:-1])))
    offsets = np.concatenate((starts, [len(experts)]))
    return TokenGroups(experts[starts], offsets, _places(rows, k), rows, weights)


def _places(rows: IntArray, k: int) -> IntArray:
    """Returns a distinct place for each call, row * k + j."""
    if rows.max() == 0:
        return np.arange(len(rows))
    order, counts = np.argsort(rows, kind="stable"), np.bincount(rows)
    within = np.empty_like(rows)
    within[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows * k + within

"""Training data of the next-use network: routing traces as `edgemoe replay` reads them, in the order of a replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tools.research.cache.next_use.model import DECAY, PAST, NextUseShape

NEVER = 40  # tokens; later needs count as none
RATES = (0.25, 0.05, 0.01)  # of the EWMAs; as in edgemoe.experts.predict.online_mlp, whose features these are
RECALL_DECAY, RECALL_HORIZON = 0.8, 24  # of edgemoe.experts.predict.routing_memory
WINDOW = 4096  # tokens that a batch lies among
MEMORY = 1200  # of them that a batch recalls
QUERIES = 96
VALIDATION = 0.12  # share of the tokens, the last ones


@dataclass(frozen=True)
class NextUseBatch:
    """A window of W tokens: B of them forecast after one number of layers and recall M others."""

    look: int
    hot: Tensor  # [W, L * E] k-hot
    place: Tensor  # [W] position in the request
    asking: Tensor  # [B] rows of the window
    memory: Tensor  # [M] rows of the window
    hidden: Tensor  # [B, M] true where a query must not see a memory
    soon: Tensor  # [2, M, L * E] worth of the next need in the same request, from a token and after it
    own: Tensor  # [2, B, L * E, 6] before and after the token
    target: Tensor  # [2, B, L * E]

    def to(self, device: torch.device) -> NextUseBatch:
        return NextUseBatch(self.look, *(getattr(self, name).to(device) for name in list(self.__annotations__)[1:]))


class Routing:
    """The tokens of a trace, end to end: experts [N, L, k], and the request that each belongs to."""

    def __init__(self, requests: Sequence[npt.NDArray[np.integer]], shape: NextUseShape) -> None:
        self.shape = shape
        ids = np.concatenate(requests).astype(np.int64)
        flat = (ids + np.arange(shape.layers)[:, None] * shape.experts).reshape(len(ids), -1)
        self.count = len(ids)
        self.hot = np.zeros((self.count, shape.total), np.uint8)
        np.put_along_axis(self.hot, flat, 1, axis=1)
        self.request = np.repeat(np.arange(len(requests)), [len(r) for r in requests])
        starts = np.cumsum([0, *(len(r) for r in requests)])[:-1]
        self.place = np.arange(self.count) - starts[self.request]
        self.until = _until(flat, np.zeros(self.count, np.int64), shape.total)  # [N + 1, L * E] tokens, in any request
        self.until_own = _until(flat, self.request, shape.total)  # in the same request
        self.own = _own(flat, shape)  # [N + 1, L * E, 6] before each token
        self.utility = np.append(DECAY ** np.arange(NEVER), 0).astype(np.float32)
        recalled = np.where(np.arange(NEVER) < RECALL_HORIZON, RECALL_DECAY ** np.arange(NEVER), 0)
        self.recalled = np.append(recalled, 0).astype(np.float32)

    def batch(self, look: int, low: int, asking: npt.NDArray[np.int64], memory: npt.NDArray[np.int64]) -> NextUseBatch:
        """Builds a batch of tokens by number, all in the window of WINDOW tokens from `low`; memory sorted."""
        high = min(self.count, low + WINDOW)
        same = self.request[asking][:, None] == self.request[memory][None]
        hidden = (same & (memory[None] > asking[:, None] - PAST - 1)) | (self.place[memory] == 0)[None]
        follows = (self.request[np.minimum(memory + 1, self.count - 1)] == self.request[memory])[:, None]
        soon = np.stack([self.recalled[self.until_own[memory]], self.recalled[self.until_own[memory + 1]] * follows])
        own = np.stack([self.own[asking], self.own[asking + 1]]).astype(np.float32)
        target = self.utility[np.stack([self.until[asking], self.until[asking + 1]])]
        hot, place = self.hot[low:high].astype(np.float32), self.place[low:high]
        arrays: tuple[npt.NDArray[Any], ...] = (hot, place, asking - low, memory - low, hidden, soon, own, target)
        return NextUseBatch(look, *(torch.from_numpy(array) for array in arrays))


def _until(flat: npt.NDArray[np.int64], request: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.uint8]:
    """Returns tokens from each one until an expert's next need, 0 for its own, NEVER if there is none."""
    out = np.full((len(flat) + 1, total), NEVER, np.uint8)
    for t in range(len(flat) - 1, -1, -1):
        if t + 1 < len(flat) and request[t + 1] == request[t]:
            np.minimum(out[t + 1] + 1, NEVER, out=out[t])
        out[t, flat[t]] = 0
    return out


def _own(flat: npt.NDArray[np.int64], shape: NextUseShape) -> npt.NDArray[np.float16]:
    """Returns each expert's own history before each token and after the last."""
    count, start, floor = len(flat), shape.top_k / shape.experts, 3e-3
    out = np.empty((count + 1, shape.total, 6), np.float16)
    rates = np.full((3, shape.total), start, np.float32)
    last, popular = np.full(shape.total, -1000), np.full(shape.total, 4 * start)
    steps = np.array(RATES, np.float32)[:, None]
    for t in range(count + 1):
        out[t, :, :3] = (0.5 * np.log((rates + floor) / (1 + floor - rates))).T
        out[t, :, 3] = 0.33 * np.log(1.0 + (t - 1 - last)) - 0.6
        out[t, :, 4] = last == t - 1
        share = popular / (t + 4)
        out[t, :, 5] = 0.5 * np.log((share + floor) / (1 + floor - share))
        if t < count:
            rates *= 1 - steps
            rates[:, flat[t]] += steps
            last[flat[t]] = t
            popular[flat[t]] += 1
    return out


class Glances(torch.utils.data.IterableDataset[NextUseBatch]):
    """Batches at random places of the training part, new ones every epoch; or a fixed few of the validation part.

    In training a query may recall any request but its own future; in validation only the past.
    """

    def __init__(self, routing: Routing, *, seed: int | None, batches: int) -> None:
        self.routing, self.seed, self.count = routing, seed, batches
        self.split = int(routing.count * (1 - VALIDATION))
        if self.split < QUERIES + 2 * NEVER or routing.count - NEVER - self.split < batches:
            raise ValueError(f"{routing.count} tokens are too few to train a next-use network")
        self.epoch = 0

    def __iter__(self) -> Iterator[NextUseBatch]:
        rng = np.random.default_rng((self.seed or 0, self.epoch))
        looks = self.routing.shape.looks + 1
        for number in range(self.count):
            if self.seed is None:
                yield self._later(number % looks, number, rng)
            else:
                yield self._any(int(rng.integers(looks)), rng)
        self.epoch += self.seed is not None

    def _any(self, look: int, rng: np.random.Generator) -> NextUseBatch:
        end = self.split - NEVER  # targets beyond are unknown here
        low = int(rng.integers(max(1, self.split - WINDOW + 1)))
        high = min(self.split, low + WINDOW)
        first = int(rng.integers(low, max(low + 1, min(end, high) - 512)))  # neighbours, as at serving
        asking = np.sort(rng.choice(np.arange(first, min(end, high, first + 512)), QUERIES, replace=False))
        memory = np.sort(rng.choice(np.arange(low, high), min(MEMORY, high - low), replace=False))
        return self.routing.batch(look, low, asking, memory)

    def _later(self, look: int, number: int, rng: np.random.Generator) -> NextUseBatch:
        end = self.routing.count - NEVER
        part = np.array_split(np.arange(self.split, end), self.count)[number]
        asking = np.sort(rng.choice(part, min(QUERIES, len(part)), replace=False))
        low = max(0, int(asking[-1]) + 1 - WINDOW)
        return self.routing.batch(look, low, asking, np.arange(low, max(low + 1, int(asking[0]) - PAST)))

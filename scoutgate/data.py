"""Reads and writes routing recordings as memory-mapped arrays, split by conversation, and makes batches of them.

A data set is a directory: `meta.json` and one raw file per array. See docs/forecasting.md for the arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgemoe.durable import NewFile, make_folder, remove_file, replace_file
from edgemoe.experts.predict.scoutgate_model import NO_TOKEN, ScoutGateShape
from edgemoe.types.request import conversation_of

FORMAT = 1
DTYPES = {
    "tokens": "<i4", "ids": "<i2", "decode": "u1", "starts": "<i8", "group": "<i8", "hidden": "<f2", "gate": "<f2",
}  # fmt: skip
SPLITS = {"train": range(80), "validation": range(80, 90), "test": range(90, 100)}  # of 100 buckets


@dataclass(frozen=True)
class Meta:
    """The model of a data set. `experts` are E_l per layer."""

    model: str
    experts: tuple[int, ...]
    top_k: int
    digest: str = ""  # of the packed model
    tokenizer: str = ""  # xxh3_128 of tokenizer.json
    hidden: int = 0
    gate: bool = False
    notes: str = ""

    @property
    def layers(self) -> int:
        return len(self.experts)

    def row(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one token's row of an array."""
        rows = {"ids": (self.layers, self.top_k), "hidden": (self.hidden,), "gate": (self.layers, max(self.experts))}
        return rows.get(name, ())


@dataclass(frozen=True)
class Routes:
    """One request: n tokens in order."""

    tokens: npt.NDArray[np.int32]  # [n]
    ids: npt.NDArray[np.int16]  # [n, L, k]
    decode: npt.NDArray[np.bool_]  # [n]
    conversation: int = 0  # `conversation_of` the whole prompt; 0 if only its computed part is known
    hidden: npt.NDArray[np.float16] | None = None  # [n, H]
    gate: npt.NDArray[np.float16] | None = None  # [n, L, E]

    def group(self, number: int) -> int:
        """Returns a number that is equal for equal prompts and a conversation's turns, so that they share a split."""
        prompt = self.tokens[~self.decode]
        if self.conversation or (prompt.size and prompt[0] != NO_TOKEN):
            return self.conversation or conversation_of(prompt)
        return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=7).digest(), "little")


def write(directory: Path, meta: Meta, requests: Iterable[Routes]) -> int:
    """Writes a data set and returns its number of tokens. Raises ValueError where a request does not fit `meta`."""
    make_folder(directory)
    remove_file(directory / "meta.json", missing_ok=True)  # until all is written there is no data set
    starts, groups = [0], []
    names = ["tokens", "ids", "decode"] + ["hidden"] * bool(meta.hidden) + ["gate"] * meta.gate
    with ExitStack() as stack:
        new = {name: stack.enter_context(NewFile(_path(directory, name), 0o644)) for name in names}
        files = {name: stack.enter_context(os.fdopen(os.dup(file.fd), "wb")) for name, file in new.items()}
        for number, request in enumerate(requests):
            for name, file in files.items():
                np.ascontiguousarray(_checked(request, name, meta), DTYPES[name]).tofile(file)
            starts.append(starts[-1] + len(request.tokens))
            groups.append(request.group(number))
        for name, written in new.items():
            files[name].flush()
            written.put_in_place()
    replace_file(_path(directory, "starts"), np.array(starts, DTYPES["starts"]).tobytes(), 0o644)
    replace_file(_path(directory, "group"), np.array(groups, DTYPES["group"]).tobytes(), 0o644)
    text = json.dumps({"format": FORMAT, **asdict(meta)}, indent=1) + "\n"
    replace_file(directory / "meta.json", text.encode(), 0o644)
    return starts[-1]


def _path(directory: Path, name: str) -> Path:
    return directory / f"{name}.bin"


def _checked(request: Routes, name: str, meta: Meta) -> npt.NDArray[Any]:
    array = getattr(request, name)
    wanted = (len(request.tokens), *meta.row(name))
    if array is None or array.shape != wanted:
        got = None if array is None else array.shape
        raise ValueError(f"{name} of a request has shape {got}, but {wanted} was expected")
    if name == "ids" and ((array < 0) | (array >= np.array(meta.experts)[:, None])).any():
        raise ValueError("a request names experts that the model does not have")
    checked: npt.NDArray[Any] = array
    return checked


class Recording:
    """A data set, opened; arrays are memory-mapped."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError where the directory is not a data set, or its files are not whole."""
        try:
            record = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
            if record.pop("format") != FORMAT:
                raise ValueError(f"{directory} is a data set of another format; record or convert it again")
            self.meta = Meta(**{**record, "experts": tuple(record["experts"])})
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{directory} is not a data set (see scoutgate.convert): {error}") from error
        self.starts = np.fromfile(_path(directory, "starts"), DTYPES["starts"])
        self.group = np.fromfile(_path(directory, "group"), DTYPES["group"])
        self.count = int(self.starts[-1])
        self.tokens = self._map(directory, "tokens")
        self.ids = self._map(directory, "ids")
        self.decode = self._map(directory, "decode")
        self.hidden = self._map(directory, "hidden") if self.meta.hidden else None
        self.gate = self._map(directory, "gate") if self.meta.gate else None
        self.request = np.repeat(np.arange(len(self.group)), np.diff(self.starts)).astype(np.int32)  # [N]

    def _map(self, directory: Path, name: str) -> npt.NDArray[Any]:
        try:
            shape = (self.count, *self.meta.row(name))
            return np.memmap(_path(directory, name), DTYPES[name], mode="r", shape=shape)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name} of {directory} is missing or not whole: {error}") from error

    @property
    def has_tokens(self) -> bool:
        return bool(self.count) and int(self.tokens[0]) != NO_TOKEN

    def requests(self, split: str) -> npt.NDArray[np.int64]:
        """Returns the requests of a split, in order."""
        return np.flatnonzero(np.isin(self.group % 100, np.array(SPLITS[split])))

    def hinted(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether gates were asked one layer early, at each of the positions [n]."""
        if self.gate is None:
            return np.zeros(len(positions), np.bool_)
        asked: npt.NDArray[np.bool_] = self.gate[positions, -1].any(axis=1)
        return asked

    def positions(self, split: str, decode_only: bool = False) -> npt.NDArray[np.int64]:
        """Returns the tokens of a split's requests, in order."""
        chosen = np.isin(self.request, self.requests(split))
        if decode_only:
            chosen &= self.decode.astype(bool)
        return np.flatnonzero(chosen)


@dataclass(frozen=True)
class Inputs:
    """ScoutGate's inputs for B tokens, and its targets."""

    tokens: Tensor  # [B, m] int64, NO_TOKEN before the request's first
    previous: Tensor  # [B, L * k] int64, counted through all layers; `total` where there was no previous token
    state: Tensor | None  # [B, H] float32
    chosen: Tensor  # [B, horizons, L * k] int64, counted through all layers
    known: Tensor  # [B, horizons] bool: false where the request ended before

    def to(self, device: torch.device) -> Inputs:
        state = None if self.state is None else self.state.to(device)
        tokens, previous = self.tokens.to(device), self.previous.to(device)
        return Inputs(tokens, previous, state, self.chosen.to(device), self.known.to(device))


def flat_ids(ids: npt.NDArray[np.int16], experts: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Flattens ids [B, L, k] to [B, L * k], counted through all layers."""
    offsets = np.concatenate([[0], np.cumsum(experts)[:-1]])
    flat: npt.NDArray[np.int64] = (ids.astype(np.int64) + offsets[:, None]).reshape(len(ids), -1)
    return flat


def gather(recording: Recording, positions: npt.NDArray[np.int64], shape: ScoutGateShape) -> Inputs:
    """Collects ScoutGate's inputs and targets at these tokens."""
    begin = recording.starts[recording.request[positions]]
    end = recording.starts[recording.request[positions] + 1]
    at = positions[:, None] + np.arange(1 - shape.window, 1)  # [B, m]
    tokens = np.where(at >= begin[:, None], recording.tokens[np.maximum(at, 0)], NO_TOKEN)
    previous = flat_ids(recording.ids[np.maximum(positions - 1, 0)], shape.experts)
    previous[positions == begin] = shape.total
    state = None
    if shape.hidden and recording.hidden is not None:
        before = recording.hidden[np.maximum(positions - 1, 0)].astype(np.float32)
        before[positions == begin] = 0
        state = torch.from_numpy(before)
    ahead = positions[:, None] + np.arange(shape.horizons)  # [B, horizons]
    known = ahead < end[:, None]
    safe = np.minimum(ahead, recording.count - 1)
    chosen = flat_ids(recording.ids[safe.reshape(-1)], shape.experts).reshape(*safe.shape, -1)
    seen = torch.from_numpy(np.ascontiguousarray(tokens.astype(np.int64)))
    return Inputs(
        seen, torch.from_numpy(np.ascontiguousarray(previous)), state, torch.from_numpy(chosen), torch.from_numpy(known)
    )


def k_hot(inputs: Inputs, shape: ScoutGateShape) -> Tensor:
    """Returns the chosen experts as zeros and ones, [B, horizons, sum E_l] float32."""
    target = torch.zeros(*inputs.known.shape, shape.total, device=inputs.chosen.device)
    return target.scatter_(-1, inputs.chosen, 1.0)


class Batches(torch.utils.data.IterableDataset[Inputs]):
    """Whole batches at random positions of a split, a new order every epoch; or all of it in order."""

    def __init__(
        self, recording: Recording, split: str, shape: ScoutGateShape, size: int, seed: int | None, most: int = 0
    ) -> None:
        """Takes the `seed` of the order; None: in order. `most` bounds the positions of one pass (0: all)."""
        self.recording, self.shape, self.size, self.seed, self.most = recording, shape, size, seed, most
        self.positions = recording.positions(split)
        self.epoch = 0

    @property
    def count(self) -> int:
        """Batches in one pass."""
        count = min(len(self.positions), self.most or len(self.positions))
        return -(-count // self.size)

    def __iter__(self) -> Iterator[Inputs]:
        order = self.positions
        if self.seed is not None:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(order)
            self.epoch += 1
        order = order[: self.most or len(order)]
        for start in range(0, len(order), self.size):
            yield gather(self.recording, np.sort(order[start : start + self.size]), self.shape)

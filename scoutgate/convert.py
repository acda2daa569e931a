"""Converts routing recordings of any origin into one data set. See docs/forecasting.md.

* python -m scoutgate.convert FOLDER --model STORE --out DIR: the daemon's recordings (record.dir)
* python -m scoutgate.convert TABLE.ids.csv.gz ... --out DIR: public routing tables
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgemoe.errors import EdgemoeError
from edgemoe.experts.predict.scoutgate_model import NO_TOKEN
from edgemoe.rights import become_owner
from edgemoe.store.manifest import Manifest
from edgemoe.telemetry.routing_recording import AHEAD, read_recording, recordings_in
from edgemoe.types.step import StepRouting
from scoutgate.data import Meta, Routes, write

QUIET_STEPS = 2000  # after which a request that took no part in steps is over
PUBLIC = {26: ("deepseek-ai/DeepSeek-V2-Lite", 64), 24: ("openai/gpt-oss-20b", 32)}  # layers -> model, experts


class Growing:
    """One request while its steps come in. A pre-empted one runs its last tokens again: the later routes count."""

    def __init__(self, start: int, conversation: int) -> None:
        """Begins at position `start`. Tokens from a prefix cache are not recorded, but count in `conversation`."""
        self.start, self.conversation = start, conversation
        self.tokens: list[int] = []
        self.ids: list[npt.NDArray[np.int16]] = []  # each [L, k]
        self.decode: list[bool] = []
        self.gate: list[npt.NDArray[np.float16] | None] = []  # each [L, E]; None where no gate was asked early
        self.hidden: list[npt.NDArray[np.float16] | None] = []  # each [H] of the last layer

    def takes(self, position: int) -> bool:
        """Whether tokens from this position on continue it."""
        return self.start <= position <= self.start + len(self.tokens)

    def add(self, position: int, part: slice, step: StepRouting, decode: bool) -> None:
        """Takes the part of a step's tokens that is its own."""
        tokens, hints = step.meta.tokens[part].tolist(), step.hints.get(AHEAD)
        keep = position - self.start
        before = self.decode[keep:]
        del self.tokens[keep:], self.ids[keep:], self.decode[keep:], self.gate[keep:], self.hidden[keep:]
        self.tokens += tokens
        self.ids += list(step.ids[:, part].transpose(1, 0, 2))
        early = [None] * len(tokens) if hints is None else list(hints[:, part].transpose(1, 0, 2).astype(np.float16))
        self.gate += early
        self.hidden += [None] * len(tokens) if step.hidden is None else list(step.hidden[-1, part].astype(np.float16))
        again = before[: len(tokens)]  # decoded once, prefilled again
        self.decode += [*again, *[decode] * (len(tokens) - len(again))]

    def routes(self, experts: int, hidden: int) -> Routes:
        """Returns the routes, with gates' scores for `experts` experts a layer and states of `hidden`; 0: none."""
        tokens, ids, decode = np.array(self.tokens, np.int32), np.stack(self.ids), np.array(self.decode, bool)
        gate = _rows(self.gate, (ids.shape[1], experts)) if experts else None
        state = _rows(self.hidden, (hidden,)) if hidden else None
        return Routes(tokens, ids, decode, self.conversation, state, gate)


def _rows(known: list[npt.NDArray[np.float16] | None], shape: tuple[int, ...]) -> npt.NDArray[np.float16]:
    """Stacks the tokens' rows, with zeros for tokens without one."""
    rows = np.zeros((len(known), *shape), np.float16)
    for token, row in enumerate(known):
        if row is not None:
            rows[token] = row
    return rows


def requests_of(steps: Iterable[StepRouting], experts: int = 0, hidden: int = 0) -> Iterator[Routes]:
    """Yields the requests of recorded steps, each when it is over; see `Growing.routes`."""
    growing: OrderedDict[str, tuple[Growing, int]] = OrderedDict()
    for number, step in enumerate(steps):
        meta = step.meta
        ends = np.cumsum(meta.query_lens)
        known = meta.conversations.tolist() or [0] * len(ends)
        columns = meta.requests, known, ends, meta.query_lens, meta.decode
        for name, conversation, end, count, decode in zip(*columns, strict=True):
            part = slice(int(end - count), int(end))
            position = int(meta.positions[part.start])
            request = growing.pop(name, (None, 0))[0]
            if request is None or not request.takes(position):
                if request is not None:
                    yield request.routes(experts, hidden)
                request = Growing(position, conversation)
            request.add(position, part, step, bool(decode))
            growing[name] = request, number
        while growing and next(iter(growing.values()))[1] < number - QUIET_STEPS:
            yield growing.popitem(last=False)[1][0].routes(experts, hidden)
    yield from (request.routes(experts, hidden) for request, _ in growing.values())


def recordings(folder: Path, store: Path, out: Path, hints: bool = True) -> int:
    """Writes the daemon's recordings of the model in `store` as a data set. Returns its number of tokens. Raises
    ValueError.

    Takes over `hints` and hidden states if some are recorded (record.hints, record.hidden); a token without any has
    zeros.
    """
    try:
        manifest = Manifest.load(store)
        opened = [read_recording(file) for file in recordings_in(folder)]
        mine = [(header, steps) for header, steps in opened if header.digest == manifest.digest]
        if not mine:
            raise ValueError(f"{folder} holds no recordings of {manifest.name} ({len(opened)} of other models)")
        header = mine[0][0]
        tokenizer = next((f.xxh3_128 for f in manifest.files if f.file == "tokenizer.json"), "")
        experts = (header.experts,) * header.layers
        gate = hints and any(header.hints for header, _ in mine)
        hidden = max(header.hidden for header, _ in mine) if hints else 0
        notes = f"recorded in {folder}"
        meta = Meta(manifest.name, experts, header.top_k, manifest.digest, tokenizer, hidden, gate, notes)
        steps = (step for _, steps in mine for step in steps)
        return write(out, meta, requests_of(steps, header.experts * gate, hidden))
    except EdgemoeError as error:
        raise ValueError(str(error)) from error


def public_rows(file: Path) -> Iterator[tuple[str, str]]:
    """Yields (request, ids) of each token, in order."""
    with gzip.open(file, "rt", newline="") as text:
        rows = csv.reader(text)
        header = next(rows, [])
        if len(header) != 3 or header[1:] != ["pos", "ids"]:
            raise ValueError(f"{file} is not a routing table: its columns are {header}, not seq, pos, ids")
        for row in rows:
            yield row[0], row[2]


def public_requests(file: Path) -> Iterator[Routes]:
    """Yields the requests of a public table; every token counts as decoded."""
    for _, rows in groupby(public_rows(file), key=lambda row: row[0]):
        ids = np.array([[layer.split() for layer in text.split("|")] for _, text in rows], np.int16)
        tokens = np.full(len(ids), NO_TOKEN, np.int32)
        yield Routes(tokens, ids, np.ones(len(ids), bool))


def public_meta(files: list[Path]) -> Meta:
    """Raises ValueError where the files are not of one known model."""
    shapes = {np.array([layer.split() for layer in next(public_rows(f))[1].split("|")]).shape for f in files}
    if len(shapes) != 1:
        raise ValueError("these tables are of different models; convert them one model at a time")
    layers, top_k = shapes.pop()
    if layers not in PUBLIC:
        raise ValueError(f"no public table with {layers} layers is known; known are {sorted(PUBLIC)}")
    model, experts = PUBLIC[layers]
    return Meta(model, (experts,) * layers, top_k, notes="no token ids; " + ", ".join(f.name for f in files))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scoutgate.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="a folder of recordings, or tables")
    parser.add_argument("--model", type=Path, help="store of the recorded model; for recordings")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        become_owner(options.out)
        tokens = convert(options.files, options.model, options.out)
    except (OSError, ValueError, EdgemoeError) as error:
        raise SystemExit(str(error)) from error
    print(f"{options.out}: {tokens} tokens")


def convert(files: list[Path], model: Path | None, out: Path) -> int:
    """Writes a data set and returns its number of tokens. Raises ValueError, OSError."""
    if not files[0].is_dir():
        return write(out, public_meta(files), (r for file in files for r in public_requests(file)))
    if model is None or len(files) > 1:
        raise ValueError("recordings are converted a folder at a time, with --model naming the store they are of")
    return recordings(files[0], model, out)


if __name__ == "__main__":
    main()

"""Routing recordings of any origin into one data set: `python -m scoutgate.convert FILE... --out DIR`.

* The daemon's own recordings (a folder, or files ending in .routes): tokens, routes, request boundaries.
* Public routing tables (`*.ids.csv.gz`: seq or req, pos, ids; layers separated by "|"). They carry no ids of the
  routed tokens, so that the source's ScoutGate learns nothing from them but popularity. What they can be used for:
  variant "context" (the previous token's experts), the baselines, and the next-use network.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from scoutgate.data import Meta, Routes, write
from scoutgate.model import NO_TOKEN

PUBLIC = {26: ("deepseek-ai/DeepSeek-V2-Lite", 64), 24: ("openai/gpt-oss-20b", 32)}  # layers -> model, experts


def public_rows(file: Path) -> Iterator[tuple[str, str]]:
    """(request, ids) of each token, in order."""
    with gzip.open(file, "rt", newline="") as text:
        rows = csv.reader(text)
        header = next(rows, [])
        if len(header) != 3 or header[1:] != ["pos", "ids"]:
            raise ValueError(f"{file} is not a routing table: its columns are {header}, not seq, pos, ids")
        for row in rows:
            yield row[0], row[2]


def public_requests(file: Path) -> Iterator[Routes]:
    """The requests of a public table; every token counts as decoded."""
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
    parser = argparse.ArgumentParser(prog="scoutgate.convert", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        meta = public_meta(options.files)
        tokens = write(options.out, meta, (r for file in options.files for r in public_requests(file)))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    print(f"{options.out}: {tokens} tokens of {meta.model}")


if __name__ == "__main__":
    main()

"""Turns a store into one of the release before."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from edgemoe.store.manifest import MANIFEST, own_checksum


def make_version_1(store: Path) -> None:
    """Rewrites the manifest, byte for byte as in version 1: without encodings. All other files are the same."""
    plain = json.loads((store / MANIFEST).read_text()) | {"version": 1}
    for part in (plain["dense"], *plain["layers"]):
        assert part.pop("encoding") == ""
    signed = plain | {"checksum": own_checksum(plain)}
    (store / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(signed), indent=1))

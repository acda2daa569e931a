"""Makes a store what the release before would have written."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from edgemoe.store.manifest import MANIFEST, own_checksum


def make_version_1(store: Path) -> None:
    """Writes the manifest anew, byte for byte as version 1 has it: without encodings. All other files are the same."""
    plain = json.loads((store / MANIFEST).read_text()) | {"version": 1}
    for part in (plain["dense"], *plain["layers"]):
        assert part.pop("encoding") == ""
    signed = plain | {"checksum": own_checksum(plain)}
    (store / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(signed), indent=1))

"""Every file of a store is compared with the manifest before it is used."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.front_kit import SCRIPTED, settings_for, write_model

from edgemoe.config.settings import MemorySettings, ModelSettings, Settings
from edgemoe.errors import StoreError
from edgemoe.front.main import Front
from edgemoe.store.files import BLOCK_BYTES, checksum
from edgemoe.store.manifest import DENSE, DenseEntry, Manifest, verify_copies, verify_dense, verify_weights
from edgemoe.store.packer import pack
from edgemoe.worker.assemble import assemble

Make = Callable[..., Path]


@pytest.fixture
def served(own_checkpoint: Make, tmp_path: Path) -> Path:
    """A store with a tokenizer and a chat template."""
    source = own_checkpoint()
    config = json.loads((source / "config.json").read_text())
    write_model(source)
    (source / "config.json").write_text(json.dumps(config))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    pack(source, tmp_path / "store")
    return tmp_path / "store"


def flip(path: Path, offset: int, bit: int = 4) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def verify(store: Path) -> None:
    """Verifies all that a served model uses, and the headers, which `models verify` checks in addition."""
    manifest = Manifest.load(store)
    verify_copies(store, manifest)
    verify_dense(store, manifest.dense, lambda share: None)
    for layer in manifest.layers:
        verify_weights(store, layer)


def test_one_flipped_bit_anywhere_is_refused_with_the_files_name_and_a_way_out(served: Path) -> None:
    draw = random.Random(3)
    manifest = Manifest.load(served)
    verify(served)
    for entry in (*manifest.files, manifest.dense):
        path = served / entry.file
        whole = path.read_bytes()
        for offset in (0, 7, entry.bytes - 1, *(draw.randrange(entry.bytes) for _ in range(40))):
            flip(path, offset, draw.randrange(8))
            with pytest.raises(StoreError, match="edgemoe models verify") as caught:
                verify(served)
            assert str(path) in str(caught.value)
            path.write_bytes(whole)
    for layer in manifest.layers:
        path = served / layer.file
        whole = path.read_bytes()
        for offset in (5, draw.randrange(8, 4000)):
            flip(path, offset)
            with pytest.raises(StoreError, match=layer.file):
                verify(served)
            path.write_bytes(whole)


def test_every_block_of_large_dense_weights_is_verified_and_the_share_done_grows(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(5 * BLOCK_BYTES + 77)
    header = (4088).to_bytes(8, "little") + b"{}".ljust(4088)
    path = tmp_path / DENSE
    path.write_bytes(header + body)
    entry = DenseEntry(file=DENSE, bytes=len(header) + len(body), header=checksum(header), xxh3_128=checksum(body))
    shares: list[float] = []
    verify_dense(tmp_path, entry, shares.append)
    assert shares == sorted(shares)
    assert len(shares) == 6
    assert 0 <= shares[0] < 0.1 < 0.9 < shares[-1] <= 1
    for block in range(6):
        at = len(header) + block * BLOCK_BYTES + 70
        flip(path, at)
        with pytest.raises(StoreError, match="damaged"):
            verify_dense(tmp_path, entry, shares.append)
        flip(path, at)


@pytest.mark.parametrize("name", ["chat_template.json", "chat_template.jinja", "added_tokens.json"])
def test_a_file_that_the_manifest_does_not_know_is_not_used(store: Path, name: str) -> None:
    (store / name).write_text("{}")
    with pytest.raises(StoreError, match=rf"{name} is not part of this store"):
        verify_copies(store, Manifest.load(store))


@pytest.mark.parametrize("name", [DENSE, "config.json", "generation_config.json"])
def test_an_engine_does_not_load_a_damaged_store(store: Path, name: str) -> None:
    flip(store / name, (store / name).stat().st_size - 3)
    said: list[str] = []
    settings = Settings(
        model=ModelSettings(path=str(store)), memory=MemorySettings(ram_bytes=1 << 20, kv_bytes=1 << 20)
    )
    with pytest.raises(StoreError, match=f"{name} is damaged"):
        assemble(settings, lambda emissions: None, lambda phase, fraction=0.0: said.append(phase))
    assert "weights" not in said


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
async def test_a_front_does_not_read_a_damaged_tokenizer_or_template(served: Path, tmp_path: Path, name: str) -> None:
    flip(served / name, 9, 0)
    with pytest.raises(StoreError, match=f"{name} is damaged"):
        await Front(settings_for(tmp_path, served), SCRIPTED, env={}).serve()


def test_a_dense_header_that_claims_more_than_the_file_is_refused(store: Path) -> None:
    entry = Manifest.load(store).dense
    path = store / entry.file
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(StoreError, match="damaged"):
        verify_dense(store, entry, lambda share: None)
    with pytest.raises(StoreError, match="cannot be read"):
        verify_dense(store, msgspec.structs.replace(entry, bytes=entry.bytes + 1), lambda share: None)

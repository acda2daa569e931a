"""Reading experts from real stores: exact, verified, and off the loop."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from edgemoe.errors import CorruptExpert, MissingExpert, StoreError
from edgemoe.store import files
from edgemoe.store.files import BLOCK_BYTES, checksum, combine, lock_store, page_memory
from edgemoe.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, spec_of
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import PAGE_BYTES, padded

Make = Callable[..., Path]


def bytes_of(store: Path, manifest: Manifest, layer: int, expert: int) -> bytes:
    tensors = load_file(store / manifest.layers[layer].file)
    parts = (tensors[f"experts.{expert}.{part}"] for part in ("gate_up_proj", "down_proj"))
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def rewrite(store: Path, edit: Callable[[Manifest], Manifest]) -> Manifest:
    """Signs an edited manifest, as a hostile or foolish tool would."""
    edit(Manifest.load(store)).save(store)
    return Manifest.read(store)


def with_entry(manifest: Manifest, **changes: int) -> Manifest:
    """Returns the manifest with another entry for expert 1 of layer 0."""
    layer = manifest.layers[0]
    changed = msgspec.structs.replace(layer.experts[1], **changes)
    experts = (layer.experts[0], changed, *layer.experts[2:])
    return msgspec.structs.replace(
        manifest, layers=(msgspec.structs.replace(layer, experts=experts), *manifest.layers[1:])
    )


@pytest.fixture(params=["direct", "buffered", "refusing"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file system's support of O_DIRECT: complete, none, or only when a file is opened."""
    if request.param == "buffered":
        monkeypatch.setattr(files, "open_direct", lambda path, flags: None)
    if request.param == "refusing":

        def preadv(fd: int, buffers: list[memoryview], offset: int, preadv: Callable[..., int] = os.preadv) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_every_expert_reads_back_exactly(checkpoint: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    manifest = pack(checkpoint(dtype=dtype), tmp_path)
    with ExpertStore(tmp_path, manifest) as store:
        for layer in range(3):
            for expert in range(6):
                size = store.expert_bytes(layer, expert)
                slot = page_memory(padded(size))
                await store.read(layer, expert, slot)
                plain = memoryview(bytearray(size))
                store.read_into(layer, expert, plain)
                assert slot[:size] == plain == bytes_of(tmp_path, manifest, layer, expert)


@pytest.mark.usefixtures("way")
async def test_an_expert_of_several_blocks_reads_back_exactly(checkpoint: Make, tmp_path: Path) -> None:
    wide = checkpoint(hidden_size=1010, moe_intermediate_size=810, num_experts=2, num_hidden_layers=1, vocab_size=8)
    manifest = pack(wide, tmp_path)
    with ExpertStore(tmp_path, manifest) as store:
        size = store.expert_bytes(0, 1)
        assert size > 2 * BLOCK_BYTES
        assert size % PAGE_BYTES
        slots = [page_memory(padded(size)), page_memory(padded(size))]
        await asyncio.gather(*(store.read(0, expert, slot) for expert, slot in enumerate(slots)))
        for expert, slot in enumerate(slots):
            assert slot[:size] == bytes_of(tmp_path, manifest, 0, expert)
            assert checksum(slot[:size]) == manifest.entry(0, expert).xxh3_128
        unaligned = page_memory(padded(size) + PAGE_BYTES)[8 : 8 + size]
        await store.read(0, 1, unaligned)
        assert unaligned == slots[1][:size]


@pytest.mark.usefixtures("way")
async def test_reads_that_come_in_pieces_are_put_together(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest.load(store)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:1000]], offset))
    with ExpertStore(store, manifest) as opened:
        slot = page_memory(padded(opened.expert_bytes(2, 3)))
        await opened.read(2, 3, slot)
    monkeypatch.undo()
    assert slot[: manifest.entry(2, 3).bytes] == bytes_of(store, manifest, 2, 3)


async def test_a_disk_that_fails_is_an_error_that_names_the_expert(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExpertStore(store, Manifest.load(store)) as opened:

        def broken(fd: int, buffers: object, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CorruptExpert, match=r"layer_001\.safetensors: expert 4 of layer 1 .*Input/output error"):
            await opened.read(1, 4, page_memory(PAGE_BYTES * 4))


async def test_a_flipped_bit_names_file_layer_and_expert(store: Path) -> None:
    manifest = Manifest.load(store)
    path = store / manifest.layers[1].file
    raw = bytearray(path.read_bytes())
    raw[manifest.entry(1, 2).offset + 77] ^= 4
    path.write_bytes(raw)
    with ExpertStore(store, Manifest.load(store)) as opened:
        memory = page_memory(PAGE_BYTES * 4)
        for expert in (0, 1, 3, 4, 5):
            await opened.read(1, expert, memory)
        with pytest.raises(CorruptExpert) as caught:
            await opened.read(1, 2, memory)
        with pytest.raises(CorruptExpert):
            opened.read_into(1, 2, memory)
    assert (caught.value.file, caught.value.layer, caught.value.expert) == (str(path), 1, 2)


async def test_a_file_truncated_while_it_is_open_is_found_out(store: Path) -> None:
    manifest = Manifest.load(store)
    with ExpertStore(store, manifest) as opened:
        os.truncate(store / manifest.layers[0].file, manifest.entry(0, 3).offset + 100)
        with pytest.raises(CorruptExpert, match="expert 3 of layer 0"):
            await opened.read(0, 3, page_memory(PAGE_BYTES * 4))


def test_a_truncated_file_is_refused_at_load_naming_the_first_expert_lost(store: Path) -> None:
    manifest = Manifest.load(store)
    path = store / manifest.layers[2].file
    os.truncate(path, manifest.entry(2, 4).offset + 1)
    with pytest.raises(CorruptExpert, match="the file ends at byte") as caught:
        Manifest.load(store)
    assert (caught.value.file, caught.value.layer, caught.value.expert) == (str(path), 2, 4)


async def test_experts_that_are_not_listed_are_missing_and_the_others_are_there(store: Path) -> None:
    def thin_out(manifest: Manifest) -> Manifest:
        first, second, third = manifest.layers
        return msgspec.structs.replace(
            manifest,
            layers=(
                msgspec.structs.replace(first, experts=first.experts[2:4]),
                second,
                msgspec.structs.replace(third, experts=()),
            ),
        )

    manifest = rewrite(store, thin_out)
    (store / manifest.layers[2].file).unlink()
    manifest = Manifest.load(store)
    present = {(layer, expert) for layer in range(4) for expert in range(7) if manifest.present(layer, expert)}
    assert present == {(0, 2), (0, 3), *((1, expert) for expert in range(6))}
    with ExpertStore(store, manifest) as opened:
        await opened.read(0, 3, page_memory(PAGE_BYTES * 4))
        for layer, expert in ((0, 0), (2, 1), (0, -1), (-1, 0), (99, 0)):
            with pytest.raises(MissingExpert, match=f"expert {expert} of layer {layer}"):
                await opened.read(layer, expert, page_memory(PAGE_BYTES * 4))


async def test_a_cancelled_read_has_stopped_writing_when_it_returns(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.load(store)
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), asyncio.Event()
    real = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)
        return real(fd, buffers, offset)

    with ExpertStore(store, manifest) as opened:
        memory = page_memory(PAGE_BYTES * 4)
        monkeypatch.setattr(os, "preadv", slow)
        reading = asyncio.ensure_future(opened.read(0, 0, memory))
        await asyncio.wait_for(begun.wait(), 10)
        for _ in range(3):
            reading.cancel()
            await asyncio.wait([reading], timeout=0.01)
            assert not reading.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, 10)
        assert bytes(memory[:16]) != bytes(16)  # the thread ended its write before the read returned


async def test_memory_too_small_for_the_expert_is_a_bug_of_ours(store: Path) -> None:
    with ExpertStore(store, Manifest.load(store)) as opened, pytest.raises(ValueError, match="bytes"):
        await opened.read(0, 0, memoryview(bytearray(100)))


def test_a_store_that_is_being_read_is_neither_packed_nor_removed(checkpoint: Make, store: Path) -> None:
    manifest = Manifest.load(store)
    with ExpertStore(store, manifest), ExpertStore(store, manifest), pytest.raises(StoreError, match="in use"):
        pack(checkpoint(), store)
    with lock_store(store, exclusive=True), pytest.raises(StoreError, match="in use"):
        ExpertStore(store, manifest)


def test_closing_gives_back_every_descriptor(store: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    manifest = Manifest.load(store)
    ExpertStore(store, manifest).close()
    (store / manifest.layers[2].file).unlink()
    with pytest.raises(StoreError, match="layer_002"):
        ExpertStore(store, manifest)
    assert set(os.listdir("/proc/self/fd")) == before


# --- the manifest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 4097},
        {"offset": 0, "bytes": 1 << 40},
        {"offset": 4096},
        {"bytes": 0},
        {"expert": 0},
        {"offset": 1 << 59},
    ],
)
def test_impossible_places_are_refused_even_if_the_manifest_is_signed(store: Path, changes: dict[str, int]) -> None:
    rewrite(store, lambda manifest: with_entry(manifest, **changes))
    with pytest.raises(StoreError, match="expert"):
        Manifest.load(store)


@pytest.mark.parametrize("changes", [{"offset": -4096}, {"bytes": -1}, {"expert": -1}, {"offset": 1 << 63}])
def test_numbers_out_of_range_are_refused(store: Path, changes: dict[str, int]) -> None:
    with pytest.raises(StoreError, match="not a manifest"):
        rewrite(store, lambda manifest: with_entry(manifest, **changes))


@pytest.mark.parametrize("where", ["../../etc/passwd", "/etc/passwd", "experts/layer_001.safetensors"])
def test_a_manifest_cannot_point_elsewhere(store: Path, where: str) -> None:
    good = Manifest.load(store)
    layers = (msgspec.structs.replace(good.layers[0], file=where), *good.layers[1:])
    rewrite(store, lambda manifest: msgspec.structs.replace(manifest, layers=layers))
    with pytest.raises(StoreError, match="cannot lie in"):
        Manifest.load(store)
    msgspec.structs.replace(good, dense=msgspec.structs.replace(good.dense, file=where)).save(store)
    with pytest.raises(StoreError, match="cannot lie in"):
        Manifest.load(store)


def test_a_copied_file_with_a_path_is_refused(store: Path) -> None:
    good = Manifest.load(store)
    files = (msgspec.structs.replace(good.files[0], file="../config.json"), *good.files[1:])
    msgspec.structs.replace(good, files=files).save(store)
    with pytest.raises(StoreError, match="not a manifest"):
        Manifest.load(store)


def test_a_changed_digit_in_the_manifest_is_found_out(store: Path) -> None:
    text = (store / MANIFEST).read_text()
    (store / MANIFEST).write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 10001.0'))
    with pytest.raises(StoreError, match="checksum"):
        Manifest.load(store)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": "1"}', '{"version": 1}', "[" * 100_000])
def test_a_manifest_that_is_none_is_refused(store: Path, text: str) -> None:
    (store / MANIFEST).write_text(text)
    with pytest.raises(StoreError, match="not a manifest"):
        Manifest.load(store)


def test_the_digest_names_the_content_and_not_the_place(checkpoint: Make, tmp_path: Path) -> None:
    one = pack(checkpoint(), tmp_path / "one")
    again = pack(checkpoint(sharded=True), tmp_path / "again")
    other = pack(checkpoint(dtype=torch.bfloat16), tmp_path / "other")
    assert one.digest == again.digest != other.digest
    assert one.source != again.source


def test_a_checksum_is_that_of_one_block_or_of_all_blocks_digests() -> None:
    import xxhash

    short, long = os.urandom(1000), os.urandom(2 * BLOCK_BYTES + 5)
    assert checksum(short) == xxhash.xxh3_128_hexdigest(short)
    parts = [long[at : at + BLOCK_BYTES] for at in range(0, len(long), BLOCK_BYTES)]
    assert checksum(long) == combine([xxhash.xxh3_128_digest(part) for part in parts])


@pytest.mark.parametrize("raw", [b'"\xe2\x28\xa1"', b'{"version": 1, "name": "\xff"}'])
def test_a_manifest_that_is_not_text_is_refused(store: Path, raw: bytes) -> None:
    (store / MANIFEST).write_bytes(raw)
    with pytest.raises(StoreError, match="not a manifest"):
        Manifest.load(store)


def test_a_manifest_that_may_not_be_read_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read: Permission denied"):
        Manifest.read(store)


def test_a_manifest_as_large_as_a_model_is_refused_before_it_is_read(store: Path) -> None:
    with (store / MANIFEST).open("r+b") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(StoreError, match="too large"):
        Manifest.load(store)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_hidden_layers", 4, "3 layers"),
        ("num_hidden_layers", 2, "3 layers"),
        ("num_local_experts", 5, "expert 5 of layer 0"),
        ("moe_intermediate_size", 22, "bytes for expert 0"),
        ("vocab_size", 1 << 24, "bytes of dense weights"),
    ],
)
def test_a_manifest_and_a_configuration_that_contradict_each_other_are_refused(
    store: Path, key: str, value: int, why: str
) -> None:
    good = Manifest.load(store)
    assert spec_of(good).layers == 3
    rewrite(store, lambda manifest: msgspec.structs.replace(manifest, config={**manifest.config, key: value}))
    with pytest.raises(StoreError, match=why):
        spec_of(Manifest.load(store))


async def test_an_error_of_the_disk_is_not_read_around(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error with O_DIRECT the page cache is not tried."""
    real, direct = os.preadv, set()

    def opened(path: Path, flags: int) -> int:
        direct.add(fd := os.open(path, flags | os.O_CLOEXEC))
        return fd

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(files, "open_direct", opened)
    monkeypatch.setattr(os, "preadv", failing)
    opened_store = ExpertStore(store, Manifest.load(store))
    with opened_store, pytest.raises(CorruptExpert, match="Input/output error"):
        await opened_store.read(0, 0, page_memory(PAGE_BYTES * 4))

"""Stores are copied from several boxes at once and continued after a death; damage is reported with its sender."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.checkpoints import partial_store, tiny_checkpoint
from support.ports import free_ports
from support.waiting import until

from edgemoe.cli import store_download
from edgemoe.cli.store_download import pull
from edgemoe.cluster.control.messages import CONTROL, ControlMessage, StoreLocationReply, StoreLocationRequest
from edgemoe.cluster.data.messages import BULK, BulkMessage, FetchPiece
from edgemoe.cluster.data.store_fetch import StorePieceServer, TransferPace
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import AllowList, Secret, generate, load_peers
from edgemoe.cluster.rpc.transport import Transport
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PeerRefused, StoreError
from edgemoe.experts.compute.expert_shelf import ExpertShelf
from edgemoe.store import peer_copy as peer_copy_module
from edgemoe.store.catalog import describe, verify
from edgemoe.store.files import page_memory
from edgemoe.store.manifest import MANIFEST, Manifest, spec_of
from edgemoe.store.packer import no_progress, pack
from edgemoe.store.peer_copy import ExpertPiece, PeerCopy, StorePieces, open_copy
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import padded
from edgemoe.worker.cluster_parts import StoreWatcher

NAME = "tiny-v2-0123456789ab"


class Box:
    """A box as seen by one that downloads a store: its front names the store, its engine serves the pieces."""

    def __init__(self, node: str, key: Secret, port: int, store: Path, guest: str) -> None:
        self.manifest = Manifest.load(store)
        self.asked: list[str] = []
        transport = Transport(node, f"boot-{node}", key, AllowList({"c": (guest,)}))
        self.pieces = StorePieceServer(StorePieces(store, self.manifest))
        control: Channel[ControlMessage] = Channel(transport, "control", CONTROL, self._name)
        bulk: Channel[BulkMessage] = Channel(transport, "bulk", BULK, self._give)
        control.bind("127.0.0.1", port)
        self._bulk_port = bulk.bind("127.0.0.1")
        self._transport = transport
        self._running = [asyncio.ensure_future(each.run()) for each in (transport, control, bulk)]

    async def die(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        with suppress(Exception):
            self._transport.close()

    async def _name(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        if not isinstance(question.message, StoreLocationRequest):
            raise PeerRefused("not a question")
        return Answer(StoreLocationReply(self._bulk_port, self.manifest.digest, "m", NAME))

    async def _give(self, question: Question[BulkMessage]) -> Answer[BulkMessage]:
        if not isinstance(question.message, FetchPiece):
            raise PeerRefused("not a question")
        self.asked.append(question.message.digest)
        return await self.pieces.serve(question.message)


class House:
    """Two boxes with the store, a and b, and the settings of the one that downloads it, c."""

    def __init__(self, folder: Path, stores: dict[str, Path]) -> None:
        self.folder, self.stores_dir = folder, folder / "stores"
        ports = free_ports(len(stores))
        keys = {node: generate(folder / f"{node}.key") for node in (*stores, "c")}
        entries = [
            f'[[peer]]\nnode = "{node}"\naddress = "127.0.0.1:{port}"\nkey = "{keys[node].public.decode()}"\n'
            for node, port in zip(stores, ports, strict=True)
        ]
        (folder / "peers.toml").write_text("\n".join(entries))
        guest = keys["c"].public.decode()
        self.boxes = {
            node: Box(node, keys[node], port, store, guest)
            for (node, store), port in zip(stores.items(), ports, strict=True)
        }
        self.settings = ClusterSettings(
            node="c",
            key_file=str(folder / "c.key"),
            listen="127.0.0.1:1",
            peers_file=str(folder / "peers.toml"),
        )

    async def pull(self, model: str = "m", rate: float = 0.0) -> Path:
        return await pull(self.settings, self.stores_dir, model, rate, no_progress)

    def words(self, *more: str) -> list[str]:
        given = {"model.store_dir": self.stores_dir} | {
            f"cluster.{name}": getattr(self.settings, name) for name in ("node", "key_file", "listen", "peers_file")
        }
        settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "edgemoe", "pull", "--from-peers", "m", *more, *settings]


@asynccontextmanager
async def house(folder: Path, **stores: Path) -> AsyncIterator[House]:
    made = House(folder, stores)
    try:
        yield made
    finally:
        for box in made.boxes.values():
            await box.die()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    pack(tiny_checkpoint("qwen3_moe", folder / "tiny"), folder / NAME)
    return folder / NAME


@pytest.fixture
def copy_of(packed: Path, tmp_path: Path) -> Callable[[str, float], Path]:
    def make(name: str, share: float = 1.0) -> Path:
        """Makes stores with a share of the experts: the first ones on box a, the last ones on any other."""
        present = np.zeros((3, 6), np.bool_)
        present[:, : round(6 * share)] = True
        found = partial_store(packed, tmp_path / name, present if name == "a" else present[:, ::-1])
        for path in [path for path in found.rglob("*") if path.is_file()]:  # links so far
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        return found

    return make


def files_of(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


async def test_a_store_comes_from_several_boxes_each_of_which_has_a_part(
    tmp_path: Path, packed: Path, copy_of: Callable[..., Path]
) -> None:
    async with house(tmp_path, a=copy_of("a", 2 / 3), b=copy_of("b", 2 / 3)) as made:
        store = await made.pull()
        assert all(box.pieces.sent_bytes for box in made.boxes.values())
    assert store.name == NAME
    assert files_of(store) | {".lock": b""} == files_of(packed) | {".lock": b""}
    assert verify(store) == []


async def test_a_damaged_piece_names_its_box_and_is_taken_from_another(
    tmp_path: Path, packed: Path, copy_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    bad = copy_of("a")
    manifest = Manifest.load(bad)
    for expert in range(6):
        flip(bad / manifest.layers[1].file, manifest.entry(1, expert).offset + 7)
    flip(bad / "dense.safetensors", manifest.dense.bytes - 1)
    flip(bad / "config.json", 3)
    async with house(tmp_path, a=bad, b=copy_of("b")) as made:
        with caplog.at_level(logging.ERROR):
            store = await made.pull()
    assert verify(store) == []
    told = [record for record in caplog.records if "is damaged there" in record.message]
    assert told
    assert {record.box for record in told} == {"a"}  # type: ignore[attr-defined]


async def test_damage_on_all_boxes_is_reported_and_the_rest_is_kept(
    tmp_path: Path, copy_of: Callable[..., Path]
) -> None:
    stores = {name: copy_of(name) for name in ("a", "b")}
    for store in stores.values():
        flip(store / Manifest.load(store).layers[0].file, Manifest.load(store).entry(0, 3).offset)
    async with house(tmp_path, **stores) as made:
        with pytest.raises(StoreError, match=r"1 experts are damaged on every box that has them \(a, b\)"):
            await made.pull()
        assert describe(made.stores_dir / NAME).state == "17 of 18 experts"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("expert", r"1 experts are damaged on every box that has them \(a\)"),
        ("dense", "the dense weights are damaged on every box"),
    ],
)
async def test_an_unreadable_piece_of_the_only_box_with_it_ends_the_download(
    tmp_path: Path, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, part: str, told: str
) -> None:
    for wait in ("RETRY_S", "REFRESH_S"):
        monkeypatch.setattr(store_download, wait, 0.01)
    async with house(tmp_path, a=copy_of("a")) as made:
        manifest, pieces = made.boxes["a"].manifest, made.boxes["a"].pieces
        unreadable = manifest.entry(1, 2).xxh3_128 if part == "expert" else manifest.dense.xxh3_128
        serve = pieces.serve

        async def broken(asked: FetchPiece) -> Answer[BulkMessage]:
            if asked.digest == unreadable:
                raise StoreError("Input/output error")
            return await serve(asked)

        monkeypatch.setattr(pieces, "serve", broken)
        with pytest.raises(StoreError, match=told):
            await asyncio.wait_for(made.pull(), 20)
        monkeypatch.undo()
        assert verify(await made.pull()) == []


async def test_a_damaged_expert_that_one_box_alone_has_names_it(tmp_path: Path, copy_of: Callable[..., Path]) -> None:
    bad = copy_of("a")
    flip(bad / Manifest.load(bad).layers[0].file, Manifest.load(bad).entry(0, 0).offset)
    async with house(tmp_path, a=bad, b=copy_of("b", 5 / 6)) as made:
        with pytest.raises(StoreError, match=r"1 experts are damaged on every box that has them \(a\)"):
            await asyncio.wait_for(made.pull(), 20)


async def test_a_box_that_goes_while_it_gives_costs_nothing(tmp_path: Path, copy_of: Callable[..., Path]) -> None:
    async with house(tmp_path, a=copy_of("a"), b=copy_of("b")) as made:
        pulling = asyncio.ensure_future(made.pull(rate=100e3))
        await until(lambda: len(made.boxes["a"].asked) > 8)
        await made.boxes["a"].die()
        store = await pulling
        assert verify(store) == []


async def test_a_killed_download_continues_and_its_part_is_a_store_already(
    tmp_path: Path, packed: Path, copy_of: Callable[..., Path]
) -> None:
    async with house(tmp_path, a=copy_of("a"), b=copy_of("b")) as made:
        process = await asyncio.create_subprocess_exec(*made.words("--rate", "40KB/s"))
        store = made.stores_dir / NAME
        await until((store / MANIFEST).exists)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        kept = {entry.xxh3_128 for layer in Manifest.load(store).layers for entry in layer.experts}
        assert 0 < len(kept) < 18
        assert "of 18 experts" in describe(store).state
        for box in made.boxes.values():
            box.asked.clear()
        process = await asyncio.create_subprocess_exec(*made.words(), stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert Path(out.decode().strip()) == store
        asked = {digest for box in made.boxes.values() for digest in box.asked}
        assert not kept & asked, "what had come is not asked for again"
        assert Manifest.load(packed).dense.xxh3_128 not in asked
    assert verify(store) == []
    assert not (store / "pulled").exists()


async def test_present_pieces_stay_listed_while_their_sender_is_away(
    tmp_path: Path, packed: Path, copy_of: Callable[..., Path]
) -> None:
    async with house(tmp_path, a=copy_of("a", 2 / 3), b=copy_of("b", 2 / 3)) as made:
        store = await made.pull()
        await made.boxes["b"].die()
        (tmp_path / "peers.toml").write_text((tmp_path / "peers.toml").read_text().split("\n\n")[0])
        assert await made.pull() == store
    assert verify(store) == []
    assert files_of(store) | {".lock": b""} == files_of(packed) | {".lock": b""}


async def test_a_box_that_joins_pulls_from_the_one_it_joins_by(tmp_path: Path, copy_of: Callable[..., Path]) -> None:
    async with house(tmp_path, a=copy_of("a")) as made:
        peer = load_peers(tmp_path / "peers.toml")["a"]
        joining = msgspec.structs.replace(made.settings, peers_file="", address="127.0.0.1:1")
        made.settings = joining
        with pytest.raises(StoreError, match=r"set cluster\.join, or list one"):
            await made.pull()
        made.settings = msgspec.structs.replace(joining, join=f"a,{peer.address},{peer.key}")
        assert verify(await made.pull()) == []


async def test_a_download_reports_other_models_of_boxes_and_the_missing_room(
    tmp_path: Path, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path, a=copy_of("a")) as made:
        with pytest.raises(StoreError, match=rf"no box has nonsense: a serves m \({NAME}\)"):
            await made.pull("nonsense")
        full = SimpleNamespace(f_bavail=10, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda _: full)
        with pytest.raises(StoreError, match=r"needs \d+ bytes .* more than the disk has"):
            await made.pull("tiny")
        assert made.boxes["a"].manifest.dense.xxh3_128 not in made.boxes["a"].asked


async def test_a_full_disk_ends_a_download_with_the_remedy(
    tmp_path: Path, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with house(tmp_path, a=copy_of("a"), b=copy_of("b")) as made:
        for write in ("write", "add_dense"):
            with monkeypatch.context() as planted:
                planted.setattr(PeerCopy, write, full)
                with pytest.raises(StoreError, match="No space left on device; pulling stopped, free some room there"):
                    await made.pull()
        assert verify(await made.pull()) == []


def test_a_manifest_that_takes_long_to_save_takes_nothing_back(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest on disk is the last one saved in between; the rest of the experts was saved after it."""
    begun, other_saved = threading.Event(), threading.Event()

    def slow(_: Path) -> None:
        begun.set()
        other_saved.wait(0.3)

    with open_copy(tmp_path / "store", Manifest.load(packed)) as store:
        first, second, *_ = store.missing()
        monkeypatch.setattr(peer_copy_module, "sync", slow)
        store.mark_present(first)
        saving = threading.Thread(target=store.save)
        saving.start()
        assert begun.wait(60)
        store.mark_present(second)
        store.save()
        other_saved.set()
        saving.join()
        monkeypatch.undo()
        assert sum(len(layer.experts) for layer in Manifest.read(store.directory).layers) == 2


def test_a_manifest_lists_nothing_before_its_file_is_on_disk(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces arrive while another manifest is being saved. Layers' headers are on disk before the first manifest."""
    synced: set[Path] = set()
    pieces: list[ExpertPiece] = []

    def note(path: Path) -> None:
        if path.is_file():
            synced.add(path)
        for _ in range(4):  # they come while the first ones are saved
            if pieces:
                store.mark_present(pieces.pop())

    with open_copy(tmp_path / "store", Manifest.load(packed)) as store:
        monkeypatch.setattr(peer_copy_module, "sync", note)
        flushed, flush = set[str](), os.fsync
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda fd: (flushed.add(os.readlink(f"/proc/self/fd/{fd}")), flush(fd)))
            for layer in range(len(store.whole.layers)):
                store.begin_layer(layer, b"header")
        files = [path for path in flushed if Path(path).parent == store.directory / "experts"]
        assert len(files) == len(store.whole.layers), flushed
        synced.clear()
        pieces += store.missing()
        store.mark_present(pieces.pop(0))
        while store.has_unsaved:
            synced.clear()
            before = listed(store)
            store.save()
            new = listed(store) - before
            assert {store.directory / file for file, _ in new} <= synced
        assert not pieces
        assert store.is_whole


def test_dense_weights_go_on_where_they_ended(tmp_path: Path, packed: Path) -> None:
    """A layer file whose first bytes are not the header that the boxes have is the exception."""
    with open_copy(tmp_path / "store", Manifest.load(packed)) as store:
        assert store.begin_dense(b"header") == 0
        store.add_dense(memoryview(b"seven b"))
        assert store.begin_dense(b"header") == 7
        assert store.begin_dense(b"other header") == 0


def test_a_disk_without_room_is_reported_before_the_first_piece(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_copy(tmp_path / "store", Manifest.load(packed)) as store:
        store.check_room()
        disk = SimpleNamespace(f_bavail=1, f_frsize=4096)
        monkeypatch.setattr(peer_copy_module.os, "statvfs", lambda _: disk)
        with pytest.raises(StoreError, match="more than the disk has; free them, or name another"):
            store.check_room()


def listed(store: PeerCopy) -> set[tuple[str, int]]:
    """Returns the files, and the experts of the manifest."""
    if not (store.directory / MANIFEST).is_file():
        return set()
    layers = Manifest.read(store.directory).layers
    return {(layer.file, entry.expert) for layer in layers for entry in layer.experts}


async def test_pieces_that_come_while_others_are_looked_up_are_handed_out(
    packed: Path, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, whole = copy_of("a", 1 / 3), Manifest.load(packed)
    pieces, look_up = StorePieces(directory, Manifest.load(directory)), peer_copy_module._pieces

    def meanwhile(folder: Path, manifest: Manifest) -> Iterator[object]:
        pieces.grow(whole)
        yield from look_up(folder, manifest)

    monkeypatch.setattr(peer_copy_module, "_pieces", meanwhile)
    await pieces.part(whole.entry(0, 0).xxh3_128, 0, 10)
    monkeypatch.undo()
    last = whole.entry(2, 5)
    assert await pieces.part(last.xxh3_128, 0, 10)


async def test_an_engine_uses_pieces_that_arrive_in_its_store(packed: Path, copy_of: Callable[..., Path]) -> None:
    directory = copy_of("a", 1 / 3)
    manifest = Manifest.load(directory)
    with ExpertStore(directory, manifest) as store:
        shelf = ExpertShelf(manifest, store, spec_of(manifest).geometry)
        pieces, on_disk = StorePieces(directory, manifest), shelf.on_disk()
        growth = StoreWatcher(directory, store, shelf, pieces)
        await growth.poll(on_disk)
        assert on_disk.sum() == 6
        whole = Manifest.load(packed)
        last = whole.entry(2, 5)
        with pytest.raises(StoreError, match="has no piece"):
            await pieces.part(last.xxh3_128, 0, 10)
        whole.save(directory)
        await growth.poll(on_disk)
        assert on_disk.all()
        room = page_memory(padded(last.bytes))
        store.read_into(2, 5, room)
        part, size = await pieces.part(last.xxh3_128, 4, 1 << 20)
        assert size == last.bytes
        assert part == room[4 : last.bytes]


async def test_an_engine_keeps_using_experts_that_a_manifest_no_longer_lists(
    packed: Path, copy_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory, manifest = copy_of("a"), Manifest.load(packed)
    with ExpertStore(directory, manifest) as store:
        shelf = ExpertShelf(manifest, store, spec_of(manifest).geometry)
        on_disk = shelf.on_disk()
        growth = StoreWatcher(directory, store, shelf, StorePieces(directory, manifest))
        Manifest.load(copy_of("b", 2 / 3)).save(directory)
        await growth.poll(on_disk)
        assert on_disk.all()
        store.read_into(0, 0, page_memory(padded(manifest.entry(0, 0).bytes)))
    assert "a store that has changed is used as it was" in caplog.text


async def test_a_pace_limits_bytes_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = TransferPace(1000.0)
    for _ in range(4):
        await pace.reserve(500)
    assert waited == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=0.1)
    pace.give_back(1500)
    await pace.reserve(1)
    assert waited[4] == pytest.approx(0.5, abs=0.1)
    await TransferPace(0.0).reserve(1 << 40)
    assert len(waited) == 5


async def test_heartbeats_wait_behind_no_piece(
    tmp_path: Path, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests at a time would time out over a slow link."""
    beats: dict[str, float] = {}

    def noted(transport: Transport, name: str, *rest: Any) -> Channel[Any]:
        made = Channel[Any](transport, name, *rest)
        beats[name] = made._settings.heartbeat_s
        return made

    monkeypatch.setattr(store_download, "Channel", noted)
    async with house(tmp_path, a=copy_of("a")) as made:
        await made.pull()
    assert beats == {"control": 0.5, "bulk": 0.0}

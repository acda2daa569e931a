"""Listing, verifying and removing stores."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from support.checkpoints import tiny_checkpoint
from support.front_kit import byte_level_tokenizer

from edgemoe import demo
from edgemoe.cli import main
from edgemoe.cli.command_settings import show_progress
from edgemoe.cli.model_tables import packed_listing, packed_table
from edgemoe.cli.output import progress_bar
from edgemoe.cli.serve_command import ready_text
from edgemoe.config.settings import ModelSettings, Settings
from edgemoe.errors import CheckpointError, CorruptExpert, StoreError
from edgemoe.store import catalog as models
from edgemoe.store.checkpoint import check_tokenizer
from edgemoe.store.files import LOCK, note_use
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import JOURNAL, MANIFEST, Manifest
from edgemoe.store.packer import ensure_store, pack
from edgemoe.store.reader import ExpertStore

Make = Callable[..., Path]
CODED = WantedEncodings.parse("int4", "int8")


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 16
    path.write_bytes(raw)


def test_a_whole_store_verifies_and_progress_reaches_the_end(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert models.verify(store, lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] <= seen[-1][1] == Manifest.load(store).total_bytes


def test_verifying_finds_every_damaged_part(store: Path) -> None:
    manifest = Manifest.load(store)
    flip(store / manifest.layers[0].file, manifest.entry(0, 5).offset)
    flip(store / manifest.layers[2].file, manifest.entry(2, 0).offset + 9)
    flip(store / manifest.layers[1].file, 30)
    flip(store / "dense.safetensors", manifest.dense.bytes - 1)
    flip(store / "config.json", 3)
    faults = models.verify(store)
    experts = [(fault.layer, fault.expert) for fault in faults if isinstance(fault, CorruptExpert)]
    assert experts == [(0, 5), (2, 0)]
    assert [Path(str(fault).split()[0]).name for fault in faults if not isinstance(fault, CorruptExpert)] == [
        "layer_001.safetensors",
        "dense.safetensors",
        "config.json",
    ]


@pytest.mark.parametrize("offset", [0, 5, 7, 40])
def test_a_flipped_bit_in_the_dense_header_is_found(store: Path, offset: int) -> None:
    flip(store / "dense.safetensors", offset)
    assert len(models.verify(store)) == 1


def test_verifying_an_unreadable_store_returns_the_reason(store: Path) -> None:
    os.truncate(store / "dense.safetensors", 10)
    assert "dense.safetensors" in str(models.verify(store)[0])
    (store / MANIFEST).unlink()
    assert "packed store" in str(models.verify(store)[0])


def test_the_table_tells_whole_broken_and_unfinished_stores_apart(checkpoint: Make, tmp_path: Path) -> None:
    whole = ensure_store(checkpoint(), tmp_path)
    pack(checkpoint(hidden_size=64, moe_intermediate_size=32), tmp_path / "coded", wanted=CODED)
    pack(checkpoint(family="mixtral"), tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "dense.safetensors", 10)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / JOURNAL).write_text("{}")
    (tmp_path / "unrelated").mkdir()
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(packed_table(tmp_path))
    console.file.close()
    text = console.export_text()
    assert whole.name in text
    assert "complete" in text
    assert "qwen3_moe" in text
    assert "6, top 2" in text
    assert "experts int4; dense int8" in text
    assert "pull it again" in text
    assert "unfinished" in text
    assert "unrelated" not in text
    assert models.find_stores(tmp_path / "nowhere") == []


def test_a_list_tells_when_a_store_was_last_used_and_that_it_is_used_now(store: Path) -> None:
    (packed,) = map(models.describe, models.find_stores(store.parent))
    assert packed.bytes == Manifest.load(store).total_bytes
    os.utime(store / LOCK, (1_000_000_000, 1_000_000_000))
    assert models.verify(store) == []
    assert models.describe(store).last_use.startswith("2001-09-09"), "to verify it is no use"
    with ExpertStore(store, Manifest.load(store)):
        note_use(store)
        assert models.describe(store).last_use == "now"
    assert not models.describe(store).in_use
    assert models.describe(store).last_used_s >= packed.last_used_s > 1_000_000_000
    (store / LOCK).unlink()
    assert models.describe(store).last_use == ""


def test_a_store_is_found_by_path_directory_or_model(checkpoint: Make, tmp_path: Path) -> None:
    store = ensure_store(checkpoint(), tmp_path)
    assert models.resolve(str(store), tmp_path / "elsewhere") == store
    assert models.resolve(store.name, tmp_path) == store
    assert models.resolve("tiny", tmp_path) == store
    assert models.resolve("Org/tiny", tmp_path) == store
    with pytest.raises(StoreError, match=store.name):
        models.resolve("tin", tmp_path)
    with pytest.raises(StoreError, match="`edgemoe pull Org/Name-7B` fetches it"):
        models.resolve("Org/Name-7B", tmp_path)
    ensure_store(checkpoint(family="mixtral"), tmp_path)
    for name in ("tiny", "Org/tiny"):
        with pytest.raises(StoreError, match=f"several stores of the name '{name}'"):
            models.resolve(name, tmp_path)


def test_a_name_is_a_whole_one(store: Path, tmp_path: Path) -> None:
    """The beginning of another model's name is no match."""
    directory = tmp_path / "stores"
    directory.mkdir()
    large = store.rename(directory / "Qwen3-vl-v2-bbd15b5d9b0e")
    with pytest.raises(StoreError, match=r"no store of the name 'Qwen3'; .* Qwen3-vl-v2-bbd15b5d9b0e"):
        models.resolve("Qwen3", directory)
    small = directory / "Qwen3-v2-0123456789ab"
    small.mkdir()
    (small / MANIFEST).write_bytes((large / MANIFEST).read_bytes())
    assert models.resolve("Qwen3", directory) == small
    assert models.resolve("Qwen3-vl", directory) == large


def test_a_folder_without_access_is_no_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like lost+found, if a disk is mounted at the stores."""
    lost, is_file = store.parent / "lost+found", Path.is_file
    lost.mkdir()

    def looked_at(path: Path) -> bool:
        if path.is_relative_to(lost):
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", looked_at)
    assert models.find_stores(store.parent) == [store]


def served_checkpoint(checkpoint: Make) -> Path:
    """Makes a checkpoint with a tokenizer."""
    made = checkpoint()
    byte_level_tokenizer().save(str(made / "tokenizer.json"))
    return made


def test_packing_again_mends_a_store_in_its_place(
    own_checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pack", str(served_checkpoint(own_checkpoint)), "--set", f"model.store_dir={tmp_path / 'stores'}"]
    assert main(command) == 0
    store = Path(capsys.readouterr().out.strip())
    manifest = Manifest.load(store)
    flip(store / manifest.layers[1].file, manifest.entry(1, 2).offset)
    assert len(models.verify(store)) == 1
    assert main(command) == 0
    assert models.verify(store) == []


@pytest.mark.parametrize("words", [("--experts", "int4"), ("--dense", "int8"), ("other",), ("--delete-shards",)])
def test_a_store_is_not_packed_into_another(
    store: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (store / "tokenizer.json").write_text("{}")
    assert main(["pack", str(store), *words]) == 2
    said = capsys.readouterr()
    assert "is a packed store, which stays as it is; name the checkpoint" in said.err
    assert not said.out


def test_a_checkpoint_that_could_not_be_served_is_refused_before_it_is_packed(
    checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelSettings(path=str(checkpoint()), store_dir=str(tmp_path / "stores"))
    assert main(["pack", model.path, "--set", f"model.store_dir={model.store_dir}"]) == 1
    assert "has no tokenizer.json" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        models.store_of(model, show_progress)
    assert not (tmp_path / "stores").exists()


def test_a_store_that_is_unfinished_is_told_from_a_checkpoint(store: Path) -> None:
    (store / MANIFEST).rename(store / JOURNAL)
    for settings in (ModelSettings(path=str(store)), ModelSettings(path=store.name, store_dir=str(store.parent))):
        with pytest.raises(StoreError, match=f"{store.name} is unfinished: pack or pull it again"):
            models.store_of(settings, show_progress)


def test_a_store_given_by_its_path_is_served_under_the_name_in_its_manifest(store: Path) -> None:
    named = models.store_of(ModelSettings(path=str(store)), show_progress)
    assert named.name == Manifest.load(store).name
    assert models.store_of(ModelSettings(path=str(store), name="ours"), show_progress).name == "ours"
    assert ready_text(Settings(model=named)).startswith(f"{named.name} is ready at ")


def test_a_removed_store_is_gone_and_nothing_else_is(store: Path) -> None:
    (store.parent / "beside").write_text("stays")
    models.remove(store)
    assert not store.exists()
    assert (store.parent / "beside").exists()


def test_only_stores_are_removed(tmp_path: Path, store: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(store)
    for path in (home, tmp_path / "link", tmp_path / "nowhere"):
        with pytest.raises(StoreError, match="nothing was removed"):
            models.remove(path)
    assert (home / "thesis.tex").exists()
    assert (store / MANIFEST).exists()


def test_a_store_in_use_is_not_removed(store: Path) -> None:
    with ExpertStore(store, Manifest.load(store)), pytest.raises(StoreError, match="in use"):
        models.remove(store)
    assert models.verify(store) == []


def test_the_bar_shows_rate_and_time_left(checkpoint: Make, tmp_path: Path) -> None:
    console = Console(width=120, force_terminal=True, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with progress_bar("packing tiny", console) as progress:
        pack(checkpoint(), tmp_path, progress)
    console.file.close()
    text = console.export_text()
    assert "packing tiny" in text
    assert "kB" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_name_is_on_one_line_however_narrow_the_terminal(checkpoint: Make, tmp_path: Path, width: int) -> None:
    made = shutil.copytree(checkpoint(), tmp_path / "Qwen3-235B-A22B-Instruct")
    store = ensure_store(made, tmp_path / "stores")
    console = Console(width=width, record=True, file=io.StringIO(), markup=False)
    listed = packed_listing(tmp_path / "stores", width)
    console.print(listed, soft_wrap=isinstance(listed, str))
    lines = console.export_text().splitlines()
    assert sum(store.name in line for line in lines) == 1
    assert any("complete" in line for line in lines)


def test_a_folder_without_stores_is_said_to_be_empty(tmp_path: Path) -> None:
    listed = packed_listing(tmp_path / "missing", 80)
    assert isinstance(listed, str)
    assert listed.startswith(f"No packed models in {tmp_path / 'missing'}")


def test_the_demo_model_is_listed_by_the_name_that_clients_call_it(tmp_path: Path) -> None:
    store = ensure_store(demo.model_path(), tmp_path)
    assert store.name.startswith(f"{demo.NAME}-v")
    assert models.resolve(demo.NAME, tmp_path) == store


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "why"), [(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"{", "is not JSON")]
)
def test_a_file_that_cannot_be_read_is_refused_before_packing(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    check_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} .*{why}"):
        check_tokenizer(tmp_path)


@pytest.mark.parametrize("part", ["up_proj.weight", "down_proj.weight"])
def test_a_folder_that_lacks_a_tensor_is_planned_with_the_fault(part: str, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3_moe", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    assert models.fault_of_weights(source) == ""
    tensors = load_file(source / "model.safetensors")
    del tensors[name := f"model.layers.2.mlp.experts.4.{part}"]
    save_file(tensors, source / "model.safetensors")
    assert f"tensor {name} is missing" in models.fault_of_weights(source)

"""A table of rows is packed into a file of its own, checked, mended, planned for and served."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.kept import STORES
from support.tiny_models import FAMILIES, SIZES

from edgemoe.cli import main
from edgemoe.cli.plan import plan_command
from edgemoe.cli.plan.speed import ModelVariant
from edgemoe.config.settings import MemorySettings, ModelSettings, Settings
from edgemoe.encodings.codec import unpack
from edgemoe.errors import CheckpointError, StoreError
from edgemoe.front.engine_turns import facts_of, needed_memory
from edgemoe.store.catalog import verify
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import MANIFEST, Manifest, rows_file, spec_of
from edgemoe.store.packer import pack
from edgemoe.store.peer_copy import check_manifest
from edgemoe.store.row_table import open_table
from edgemoe.telemetry import metrics as names
from edgemoe.types.encoding import ENCODINGS
from edgemoe.worker.assemble import assemble
from edgemoe.worker.service import row_metrics

NAME, ROWS, WIDTH = "model.embed_tokens_per_layer.weight", 4000, 3 * 32
FILE = rows_file(0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose table is the most of it."""
    directory = tmp_path_factory.mktemp("tabled")
    make_config, make_model, own = FAMILIES["gemma4_text"]
    torch.manual_seed(0)
    table = {"hidden_size_per_layer_input": WIDTH // 3, "vocab_size_per_layer_input": ROWS}
    make_model(make_config(**{**SIZES, **own, **table})).save_pretrained(directory)
    return directory


@pytest.fixture
def checkpoint(weights: Path, tmp_path: Path) -> Path:
    """Its own copy, to be changed."""
    directory = tmp_path / "hf"
    directory.mkdir()
    for path in weights.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def change(checkpoint: Path, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Changes the table of a checkpoint. Returns the changed table."""
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    tensors[NAME] = how(tensors[NAME]).contiguous()
    save_file(tensors, file, {"format": "pt"})
    return tensors[NAME]


@pytest.mark.parametrize(
    ("dtype", "dense", "encoding"),
    [
        (torch.float32, "keep", "float32"),
        (torch.bfloat16, "keep", "bfloat16"),
        (torch.float16, "keep", "bfloat16"),
        (torch.float32, "bf16", "bfloat16"),
        (torch.float32, "int8", "int8"),
        (torch.bfloat16, "int4", "int4"),
    ],
)
def test_the_rows_are_the_checkpoints(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype, dense: str, encoding: str
) -> None:
    expected = change(checkpoint, lambda table: table.to(dtype)).float()
    manifest = pack(checkpoint, tmp_path / "store", wanted=WantedEncodings.parse("keep", dense))
    assert [table.file for table in manifest.tables] == [FILE]
    row_bytes = ENCODINGS[encoding].row_bytes(WIDTH)
    table = open_table(tmp_path / "store" / FILE, NAME, ROWS, [row_bytes])
    numbers = torch.randint(0, ROWS, (500,)).numpy()
    rows = torch.from_numpy(unpack(table.take_rows(numbers), ENCODINGS[encoding], WIDTH))
    table.close()
    loss = {"float32": 0.0, "bfloat16": 0.0 if dtype == torch.bfloat16 else 2**-8, "int8": 0.01, "int4": 0.2}[encoding]
    assert (rows - expected[numbers]).abs().max() <= loss * expected.abs().max()
    assert spec_of(manifest).layer_inputs is not None
    assert not verify(tmp_path / "store")


def test_a_table_that_fits_into_no_block_is_sealed_by_whole_rows(checkpoint: Path, tmp_path: Path) -> None:
    """Rows lie across the blocks in which files are written, and across the pieces in which they are encoded."""
    make = {"hidden_size_per_layer_input": 1000, "vocab_size_per_layer_input": 900}
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **make}))
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    wide = {"per_layer_input_gate": (1000, 64), "per_layer_projection": (64, 1000)}
    for name in list(tensors):
        for part, shape in wide.items():
            if f".{part}." in name:
                tensors[name] = torch.zeros(shape)
    tensors["model.per_layer_model_projection.weight"] = torch.zeros(3000, 64)
    tensors["model.per_layer_projection_norm.weight"] = torch.ones(1000)
    expected = tensors[NAME] = torch.randn(900, 3000)
    save_file(tensors, file, {"format": "pt"})
    pack(checkpoint, tmp_path / "store")
    table = open_table(tmp_path / "store" / FILE, NAME, 900, [12000])
    rows = table.take_rows(torch.arange(900).numpy())
    table.close()
    assert (torch.from_numpy(rows.view("float32")) == expected).all()


def test_weights_that_are_no_numbers_are_refused_by_name_before_the_store_is_finished(
    checkpoint: Path, tmp_path: Path
) -> None:
    change(checkpoint, lambda table: table.index_fill(0, torch.tensor([77]), torch.inf))
    with pytest.raises(CheckpointError, match=NAME):
        pack(checkpoint, tmp_path / "store")
    assert not (tmp_path / "store" / MANIFEST).exists()
    assert not (tmp_path / "store" / FILE).exists()


def test_a_checkpoint_without_its_table_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    save_file({name: each for name, each in load_file(file).items() if name != NAME}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{NAME} is missing.*4000, 96"):
        pack(checkpoint, tmp_path / "store")


def test_a_damaged_table_is_found_and_mended(checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    before = pack(checkpoint, store)
    whole = (store / FILE).read_bytes()
    for damage in (whole[:-1], whole[:9000] + b"\1" + whole[9001:], b"", None):
        if damage is None:
            (store / FILE).unlink()
        else:
            (store / FILE).write_bytes(damage)
        (fault,) = verify(store)
        assert FILE in str(fault)
        assert pack(checkpoint, store) == before
        assert (store / FILE).read_bytes() == whole


def settings(store: Path, **memory: int) -> Settings:
    sizes = {"ram_bytes": 1 << 20, "kv_bytes": 1 << 20, **memory}
    return Settings(model=ModelSettings(path=str(store)), memory=MemorySettings(**sizes))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda raw: raw[:-5], "has .* bytes, not"),
        (lambda raw: raw * 2, "has .* bytes, not"),
        (lambda raw: raw[:20] + b"x" + raw[21:], "damaged"),
        (lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:], "damaged"),
        (lambda raw: b"<html>".ljust(len(raw)), "damaged"),
    ],
)
def test_an_engine_does_not_load_a_bad_table(
    weights: Path, tmp_path: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    store = tmp_path / "store"
    pack(weights, store)
    (store / FILE).write_bytes(damage((store / FILE).read_bytes()))
    with pytest.raises(StoreError, match=f"{FILE}.* {why}"):
        assemble(settings(store), lambda _: None, lambda *_: None)


def test_a_manifest_with_other_tables_than_the_model_is_refused(weights: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    manifest = pack(weights, store)
    text = json.loads((store / MANIFEST).read_text())
    for tables, why in (([], "0 tables of rows"), ([text["tables"][0]] * 2, "cannot lie in|2 tables of rows")):
        other = Manifest.parse(signed({**text, "tables": tables}), "manifest.json")
        other.save(store)
        with pytest.raises(StoreError, match=why):
            spec_of(Manifest.load(store))
    manifest.save(store)
    assert spec_of(Manifest.load(store)) == spec_of(manifest)


def signed(manifest: dict[str, object]) -> bytes:
    from edgemoe.store.manifest import own_checksum

    return json.dumps({**manifest, "checksum": own_checksum(manifest)}).encode()


def test_boxes_do_not_hand_over_a_store_with_tables(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="tables of rows"):
        check_manifest(pack(weights, tmp_path / "store"))


def test_an_engine_keeps_as_many_rows_as_it_is_told(weights: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    pack(weights, store)
    assembly = assemble(settings(store, row_cache_bytes=40 * WIDTH * 4), lambda _: None, lambda *_: None)
    try:
        assert assembly.table is not None
        metrics = row_metrics(assembly.table)
        assert metrics[names.ROW_SLOTS] == 40
        assert metrics[names.ROW_TABLE_BYTES] == assembly.budgets.table_bytes == ROWS * (WIDTH * 4 + 8)
        assert "stay on disk" in assembly.budgets.lines()[0]
    finally:
        assembly.engine.loop.stop()
        assembly.close()


def test_the_table_is_no_part_of_the_memory_that_a_model_needs(weights: Path, tmp_path: Path) -> None:
    manifest = pack(weights, tmp_path / "store")
    own = settings(tmp_path / "store", ram_bytes=0)
    facts = facts_of(own)
    assert facts.table_bytes == manifest.table_bytes > ROWS * WIDTH * 4
    assert needed_memory(own, facts).ram_bytes < manifest.total_bytes
    planned = ModelVariant("", spec_of(manifest), "")
    assert planned.table_bytes == pytest.approx(manifest.table_bytes, abs=8192)
    assert planned.dense_bytes == pytest.approx(manifest.dense.bytes, rel=0.05, abs=8192)


def test_plan_tells_what_stays_on_disk(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plan_command, "COMPILED_S", math.inf)
    monkeypatch.setattr(plan_command, "DEADLINE_S", math.inf)
    assert main(["plan", str(weights), "--json", "--set", f"model.store_dir={STORES}"]) == 0
    found = json.loads(capsys.readouterr().out)["encodings"][0]
    assert found["table_bytes"] == ROWS * (WIDTH * 4 + 8)
    assert 0 < found["row_cache_bytes"] <= found["table_bytes"]
    assert found["tokens_per_s"] > 0

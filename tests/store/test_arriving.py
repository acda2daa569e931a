"""Shards packed as they arrive, in any order, and then deleted give the store of the whole checkpoint."""

from __future__ import annotations

import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import quantised
from support.front_kit import byte_level_tokenizer
from support.killed import killed
from support.waiting import wait_until

from edgemoe.cli import main
from edgemoe.errors import CheckpointError, StoreError, StoreInUse, UnsupportedModel
from edgemoe.store.arriving import arriving_store, pack_arrived
from edgemoe.store.catalog import remove, verify
from edgemoe.store.checkpoint import read_header
from edgemoe.store.files import is_in_use
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import JOURNAL, MANIFEST, SHARDS, Manifest
from edgemoe.store.packer import AS_IT_IS, pack

Make = Callable[..., Path]
SHAPE = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}

CALL = "from edgemoe.store.arriving import pack_arrived; pack_arrived(sys.argv[1], sys.argv[2], step, delete=True)"


class Fetching:
    """A checkpoint with its small files, and with shards that are fetched one by one."""

    def __init__(self, whole: Path, directory: Path) -> None:
        self.whole, self.directory = whole, directory / whole.name
        self.directory.mkdir(parents=True)
        for file in whole.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy2(file, self.directory)
        self.shards = sorted(file.name for file in whole.glob("*.safetensors"))

    def fetch(self, *shards: str) -> None:
        for name in shards:
            shutil.copy2(self.whole / name, self.directory)

    @property
    def there(self) -> list[str]:
        return sorted(file.name for file in self.directory.glob("*.safetensors"))


def files_of(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in store.glob("**/*") if file.is_file()}


@pytest.fixture
def whole(checkpoint: Make) -> Path:
    return checkpoint(sharded=True, **SHAPE)


@pytest.mark.parametrize("wanted", [AS_IT_IS, WantedEncodings.parse("int4,first=int8", "int8")], ids=["keep", "int4"])
@pytest.mark.parametrize("kind", ["separate", "stacked", "fp8", "DeepSeek", "one file"])
def test_shards_in_any_order_make_the_store_of_the_whole_checkpoint(
    checkpoint: Make, tmp_path: Path, kind: str, wanted: WantedEncodings
) -> None:
    family = "deepseek_v3" if kind == "DeepSeek" else "qwen3_moe"
    shape = {} if kind == "DeepSeek" else SHAPE
    whole = checkpoint(family, stacked=kind == "stacked", sharded=kind != "one file", **shape)
    if kind == "fp8":
        whole = shutil.copytree(checkpoint(**SHAPE), tmp_path / "fp8" / "tiny")
        quantised.quantise(whole, quantised.block_fp8, quantised.ABOUT_FP8, quantised.is_expert)
    pack(whole, tmp_path / "expected", wanted=wanted)
    fetching = Fetching(whole, tmp_path / "source")
    assert len(fetching.shards) == 1 or len(fetching.shards) > 4
    order = random.Random(3).sample(fetching.shards, len(fetching.shards))
    for number, name in enumerate(order, start=1):
        fetching.fetch(name)
        found = pack_arrived(fetching.directory, tmp_path / "store", wanted=wanted, delete=True)
        assert not fetching.there
        assert found.missing == tuple(sorted(order[number:]))
    assert files_of(tmp_path / "store") == files_of(tmp_path / "expected")
    assert pack_arrived(fetching.directory, tmp_path / "store", wanted=wanted, delete=True).missing == ()


def test_of_deleted_shards_only_tensors_of_no_finished_layer_are_kept(whole: Path, tmp_path: Path) -> None:
    fetching, kept, layers = Fetching(whole, tmp_path / "source"), set(), []
    for name in fetching.shards[:-1]:
        fetching.fetch(name)
        pack_arrived(fetching.directory, tmp_path / "store", delete=True)
        kept = {key for file in (tmp_path / "store" / "shards").glob("*.safetensors") for key in read_header(file)}
        layers.append([int(file.stem[-3:]) for file in (tmp_path / "store" / "experts").iterdir()])
    assert len(layers[0]) < len(layers[-1]), "layers are written as they come"
    assert not [name for name in kept for layer in layers[-1] if f"layers.{layer}.mlp.experts" in name]
    assert "model.embed_tokens.weight" in kept
    assert not (tmp_path / "store" / MANIFEST).exists()


def test_without_deleting_the_checkpoint_stays_as_it_is(whole: Path, tmp_path: Path) -> None:
    pack(whole, tmp_path / "expected")
    fetching = Fetching(whole, tmp_path / "source")
    for name in fetching.shards:
        fetching.fetch(name)
        pack_arrived(fetching.directory, tmp_path / "store")
    assert fetching.there == fetching.shards
    assert files_of(tmp_path / "store") == files_of(tmp_path / "expected")


def test_a_shard_that_has_arrived_in_part_is_waited_for(whole: Path, tmp_path: Path) -> None:
    fetching, store = Fetching(whole, tmp_path / "source"), tmp_path / "store"
    fetching.fetch(*fetching.shards)
    half = fetching.directory / fetching.shards[1]
    data = half.read_bytes()
    for size in (0, 5, 100, len(data) - 1):
        half.write_bytes(data[:size])
        assert pack_arrived(fetching.directory, store, delete=True).missing == (half.name,)
        assert fetching.there == [half.name]
    half.write_bytes(data)
    assert not pack_arrived(fetching.directory, store, delete=True).missing
    assert not fetching.there
    assert {entry.xxh3_128 for layer in Manifest.load(store).layers for entry in layer.experts}


def test_a_shard_that_comes_again_is_deleted_again(whole: Path, tmp_path: Path) -> None:
    fetching = Fetching(whole, tmp_path / "source")
    for name in fetching.shards[:2]:
        fetching.fetch(fetching.shards[0], name)
        pack_arrived(fetching.directory, tmp_path / "store", delete=True)
        assert not fetching.there


def test_shards_that_change_beside_their_store_are_not_deleted(whole: Path, tmp_path: Path) -> None:
    fetching, store = Fetching(whole, tmp_path / "source"), tmp_path / "store"
    fetching.fetch(fetching.shards[0])
    pack_arrived(fetching.directory, store, delete=True)
    again = fetching.directory / fetching.shards[0]
    shutil.copy2(whole / fetching.shards[1], again)
    with pytest.raises(StoreError, match="another file than the one that was packed"):
        pack_arrived(fetching.directory, store, delete=True)
    again.unlink()
    fetching.fetch(*fetching.shards[1:])
    assert not pack_arrived(fetching.directory, store, delete=True).missing
    fetching.fetch(fetching.shards[0])
    with pytest.raises(StoreError, match="has come again or changed since"):
        pack_arrived(fetching.directory, store, delete=True)
    assert fetching.there == fetching.shards[:1]


def test_a_packer_killed_after_it_finished_leaves_nothing_to_do(checkpoint: Make, tmp_path: Path) -> None:
    fetching, store = Fetching(checkpoint(**SHAPE), tmp_path / "source"), tmp_path / "store"
    fetching.fetch(*fetching.shards)
    pack_arrived(fetching.directory, store)
    expected = files_of(store)
    (store / JOURNAL).write_text("{}")  # the manifest exists, and the files of packing are not removed yet
    (store / SHARDS).mkdir()
    assert not pack_arrived(fetching.directory, store, delete=True).missing
    assert files_of(store) == expected
    assert not fetching.there


def test_files_that_do_not_match_the_index_are_refused_by_name(whole: Path, tmp_path: Path) -> None:
    fetching, store = Fetching(whole, tmp_path / "source"), tmp_path / "store"
    fetching.fetch(fetching.shards[0])
    (fetching.directory / fetching.shards[1]).write_bytes(b"<html>" * 100)
    with pytest.raises(CheckpointError, match=rf"{fetching.shards[1]} is a web page"):
        pack_arrived(fetching.directory, store, delete=True)
    shutil.copy2(whole / fetching.shards[2], fetching.directory / fetching.shards[1])
    with pytest.raises(CheckpointError, match=f"is in {fetching.shards[1]}; it is not there"):
        pack_arrived(fetching.directory, store, delete=True)
    assert fetching.shards[0] in fetching.there


def test_an_unknown_family_is_refused_before_anything_is_written(whole: Path, tmp_path: Path) -> None:
    fetching = Fetching(whole, tmp_path / "source")
    config = fetching.directory / "config.json"
    config.write_text(config.read_text().replace("Qwen3MoeForCausalLM", "NoSuchMoeForCausalLM"))
    with pytest.raises(UnsupportedModel, match="NoSuchMoeForCausalLM"):
        pack_arrived(fetching.directory, tmp_path / "store", delete=True)
    assert not (tmp_path / "store").exists()


def test_packed_shards_are_not_discarded_for_other_encodings(whole: Path, tmp_path: Path) -> None:
    fetching, store = Fetching(whole, tmp_path / "source"), tmp_path / "store"
    fetching.fetch(fetching.shards[0])
    pack_arrived(fetching.directory, store, delete=True)
    with pytest.raises(StoreError, match="for other encodings"):
        pack_arrived(fetching.directory, store, wanted=WantedEncodings.parse("int4", "keep"), delete=True)
    with pytest.raises(StoreError, match="packed as they arrived"):
        pack(whole, store)
    fetching.fetch(*fetching.shards[1:])
    assert not pack_arrived(fetching.directory, store, delete=True).missing
    with pytest.raises(StoreError, match="in other encodings"):
        pack_arrived(fetching.directory, store, wanted=WantedEncodings.parse("int4", "keep"), delete=True)


@pytest.mark.parametrize("shards_are_left", [True, False], ids=["shards", "no shards"])
@pytest.mark.parametrize(
    ("held", "asked"),
    [
        (("int4", "keep"), ("keep", "keep")),
        (("int4", "keep"), ("bf16", "keep")),
        (("int4", "keep"), ("int4", "int8")),
        (("int4", "int8"), ("int4", "keep")),
        (("int4,last=int8", "keep"), ("int4", "keep")),
    ],
)
def test_no_shard_is_deleted_for_a_finished_store_in_other_encodings(
    whole: Path, tmp_path: Path, held: tuple[str, str], asked: tuple[str, str], shards_are_left: bool
) -> None:
    fetching, store = Fetching(whole, tmp_path / "source"), tmp_path / "store"
    fetching.fetch(*fetching.shards)
    pack_arrived(fetching.directory, store, wanted=WantedEncodings.parse(*held), delete=not shards_are_left)
    with pytest.raises(StoreError, match="in other encodings"):
        pack_arrived(fetching.directory, store, wanted=WantedEncodings.parse(*asked), delete=True)
    assert fetching.there == (fetching.shards if shards_are_left else [])
    assert not pack_arrived(fetching.directory, store, wanted=WantedEncodings.parse(*held), delete=True).missing
    assert not fetching.there


def test_experts_in_float32_and_bfloat16_are_distinguished(checkpoint: Make, tmp_path: Path) -> None:
    """Neither store names an encoding, for both are plain."""
    fetching = Fetching(checkpoint(sharded=True, dtype=torch.float32, **SHAPE), tmp_path / "source")
    fetching.fetch(*fetching.shards)
    pack_arrived(fetching.directory, tmp_path / "store")
    with pytest.raises(StoreError, match="in other encodings"):
        pack_arrived(fetching.directory, tmp_path / "store", wanted=WantedEncodings.parse("bf16", "bf16"), delete=True)
    with pytest.raises(StoreError, match="in other encodings"):
        pack(fetching.directory, tmp_path / "store", wanted=WantedEncodings.parse("bf16", "bf16"))
    assert fetching.there == fetching.shards


def check_killed(whole: Path, folder: Path, expected: dict[str, bytes], steps: int) -> None:
    fetching = Fetching(whole, folder)
    fetching.fetch(*fetching.shards)
    died = killed(CALL, fetching.directory, folder / "store", steps)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not pack_arrived(fetching.directory, folder / "store", delete=True).missing
    assert files_of(folder / "store") == expected
    assert not fetching.there


def test_a_packer_killed_at_any_point_loses_no_deleted_shard(whole: Path, tmp_path: Path) -> None:
    fetching = Fetching(whole, tmp_path / "undisturbed")
    fetching.fetch(*fetching.shards)
    total = int(killed(CALL, fetching.directory, tmp_path / "whole", 0).stdout)
    expected = files_of(tmp_path / "whole")
    assert total > 100
    for number, steps in enumerate(random.Random(5).sample(range(1, total), 9)):
        check_killed(whole, tmp_path / str(number), expected, steps)


@pytest.mark.slow
def test_a_packer_killed_at_every_single_point_loses_nothing(whole: Path, tmp_path: Path) -> None:
    fetching = Fetching(whole, tmp_path / "undisturbed")
    fetching.fetch(*fetching.shards)
    total = int(killed(CALL, fetching.directory, tmp_path / "whole", 0).stdout)
    expected = files_of(tmp_path / "whole")
    for steps in range(1, total):
        check_killed(whole, tmp_path / str(steps), expected, steps)
        shutil.rmtree(tmp_path / str(steps))


def test_the_hubs_cache_is_freed_where_the_checkpoint_is_links_into_it(whole: Path, tmp_path: Path) -> None:
    fetching, blobs = Fetching(whole, tmp_path / "source"), tmp_path / "blobs"
    blobs.mkdir()
    for name in fetching.shards:
        shutil.copy2(whole / name, blobs)
        (fetching.directory / name).symlink_to(blobs / name)
    assert not pack_arrived(fetching.directory, tmp_path / "store", delete=True).missing
    assert not list(blobs.iterdir())


def test_the_command_names_missing_shards_and_prints_the_store_when_it_is_whole(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetching = Fetching(whole, tmp_path / "source")
    byte_level_tokenizer().save(str(fetching.directory / "tokenizer.json"))
    arguments = ["pack", str(fetching.directory), "--delete-shards", "--set", f"model.store_dir={tmp_path / 'stores'}"]
    fetching.fetch(*fetching.shards[1:])
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert fetching.shards[0] in said.err
    assert not said.out
    fetching.fetch(fetching.shards[0])
    assert main(arguments) == 0
    store = Path(capsys.readouterr().out.strip())
    assert store == arriving_store(fetching.directory, tmp_path / "stores", AS_IT_IS)
    assert Manifest.load(store).name == whole.name
    assert main([*arguments, "--check", str(tmp_path / "text")]) == 2
    assert "--check reads the checkpoint" in capsys.readouterr().err


def test_the_command_waits_for_shards_that_are_still_to_come(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgemoe.cli.pack.POLL_S", 0.05)
    fetching, codes = Fetching(whole, tmp_path / "source"), []
    byte_level_tokenizer().save(str(fetching.directory / "tokenizer.json"))
    command = ["pack", str(fetching.directory), str(tmp_path / "store"), "--wait", "--delete-shards"]
    packing = threading.Thread(target=lambda: codes.append(main(command)))
    packing.start()
    for name in fetching.shards:
        fetching.fetch(name)
        wait_until(lambda: not fetching.there)
    packing.join(60)
    assert codes == [0]
    assert (tmp_path / "store" / MANIFEST).is_file()
    assert "waiting for" in capsys.readouterr().err


def test_a_store_that_waits_for_shards_cannot_be_removed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching, store = Fetching(whole, tmp_path / "source"), tmp_path / "store"
    byte_level_tokenizer().save(str(fetching.directory / "tokenizer.json"))
    fetching.fetch(fetching.shards[0])

    def sleep(_: float) -> None:
        assert is_in_use(store)
        with pytest.raises(StoreInUse):
            remove(store)
        fetching.fetch(*fetching.shards[1:])

    monkeypatch.setattr("edgemoe.cli.pack.time", SimpleNamespace(sleep=sleep))
    assert main(["pack", str(fetching.directory), str(store), "--wait", "--delete-shards"]) == 0
    assert verify(store) == []
    remove(store)
    assert not store.exists()

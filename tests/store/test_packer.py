"""Packing real checkpoints: the store's contents, and the refusals."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from support.quantised import ABOUT_FP8, block_fp8, compressed, is_expert, packed, quantise
from support.waiting import wait_until

from edgemoe.errors import CheckpointError, StoreError, StoreVersionError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import dense_shapes
from edgemoe.store.arriving import pack_arrived
from edgemoe.store.catalog import verify
from edgemoe.store.checkpoint import MAX_JSON_BYTES
from edgemoe.store.files import lock_store
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import JOURNAL, MANIFEST, Manifest
from edgemoe.store.packer import ensure_store, pack
from edgemoe.store.reader import ExpertStore
from edgemoe.store.writer import to_bfloat16

Make = Callable[..., Path]
FAMILIES = ("mixtral", "qwen3_moe")


def weights_of(store: Path) -> dict[str, bytes]:
    files = [store / "dense.safetensors", *sorted((store / "experts").iterdir())]
    return {file.name: file.read_bytes() for file in files}


def edit_config(source: Path, **changes: object) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(source: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_store_has_every_tensor_of_the_model_bit_for_bit(
    checkpoint: Make, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    source = checkpoint(family=family, dtype=dtype, stacked=True)
    manifest = pack(source, tmp_path)
    theirs = load_torch(source / "model.safetensors")
    dense = load_torch(tmp_path / "dense.safetensors")
    spec = spec_from_config(manifest.spec_config)
    assert set(dense) == set(dense_shapes(spec))
    assert all(torch.equal(dense[name], theirs[name]) for name in dense)
    for layer in spec.expert_layers:
        names = spec.names.experts(layer)
        ours = load_torch(tmp_path / manifest.layers[layer].file)
        for name, part in zip((names.gate_up, names.down), ("gate_up_proj", "down_proj"), strict=True):
            stacked = torch.stack([ours[f"experts.{expert}.{part}"] for expert in range(spec.geometry.experts)])
            assert torch.equal(stacked, theirs[name])


def test_an_expert_is_one_aligned_run_of_gate_up_then_down(checkpoint: Make, tmp_path: Path) -> None:
    source = checkpoint(stacked=True)
    manifest = pack(source, tmp_path)
    theirs = load_torch(source / "model.safetensors")
    spec = spec_from_config(manifest.spec_config)
    gate_up, down = (theirs[name] for name in spec.names.experts(1)[:2])
    entry = manifest.entry(1, 3)
    raw = (tmp_path / manifest.layers[1].file).read_bytes()[entry.offset : entry.offset + entry.bytes]
    assert entry.offset % 4096 == 0
    assert entry.bytes == spec.geometry.expert_bytes(0)
    assert raw == gate_up[3].numpy().tobytes() + down[3].numpy().tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_saving_a_model_gives_the_same_store(checkpoint: Make, tmp_path: Path, family: str) -> None:
    ways = [(stacked, sharded) for stacked in (False, True) for sharded in (False, True)]
    stores = []
    for number, (stacked, sharded) in enumerate(ways):
        manifest = pack(checkpoint(family=family, stacked=stacked, sharded=sharded), tmp_path / str(number))
        stores.append((manifest.digest, manifest.layers, weights_of(tmp_path / str(number))))
    assert all(store == stores[0] for store in stores)


def test_both_families_store_the_same_experts_in_the_same_bytes(own_checkpoint: Make, tmp_path: Path) -> None:
    source = own_checkpoint(family="qwen3_moe", head_dim=8)
    pack(source, tmp_path / "qwen3_moe")

    def rename(tensors: dict[str, np.ndarray]) -> None:
        projections = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for name in list(tensors):
            other = name.replace(".mlp.", ".block_sparse_moe.")
            for theirs, ours in projections.items():
                other = other.replace(theirs, ours)
            tensors[other] = tensors.pop(name)
            if "_norm.weight" in name and "self_attn" in name:
                del tensors[name]

    edit_tensors(source, rename)
    edit_config(source, architectures=["MixtralForCausalLM"], model_type="mixtral", intermediate_size=20)
    pack(source, tmp_path / "mixtral")
    ours, theirs = weights_of(tmp_path / "qwen3_moe"), weights_of(tmp_path / "mixtral")
    assert ours.pop("dense.safetensors") != theirs.pop("dense.safetensors")
    assert ours == theirs


def test_float16_is_rounded_to_bfloat16_as_torch_rounds_it(
    checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoint(dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        manifest = pack(source, tmp_path)
    said = re.search(r"rounded to bfloat16; the RMS error is (\S+) % of the weights", caplog.text)
    assert said is not None
    assert 0.1 < float(said[1]) < 0.2, "half a unit in the last of 8 bits, over the root of 3 and a mean of mantissas"
    assert manifest.spec_config["dtype"] == "bfloat16"
    theirs = load_torch(source / "model.safetensors")
    dense = load_torch(tmp_path / "dense.safetensors")
    assert all(torch.equal(dense[name], theirs[name].to(torch.bfloat16)) for name in dense)


@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2_moe", "gpt_oss", "deepseek_v3"])
def test_float16_is_exact_in_float32(
    family: str, checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Norms, gates and kernels of convolutions, too, which no option encodes."""
    source = checkpoint(family, dtype=torch.float16)
    plain = shutil.copytree(source, tmp_path / "plain")
    theirs = load_torch(source / "model.safetensors")
    save_torch({name: each.float() for name, each in theirs.items()}, plain / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        pack(source, tmp_path / "store", wanted=WantedEncodings.parse("f32", "f32"))
    assert "rounded" not in caplog.text
    pack(plain, tmp_path / "wanted")
    assert all(
        np.array_equal(load_file(tmp_path / "store" / name)[each], weights)
        for name in ("dense.safetensors", "experts/layer_000.safetensors")
        for each, weights in load_file(tmp_path / "wanted" / name).items()
    )


def test_of_float16_as_few_tensors_count_as_rounded_as_are(
    checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoint(dtype=torch.float16)
    experts = sum(".experts." in name for name in load_torch(source / "model.safetensors"))
    with caplog.at_level(logging.WARNING):
        pack(source, tmp_path / "store", wanted=WantedEncodings.parse("keep", "f32"))
    assert f"{experts} float16 tensors are rounded" in caplog.text


def test_rounding_agrees_with_torch_for_every_float16() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    ours = torch.from_numpy(to_bfloat16(halves).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(halves).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))


def test_packing_again_changes_nothing_and_loses_nothing(checkpoint: Make, tmp_path: Path) -> None:
    first = pack(checkpoint(), tmp_path)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("**/*.safetensors")}
    assert pack(checkpoint(), tmp_path) == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("**/*.safetensors")} == times


def test_packing_again_repairs_damaged_files_only(checkpoint: Make, tmp_path: Path) -> None:
    manifest = pack(checkpoint(), tmp_path)
    before = weights_of(tmp_path)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("**/*.safetensors")}
    damaged = tmp_path / manifest.layers[1].file
    raw = bytearray(damaged.read_bytes())
    raw[manifest.entry(1, 2).offset + 5] ^= 1
    damaged.write_bytes(raw)
    (tmp_path / manifest.layers[2].file).unlink()
    assert pack(checkpoint(), tmp_path) == manifest
    assert weights_of(tmp_path) == before
    changed = {file.name for file, time in times.items() if file.stat().st_mtime_ns != time}
    assert changed == {"layer_001.safetensors", "layer_002.safetensors"}


def test_a_damaged_manifest_is_rewritten(checkpoint: Make, store: Path) -> None:
    before = (store / MANIFEST).read_bytes()
    (store / MANIFEST).write_bytes(before[: len(before) // 2])
    with pytest.raises(StoreError, match="not a manifest"):
        Manifest.load(store)
    pack(checkpoint(), store)
    assert (store / MANIFEST).read_bytes() == before


def test_the_store_keeps_tokenizer_template_and_configuration(own_checkpoint: Make, tmp_path: Path) -> None:
    source = own_checkpoint()
    kept = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "{{ messages }}"}
    for name, text in kept.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("not kept")
    manifest = pack(source, tmp_path / "store")
    assert {name: (tmp_path / "store" / name).read_text() for name in kept} == kept
    assert manifest.config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "store" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert {entry.file for entry in manifest.files} == {*kept, "config.json", "generation_config.json"}


def test_progress_runs_from_something_to_everything(checkpoint: Make, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    pack(checkpoint(), tmp_path, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_checkpoint_is_packed_on_first_use_only(checkpoint: Make, tmp_path: Path) -> None:
    calls: list[int] = []
    store = ensure_store(checkpoint(), tmp_path, lambda done, total: calls.append(done))
    assert calls
    calls.clear()
    assert ensure_store(checkpoint(), tmp_path, lambda done, total: calls.append(done)) == store
    assert ensure_store(store, tmp_path / "elsewhere") == store
    assert not calls
    assert not (tmp_path / "elsewhere").exists()
    assert store.parent == tmp_path
    assert store.name.startswith("tiny-v")


def test_a_snapshot_in_the_hubs_cache_is_named_after_its_repository(own_checkpoint: Make, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-30B-A3B" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in own_checkpoint().iterdir():
        (snapshot / file.name).symlink_to(file)
    assert ensure_store(snapshot, tmp_path / "stores").name.startswith("Qwen3-30B-A3B-v")


def test_a_changed_checkpoint_gets_a_store_of_its_own(own_checkpoint: Make, tmp_path: Path) -> None:
    source = own_checkpoint()
    first = ensure_store(source, tmp_path / "stores")
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert ensure_store(source, tmp_path / "stores") != first
    with pytest.raises(StoreError, match="another checkpoint"):
        pack(source, first)


# --- refused checkpoints ---------------------------------------------------------------------------------------


def refusal(source: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    """Returns the error of packing `source`, which must leave no file behind."""
    target = source.parent / "refused"
    with pytest.raises(kind) as caught:
        pack(source, target)
    assert not target.exists()
    return str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(own_checkpoint: Make, name: str) -> None:
    source = own_checkpoint()
    (source / "model.safetensors").rename(source / name)
    assert "pickle" in refusal(source)


def test_an_unknown_architecture_is_refused_naming_the_known_ones(own_checkpoint: Make) -> None:
    source = own_checkpoint()
    edit_config(source, architectures=["LlamaForCausalLM"])
    message = refusal(source, UnsupportedModel)
    assert "LlamaForCausalLM" in message
    assert "MixtralForCausalLM" in message
    assert "Qwen3MoeForCausalLM" in message


@pytest.mark.parametrize("stacked", [False, True])
def test_a_shape_unlike_the_configurations_is_refused_naming_both(own_checkpoint: Make, stacked: bool) -> None:
    source = own_checkpoint(stacked=stacked)
    edit_config(source, moe_intermediate_size=24)
    message = refusal(source)
    expected, found = ("[6, 48, 32]", "[6, 40, 32]") if stacked else ("[24, 32]", "[20, 32]")
    assert "layers.0.mlp.experts" in message
    assert expected in message
    assert found in message


def test_a_missing_tensor_is_named(own_checkpoint: Make) -> None:
    source = own_checkpoint()
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    edit_tensors(source, lambda tensors: tensors.pop(name))
    assert name in refusal(source)


def test_a_tensor_that_the_decoder_would_ignore_is_refused(own_checkpoint: Make) -> None:
    source = own_checkpoint()
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(48, np.float32)}
    edit_tensors(source, lambda tensors: tensors.update(bias))
    assert "q_proj.bias" in refusal(source, UnsupportedModel)


def test_buffers_and_a_tied_head_are_left_out_in_silence(own_checkpoint: Make, tmp_path: Path) -> None:
    source = own_checkpoint()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    edit_tensors(source, lambda tensors: tensors.update(buffer))
    edit_config(source, tie_word_embeddings=True)
    pack(source, tmp_path / "store")
    with safe_open(tmp_path / "store" / "dense.safetensors", "np") as dense:
        assert "lm_head.weight" not in dense.keys()  # noqa: SIM118


def test_a_tensor_under_two_of_its_names_is_refused(own_checkpoint: Make) -> None:
    source = own_checkpoint(family="mixtral")
    old = "model.layers.0.block_sparse_moe.gate.weight"
    edit_tensors(source, lambda tensors: tensors.update({old.replace("block_sparse_moe", "mlp"): tensors[old]}))
    assert "the same tensor" in refusal(source)


def test_weights_of_an_integer_type_are_refused(own_checkpoint: Make) -> None:
    source = own_checkpoint()
    name = "model.norm.weight"
    edit_tensors(source, lambda tensors: tensors.update({name: tensors[name].astype(np.int32)}))
    assert "I32" in refusal(source, UnsupportedModel)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_weight_file_is_named(own_checkpoint: Make, sharded: bool) -> None:
    source = own_checkpoint(sharded=sharded)
    victim = sorted(source.glob("*.safetensors"))[-1]
    os.truncate(victim, victim.stat().st_size - 1)
    message = refusal(source)
    assert victim.name in message
    assert "cut short" in message


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_packing_can_go_on(
    own_checkpoint: Make, tmp_path: Path
) -> None:
    source, target = own_checkpoint(), tmp_path / "store"
    weights = source / "model.safetensors"
    whole, times = weights.read_bytes(), weights.stat()
    with pytest.raises(CheckpointError, match="cannot be read, within tensor"):
        pack(source, target, lambda done, total: os.truncate(weights, 5000))
    assert not list(target.glob("**/*.tmp"))
    assert (target / JOURNAL).exists()
    weights.write_bytes(whole)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    pack(source, target)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", ""])
def test_an_index_that_points_elsewhere_is_refused(own_checkpoint: Make, name: str) -> None:
    source = own_checkpoint(sharded=True)
    (source.parent / "outside.safetensors").write_bytes(b"")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "points at" in refusal(source)


def test_an_index_that_disagrees_with_its_files_is_refused(own_checkpoint: Make) -> None:
    source = own_checkpoint(sharded=True)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    was = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.weight"] = next(file for file in files if file != was)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.norm.weight" in refusal(source)


def test_a_tensor_in_two_shards_is_refused(own_checkpoint: Make) -> None:
    source = own_checkpoint(sharded=True)
    first, second = sorted(source.glob("*.safetensors"))[:2]
    copied = next(iter(load_file(first).items()))
    save_file({**load_file(second), copied[0]: copied[1]}, second)
    message = refusal(source)
    assert copied[0] in message
    assert first.name in message
    assert second.name in message


def test_a_missing_shard_is_named(own_checkpoint: Make) -> None:
    source = own_checkpoint(sharded=True)
    victim = sorted(source.glob("*.safetensors"))[1]
    victim.unlink()
    assert victim.name in refusal(source)


def test_a_configuration_that_promises_too_much_is_refused_at_once(own_checkpoint: Make) -> None:
    source = own_checkpoint()
    edit_config(source, num_hidden_layers=10**12)
    assert "layers" in refusal(source)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 50_000, '{"a": 1, "a": 2}'])
def test_a_configuration_that_is_no_json_object_is_refused(own_checkpoint: Make, text: str) -> None:
    source = own_checkpoint()
    (source / "config.json").write_text(text)
    assert "config.json" in refusal(source)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "is this a model's directory?" in refusal(tmp_path / "nowhere")


def test_a_file_of_a_model_is_told_from_its_folder(checkpoint: Make) -> None:
    source = checkpoint()
    assert f"{source}/config.json is a file; name the folder" in refusal(source / "config.json")


def test_a_directory_with_other_things_in_it_is_left_alone(checkpoint: Make, tmp_path: Path) -> None:
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "thesis.tmp").write_text("years of work")
    for pack_into in (pack, pack_arrived):
        with pytest.raises(StoreError, match=r"thesis\.tmp"):
            pack_into(checkpoint(), desk)
    assert [file.name for file in desk.iterdir()] == ["thesis.tmp"]
    assert (desk / "thesis.tmp").read_text() == "years of work"


def test_a_store_of_another_version_is_refused(checkpoint: Make, store: Path) -> None:
    text = (store / MANIFEST).read_text()
    (store / MANIFEST).write_text(text.replace('"version": 2', '"version": 99', 1))
    with pytest.raises(StoreVersionError, match="99"):
        Manifest.load(store)
    with pytest.raises(StoreVersionError):
        pack(checkpoint(), store)


def test_two_packers_do_not_meet(checkpoint: Make, tmp_path: Path) -> None:
    with lock_store(tmp_path, exclusive=True), pytest.raises(StoreError, match="in use"):
        pack(checkpoint(), tmp_path)
    pack(checkpoint(), tmp_path)


def test_a_second_packer_waits_and_names_the_model(
    checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoint()
    store = ensure_store(source, tmp_path)
    (store / MANIFEST).rename(tmp_path / "aside")
    caplog.set_level("INFO")
    with ThreadPoolExecutor() as pool:
        with lock_store(store, exclusive=True):
            others = [pool.submit(ensure_store, source, tmp_path) for _ in range(3)]
            wait_until(lambda: caplog.text.count("waiting for another process") == 3)
            (tmp_path / "aside").rename(store / MANIFEST)
        assert [other.result(60) for other in others] == [store] * 3


def test_of_several_that_want_a_model_at_once_all_get_it(checkpoint: Make, tmp_path: Path) -> None:
    source = checkpoint()

    def ready(_: int) -> Path:
        store = ensure_store(source, tmp_path)
        with ExpertStore(store, Manifest.load(store)):
            return store

    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(ready, range(3)))) == 1


def test_a_full_disk_is_found_out_before_anything_is_written(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:3], 10, 10, *real[5:]]))
        with pytest.raises(StoreError, match="room"):
            pack(checkpoint(), tmp_path)
    assert not list(tmp_path.glob("**/*.safetensors"))
    pack(checkpoint(), tmp_path)


def test_half_a_store_of_another_checkpoint_is_discarded(checkpoint: Make, tmp_path: Path) -> None:
    """Even if it has the same shapes, so that its files look right."""
    pack(checkpoint(seed=1), tmp_path / "store")
    (tmp_path / "store" / MANIFEST).unlink()
    (tmp_path / "store" / JOURNAL).write_text('{"version":1,"source":"something else"}')
    pack(checkpoint(), tmp_path / "store")
    pack(checkpoint(), tmp_path / "fresh")
    assert weights_of(tmp_path / "store") == weights_of(tmp_path / "fresh")


def test_one_file_of_weights_may_be_called_anything_and_several_need_an_index(
    own_checkpoint: Make, tmp_path: Path
) -> None:
    source = own_checkpoint()
    whole = pack(source, tmp_path / "by its name")
    (source / "model.safetensors").rename(source / "weights.safetensors")
    assert pack(source, tmp_path / "by another").digest == whole.digest
    shutil.copy(source / "weights.safetensors", source / "more.safetensors")
    with pytest.raises(CheckpointError, match="has 2 safetensors files but no model"):
        pack(source, tmp_path / "several")


def test_writes_that_are_cut_short_are_gone_on_with(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack(checkpoint(), tmp_path / "whole")
    pwrite, cut = os.pwrite, random.Random(0)

    def short(fd: int, data: memoryview, offset: int) -> int:
        if len(data) >= 4096 and len(data) % 4096 == 0:
            return pwrite(fd, data[: 4096 * cut.randint(1, len(data) // 4096)], offset)
        return pwrite(fd, data[: cut.randint(1, max(1, len(data)))], offset)

    monkeypatch.setattr("edgemoe.store.writer.os.pwrite", short)
    assert pack(checkpoint(), tmp_path / "cut").digest == whole.digest
    assert verify(tmp_path / "cut") == []

    def not_direct(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "the file system has no such thing")
        return pwrite(fd, data, offset)

    monkeypatch.setattr("edgemoe.store.writer.os.pwrite", not_direct)
    assert pack(checkpoint(), tmp_path / "cached").digest == whole.digest
    assert verify(tmp_path / "cached") == []


NOT_FINITE = (math.nan, math.inf, -math.inf)
PLACES = ("mlp.experts.3.up_proj.weight", "mlp.gate.weight", "input_layernorm.weight", "self_attn.k_proj.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["keep", "int4", "int8", "bf16"])
@pytest.mark.parametrize("place", [*(f"model.layers.1.{each}" for each in PLACES), "model.embed_tokens.weight"])
def test_a_weight_that_is_no_number_is_refused_by_its_name(
    checkpoint: Make, tmp_path: Path, place: str, wanted: str, dtype: torch.dtype
) -> None:
    source = shutil.copytree(checkpoint(dtype=dtype), tmp_path / "source")
    tensors = load_torch(source / "model.safetensors")
    tensors[place].view(-1)[7] = NOT_FINITE[len(place) % 3]
    save_torch(tensors, source / "model.safetensors", {"format": "pt"})
    encodings = WantedEncodings.parse(wanted, wanted)
    with pytest.raises(CheckpointError, match=rf"tensor {re.escape(place)} has weights that are not numbers or infin"):
        pack(source, tmp_path / "store", wanted=encodings)
    assert not (tmp_path / "store").exists()
    pack(source, tmp_path / "store", wanted=replace(encodings, finite=False))
    assert (tmp_path / "store" / MANIFEST).exists()


@pytest.mark.parametrize("kind", ["fp8", "int4", "int8"])
@pytest.mark.parametrize("wanted", ["keep", "int8"])
def test_a_scale_or_code_that_is_no_number_is_refused(checkpoint: Make, tmp_path: Path, kind: str, wanted: str) -> None:
    source = shutil.copytree(checkpoint(hidden_size=64, moe_intermediate_size=32), tmp_path / "source")
    how, about = {
        "fp8": (block_fp8, ABOUT_FP8),
        "int4": (packed(4, 32), compressed("pack-quantized", num_bits=4, type="int", group_size=32, strategy="group")),
        "int8": (packed(8, 32), compressed("pack-quantized", num_bits=8, type="int", group_size=32, strategy="group")),
    }[kind]
    quantise(source, how, about, is_expert)
    tensors = load_torch(source / "model.safetensors")
    name = next(name for name in tensors if ".experts.2.down_proj" in name and "scale" in name)
    tensors[name].view(-1)[0] = math.nan
    save_torch(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight has weights that are not numbers"):
        pack(source, tmp_path / "store", wanted=WantedEncodings.parse(wanted, "keep"))


BESIDE_WEIGHTS = ("chat_template.jinja", "tokenizer_config.json", "merges.txt")


@pytest.mark.parametrize("name", BESIDE_WEIGHTS)
def test_a_file_beside_the_weights_is_a_file_of_a_bounded_size(own_checkpoint: Make, tmp_path: Path, name: str) -> None:
    source = own_checkpoint()
    path = source / name
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"{name} has {MAX_JSON_BYTES + 1} bytes, and 64 MiB are the most"):
        pack(source, tmp_path / "store")
    ways: list[Callable[[], None]] = [path.mkdir, lambda: os.mkfifo(path)]
    ways += [partial(path.symlink_to, "/dev/zero"), partial(path.symlink_to, "gone")]
    for make in ways:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make()
        with pytest.raises(CheckpointError, match=f"{name} is no file, or a link to a missing one"):
            pack(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()

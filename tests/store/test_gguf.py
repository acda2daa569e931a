"""GGUF files of every family give the same store as their checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from support.front_kit import byte_level_tokenizer, write_model
from support.gguf_files import ARCHITECTURES, gguf_checkpoint, write_gguf
from tokenizers import Tokenizer

from edgemoe.encodings.codec import unpack
from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.table import FAMILIES
from edgemoe.store.catalog import spec_at
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.gguf.checkpoint_of_gguf import open_checkpoint
from edgemoe.store.gguf.gguf_file import VALUE_TYPES, open_gguf
from edgemoe.store.gguf.gguf_models import GGUF_FAMILIES, config_of
from edgemoe.store.gguf.gguf_values import decode
from edgemoe.store.manifest import DENSE, Manifest
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from edgemoe.types.encoding import ENCODINGS

NO_GGUF = {  # architectures whose GGUF files are refused by name
    *("AfmoeForCausalLM", "Cohere2MoeForCausalLM", "ExaoneMoeForCausalLM", "FlexOlmoForCausalLM", "HYV3ForCausalLM"),
    *(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "LagunaForCausalLM",
    ),
    *("MellumForCausalLM", "SolarOpenForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
    *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Mistral3ForConditionalGeneration", "Mistral4ForCausalLM"),
    *("Glm4vMoeForConditionalGeneration", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
}
FAMILIES_HERE = sorted(ARCHITECTURES)
TEXTS = ("Hello, world!\n\n  two  spaces", "1234567 äöü \u4f60\u597d", "it's \ta\r\n", "")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, made at its first use."""
    return {"": tmp_path_factory.mktemp("gguf")}


def checkpoint_of(made: dict[str, Path], family: str) -> Path:
    if family not in made:
        vocab = byte_level_tokenizer().get_vocab_size()
        folder = gguf_checkpoint(family, made[""] / family, vocab)
        config = (folder / "config.json").read_text()
        write_model(folder)
        (folder / "config.json").write_text(config)
        made[family] = folder
    return made[family]


def test_every_family_has_an_architecture_of_gguf() -> None:
    inner = {"Gemma4ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}  # in a file without its eyes
    named = {family.architecture for family in GGUF_FAMILIES.values()} | {"DeepseekV2ForCausalLM"}
    others = {"Glm4MoeLiteForCausalLM"} | NO_GGUF  # GLM-4.7-Flash is one of deepseek2
    assert set(FAMILIES) - inner - others == named
    assert set(ARCHITECTURES.values()) == set(GGUF_FAMILIES)


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_a_gguf_says_the_same_of_the_model(family: str, made: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(made, family)
    spec = spec_at(write_gguf(family, checkpoint, tmp_path / "m.gguf"))
    wanted = spec_from_config(json.loads((checkpoint / "config.json").read_text()))
    for field in ("vocab", "hidden", "dtype", "context_tokens", "attention", "router", "feed_forward", "block"):
        assert getattr(spec, field) == getattr(wanted, field), field


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_a_gguf_packs_to_the_same_weights(family: str, made: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(made, family)
    ours = pack(write_gguf(family, checkpoint, tmp_path / "m.gguf"), tmp_path / "ours")
    wanted = pack(checkpoint, tmp_path / "wanted")
    experts = [[entry.xxh3_128 for layer in store.layers for entry in layer.experts] for store in (ours, wanted)]
    assert experts[0] == experts[1]
    found, expected = load_file(tmp_path / "ours" / DENSE), load_file(tmp_path / "wanted" / DENSE)
    assert set(found) == set(expected)
    for name, weights in expected.items():
        undone = name.endswith(("norm.weight", "A_log"))  # one subtracted, or a logarithm: rounded in the last place
        np.testing.assert_allclose(found[name], weights, rtol=0, atol=1e-6 if undone else 0, err_msg=name)


QUANTIZABLE = [  # by the library
    each.name for each in VALUE_TYPES.values() if each.block in (1, 32) and each.name != "IQ4_NL"
]
PLAIN = {"F32": "float32", "F16": "bfloat16", "BF16": "bfloat16"}


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_types_of_experts(kind: str, made: dict[str, Path], tmp_path: Path) -> None:
    """Stored values are the type's; values of F16 are rounded to bfloat16."""
    checkpoint = checkpoint_of(made, "mixtral")
    path = write_gguf("mixtral", checkpoint, tmp_path / "m.gguf", kind)
    manifest = pack(path, tmp_path / "store")
    tensor = open_gguf(path).tensors["blk.1.ffn_down_exps.weight"]
    wanted = decode(_bytes(tensor).reshape(6 * 64, -1), kind).reshape(6, 64, 96)[3]
    encoding = ENCODINGS[manifest.layers[1].encoding or manifest.dtype]
    with safe_open(tmp_path / "store" / manifest.layers[1].file, "pt") as file:
        held = file.get_tensor("experts.3.down_proj")
    found = unpack(held.view(torch.uint8).numpy().reshape(64, -1), encoding, 96)
    off = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert encoding.name == PLAIN.get(kind, kind.lower())
    assert off <= (2.0**-8 if kind == "F16" else 0)


VALUE_TYPES_BY_NAME = {each.name: each for each in VALUE_TYPES.values()}


def _bytes(tensor: CheckpointTensor) -> np.ndarray:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return np.frombuffer(file.read(tensor.bytes), np.uint8)


@pytest.mark.parametrize("kind", [each.name for each in VALUE_TYPES.values()])
def test_sizes_of_types_equal_the_format_s(kind: str) -> None:
    value_type = VALUE_TYPES_BY_NAME[kind]
    number = gguf.GGMLQuantizationType[kind]
    assert VALUE_TYPES[number.value] is value_type
    assert gguf.GGML_QUANT_SIZES[number] == (value_type.block, value_type.bytes)


def test_a_tokenizer_of_a_gguf_says_the_same(made: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(made, "qwen3_moe")
    files = dict(open_checkpoint(write_gguf("qwen3_moe", checkpoint, tmp_path / "m.gguf")).made)
    ours, wanted = (
        Tokenizer.from_str(files["tokenizer.json"].decode()),
        Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
    )
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert sorted(ours.get_vocab().items()) >= sorted(wanted.get_vocab().items()) or ids


def test_split_files_are_one_model(made: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(made, "qwen3_moe")
    whole = open_gguf(write_gguf("qwen3_moe", checkpoint, tmp_path / "m.gguf"))
    names = sorted(whole.tensors)
    for number, mine in enumerate((names[::2], names[1::2]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"s-{number:05}-of-00002.gguf", "qwen3moe")
        if number == 1:
            _copy_metadata(writer, tmp_path / "m.gguf")
        for name in mine:
            tensor = whole.tensors[name]
            writer.add_tensor(name, decode(_bytes(tensor)[None], "F32").reshape(tensor.shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for path in (tmp_path / "s-00001-of-00002.gguf", tmp_path / "s-00002-of-00002.gguf"):
        model = open_gguf(path)
        assert sorted(model.tensors) == names
        assert config_of(model) == config_of(whole)
    (tmp_path / "s-00001-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"s-00001-of-00002\.gguf is missing"):
        open_gguf(tmp_path / "s-00002-of-00002.gguf")


def _copy_metadata(writer: gguf.GGUFWriter, path: Path) -> None:
    for field in gguf.GGUFReader(path).fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def test_a_folder_with_one_model_is_that_model(made: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(made, "qwen3_moe")
    (tmp_path / "mmproj-model.gguf").write_bytes(b"GGUF")
    path = write_gguf("qwen3_moe", checkpoint, tmp_path / "model-Q8_0.gguf")
    assert open_checkpoint(tmp_path).name == "model-Q8_0"
    path.with_name("model-Q4_0.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 models; name one of model-Q4_0\.gguf, model-Q8_0\.gguf"):
        open_checkpoint(tmp_path)


def test_unreadable_parts_are_named(tmp_path: Path) -> None:
    for architecture, words in (("qwen2", "GGUF of qwen2"), ("clip", "GGUF of clip"), ("mamba", "GGUF of mamba")):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedModel, match=f"{words}, which cannot be read; supported are .*qwen3moe"):
            spec_at(tmp_path / "x.gguf")


@pytest.mark.parametrize("part", range(40))
def test_a_cut_or_changed_file_is_refused(part: int, made: dict[str, Path], tmp_path: Path) -> None:
    """For any bytes in the header the result is an error with a name, or a model of the same size."""
    if "whole" not in made:
        made["whole"] = write_gguf("qwen3_moe", checkpoint_of(made, "qwen3_moe"), made[""] / "whole.gguf")
    data = made["whole"].read_bytes()
    rng = np.random.default_rng(part)
    path = tmp_path / "x.gguf"
    path.write_bytes(data[: int(rng.integers(1, len(data)))])
    with pytest.raises((CheckpointError, UnsupportedModel)):
        spec_at(path)
    for _ in range(25):
        changed = bytearray(data)
        for at in rng.integers(0, 24_000, 3):
            size = int(rng.choice([1, 4, 8]))
            value = int(rng.choice([0, 1, 2**31, 2**63, 2**64 - 1])) % 2 ** (8 * size)
            changed[at : at + size] = value.to_bytes(size, "little")
        path.write_bytes(changed)
        with contextlib.suppress(CheckpointError, UnsupportedModel):
            assert spec_at(path).hidden


def test_weights_and_experts_are_read_back(made: dict[str, Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    manifest = pack(write_gguf("qwen3_moe", checkpoint_of(made, "qwen3_moe"), tmp_path / "m.gguf"), store)
    assert Manifest.load(store) == manifest
    with ExpertStore(store, manifest) as opened:
        assert opened is not None
    assert {file.file for file in manifest.files} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}


def rewritten(path: Path, to: Path, changes: Mapping[str, tuple[Any, ...] | None], *, extra: str = "") -> Path:
    """Writes a GGUF again with other values, (value, type, type of items); None leaves a key out."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(to, "qwen3moe")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or field.name in changes:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for name, given in changes.items():
        if given is not None:
            writer.add_key_value(name, given[0], given[1], sub_type=given[2] if len(given) > 2 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    if extra:
        writer.add_tensor(extra, np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


TEXTS_OF, NUMBERS_OF = (
    (gguf.GGUFValueType.ARRAY, inner) for inner in (gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32)
)
LIES: dict[str, tuple[dict[str, tuple[Any, ...] | None], str]] = {
    "no merges": ({"tokenizer.ggml.merges": None}, r"no two of its tokens are merged: tokenizer\.ggml\.merges"),
    "another's merges": ({"tokenizer.ggml.merges": (["zz yy"], *TEXTS_OF)}, "no two of its tokens are merged"),
    "fewer tokens": (
        {"tokenizer.ggml.tokens": (["a"], *TEXTS_OF), "tokenizer.ggml.token_type": None},
        r"tokenizer\.ggml\.tokens has 1 tokens, and token_embd\.weight \d+ rows",
    ),
    "scores that are no numbers": (
        {
            "tokenizer.ggml.model": ("llama", gguf.GGUFValueType.STRING),
            "tokenizer.ggml.scores": ([math.nan], *NUMBERS_OF),
        },
        r"tokenizer\.ggml\.scores must be numbers",
    ),
    "fewer layers than it has": ({"qwen3moe.block_count": (2, gguf.GGUFValueType.UINT32)}, r"no place .* 'blk\.2\."),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_contradicts_the_file_is_refused(lie: str, made: dict[str, Path], tmp_path: Path) -> None:
    path = write_gguf("qwen3_moe", checkpoint_of(made, "qwen3_moe"), tmp_path / "m.gguf")
    changes, said = LIES[lie]
    if "tokenizer.ggml.scores" in changes:
        rows = open_gguf(path).tensors["token_embd.weight"].shape[0]
        changes = {**changes, "tokenizer.ggml.scores": ([math.nan] * rows, *NUMBERS_OF)}
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        pack(rewritten(path, tmp_path / "lie.gguf", changes), tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("count", "extra", "is_read"),
    [(3, "blk.3.attn_norm.weight", False), (3, "blk.3.nextn.enorm.weight", True), (4, "blk.3.attn_norm.weight", True)],
)
def test_layers_for_predicting_tokens_are_left_out(
    count: int, extra: str, is_read: bool, made: dict[str, Path], tmp_path: Path
) -> None:
    path = write_gguf("qwen3_moe", checkpoint_of(made, "qwen3_moe"), tmp_path / "m.gguf")
    whole = gguf.GGUFValueType.UINT32
    changes = {"qwen3moe.block_count": (count, whole), "qwen3moe.nextn_predict_layers": (count - 3, whole)}
    model = rewritten(path, tmp_path / "more.gguf", changes, extra=extra)
    if is_read:
        assert pack(model, tmp_path / "store").layers
        return
    with pytest.raises(UnsupportedModel, match=r"no place .* 'blk\.3\.attn_norm"):
        pack(model, tmp_path / "store")


@pytest.mark.parametrize("kind", ["pipe", "dangling link", "link to a device"])
def test_a_folder_whose_gguf_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if "device" in kind else "gone")
    with pytest.raises(CheckpointError, match=r"m\.gguf is no file, or a link to a missing one"):
        open_checkpoint(tmp_path)

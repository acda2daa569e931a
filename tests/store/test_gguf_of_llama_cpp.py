"""Files of llama.cpp's own converters give the same store as their checkpoint, and their vocabularies the same
tokens.

Slow; runs if its sources can be fetched: they come with the source distribution of llama-cpp-python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.front_kit import byte_level_tokenizer, write_model
from support.gguf_files import ARCHITECTURES, gguf_checkpoint
from tokenizers import Tokenizer

from edgemoe.store.catalog import spec_at
from edgemoe.store.gguf.gguf_file import open_gguf
from edgemoe.store.gguf.gguf_tokenizer import tokenizer_files
from edgemoe.store.packer import pack

SOURCES = "llama-cpp-python==0.3.36"
OTHER_KINDS = {"bert-bge"}  # of tokenizers, which no served family has
CONVERT = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
import gguf
from conversion import get_model_class
from conversion.base import ModelBase, TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # it knows published tokenizers only
folder, written = Path(sys.argv[2]), Path(sys.argv[3])
made = get_model_class(ModelBase.load_hparams(folder, False)["architectures"][0])
made.set_vocab = lambda self: self._set_vocab_gpt2()
made.no_mtp = True
made(folder, gguf.LlamaFileType.ALL_F32, written, eager=True).write()
"""
LISTED = ("moe_topk", "num_shared_expert", "moe_intermediate_size")  # a number for each layer, as Hunyuan publishes it

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of llama.cpp."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    done = subprocess.run([*command, "-d", str(folder), SOURCES], capture_output=True, timeout=600, check=False)
    found = next(folder.glob("*.tar.gz"), None)
    if found is None:
        pytest.skip(f"{SOURCES} cannot be fetched: {done.stderr[-300:]!r}")
    with tarfile.open(found) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # of 3.11.4
    return next(folder.glob("*/vendor/llama.cpp"))


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_files_of_the_converter_give_the_same_store(family: str, llama_cpp: Path, tmp_path: Path) -> None:
    vocab = byte_level_tokenizer().get_vocab_size()
    checkpoint = gguf_checkpoint(family, tmp_path / "checkpoint", vocab + 8 * (family == "olmoe"))
    config = json.loads((checkpoint / "config.json").read_text())
    write_model(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config))
    wanted = pack(checkpoint, tmp_path / "wanted")
    if family == "hunyuan_v1_moe":
        listed = {key: [config.get(key, config["intermediate_size"])] * 3 for key in LISTED}
        (checkpoint / "config.json").write_text(json.dumps({**config, **listed}))
    words = [sys.executable, "-c", CONVERT, str(llama_cpp), str(checkpoint), str(tmp_path / "m.gguf")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = pack(tmp_path / "m.gguf", tmp_path / "ours")
    assert [[each.xxh3_128 for each in layer.experts] for layer in ours.layers] == [
        [each.xxh3_128 for each in layer.experts] for layer in wanted.layers
    ]
    if family not in ("qwen3_next", "qwen3_5_moe_text"):  # one was subtracted from its norms
        assert ours.dense.xxh3_128 == wanted.dense.xxh3_128
    assert spec_at(tmp_path / "m.gguf").layers == 3


def test_vocabularies_of_llama_cpp(llama_cpp: Path) -> None:
    files = [path for path in (llama_cpp / "models").glob("*.gguf") if path.with_name(f"{path.name}.inp").is_file()]
    assert len(files) > 10
    for path in files:
        if path.stem.removeprefix("ggml-vocab-") in OTHER_KINDS:
            continue
        made = Tokenizer.from_str(tokenizer_files(open_gguf(path))["tokenizer.json"].decode())
        texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        wanted = path.with_name(f"{path.name}.out").read_text().split("\n")
        for text, ids in zip(texts, wanted, strict=False):
            found = made.encode(text, add_special_tokens=False).ids
            assert found == [int(each) for each in ids.split()], (path.name, text)
            assert made.decode(found, skip_special_tokens=False) == text

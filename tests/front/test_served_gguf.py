"""A GGUF in the mix Q4_K_M behind the front: the tokens of the weights that the format's own library decodes."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from support.front_kit import TEMPLATE, byte_level_tokenizer, openai_client, running, settings_for, write_model
from support.gguf_files import gguf_checkpoint, write_gguf
from support.greedy_texts import greedy_texts
from tokenizers import Tokenizer

from edgemoe.cli import main
from edgemoe.config.settings import MemorySettings
from edgemoe.front.main import WORKER
from edgemoe.store.manifest import Manifest, spec_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_experts": 6}
PROMPTS = ["number one", "the file system", "12 + 30 ="]
TOKENS = 32


def q4_k_m(name: str) -> str:
    """Returns the type of a matrix in the mix: more bits for values, and for down in some layers."""
    if "norm" in name or "ffn_gate_inp" in name:
        return "F32"
    return "Q6_K" if re.search(r"attn_v|output\.weight|blk\.[02]\.ffn_down_exps", name) else "Q4_K"


def decoded(path: Path, checkpoint: Path, folder: Path) -> Path:
    """Writes a checkpoint of the float32 weights that the library decodes from a GGUF."""
    tensors = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, SIZES["num_hidden_layers"])
    state = {}
    for name, was in load_file(checkpoint / "model.safetensors").items():
        expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if expert:
            weights = tensors[f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight"][int(expert[2])]
        else:
            called = table.get_name(name, try_suffixes=(".weight",))
            assert called is not None
            weights = tensors[called].reshape(was.shape)
        state[name] = torch.from_numpy(weights.copy())
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    return folder


async def test_the_daemon_generates_the_text_of_a_gguf_s_own_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = gguf_checkpoint("qwen3_moe", tmp_path / "hf", byte_level_tokenizer().get_vocab_size(), **SIZES)
    config = (checkpoint / "config.json").read_text()
    write_model(checkpoint)
    (checkpoint / "config.json").write_text(config)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    path = write_gguf("qwen3_moe", checkpoint, tmp_path / "tiny-Q4_K_M.gguf", q4_k_m)
    store = tmp_path / "store"
    assert main(["pack", str(path), str(store), "--dense", "f32"]) == 0
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    expected = greedy_texts(decoded(path, checkpoint, tmp_path / "oracle"), tokenizer, PROMPTS, TOKENS)
    assert "re-encoded" not in capsys.readouterr().err
    manifest = Manifest.load(store)
    assert [layer.encoding for layer in manifest.layers] == ["q4_k+q6_k", "q4_k", "q4_k+q6_k"]
    half = MemorySettings(ram_bytes=spec_of(manifest).geometry.all_bytes // 2, kv_bytes=8 << 20)
    async with running(settings_for(tmp_path, store, memory=half), WORKER) as front, openai_client(front.settings) as c:
        for prompt, text in zip(PROMPTS, expected, strict=True):
            answer = await c.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=TOKENS, extra_body={"min_tokens": TOKENS}
            )
            assert answer.choices[0].text == text
        chat = await c.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens

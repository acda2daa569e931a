"""Measures the loss of each encoding of experts: KL divergence and equal top tokens, against the checkpoint in float32.

    python -m tools.bench.encodings [--experts int4,q4_k+q6_k] [--models demo,qwen3_next]

The demo model reads text of the kinds that it was trained on. The others are random models of a family, with its order
of layers, that read random tokens. Prints one JSON object for each encoding and model.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from edgemoe.api.text.tokenizer import TextModel
from edgemoe.demo import model_path
from edgemoe.store.checkpoint import Checkpoint
from edgemoe.store.layout import WantedEncodings, plan
from edgemoe.store.packer import AS_IT_IS, no_progress, pack
from edgemoe.types.encoding import AFFINE, INT4, INT8
from edgemoe.worker.quality import StoreQuality, TextReader, original, stored, summary
from tools.demo_model import arithmetic, chat

DEMO = "demo"
ENCODINGS = (*(each.name for each in (INT8, INT4, *AFFINE)), "q4_k+q6_k")
TOKENS = 1024  # that a random model reads
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 16,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 16, "intermediate_size": 256, "sliding_window": 128, "rope_scaling": None},
    ),
}


def demo_text() -> str:
    """Returns texts of the kinds that the demo model was trained on."""
    made = random.Random(1)
    parts = [document(made)[:700] for _ in range(4) for document in (arithmetic.document, chat.document)]
    return "\n".join([*parts, Path(random.__file__).read_text()[:1500]])


def random_checkpoint(family: str, directory: Path) -> Path:
    """Writes a random model of a family."""
    name, own = RANDOM[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own})
    getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


class Remembered:
    """A model whose predictions of each window are computed once."""

    def __init__(self, reader: TextReader) -> None:
        self._reader, self._found = reader, dict[int, torch.Tensor]()

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Returns the logits after each token, float32 [T, V]."""
        key = hash(tuple(ids))
        if key not in self._found:
            self._found[key] = self._reader.logits(ids)
        return self._found[key]


def losses(checkpoint: Path, ids: list[int], encodings: list[str], work: Path) -> Iterator[tuple[str, StoreQuality]]:
    """Yields the loss of each encoding of the experts; all other weights stay as they are."""
    layout = plan(Checkpoint.open(checkpoint), AS_IT_IS)
    with torch.inference_mode(), original(layout) as plain:
        theirs = Remembered(plain)
        for experts in encodings:
            with tempfile.TemporaryDirectory(dir=work) as store:
                manifest = pack(checkpoint, store, wanted=WantedEncodings.parse(experts, "keep"))
                with stored(Path(store), manifest) as ours:
                    yield experts, summary(ids, theirs, ours, no_progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", default=",".join(ENCODINGS), help="encodings, separated by commas")
    parser.add_argument("--models", default=",".join([DEMO, *RANDOM]))
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            work = Path(scratch)
            if model == DEMO:
                checkpoint = model_path()
                ids = TextModel(checkpoint).encode(demo_text(), add_special_tokens=False)
            else:
                checkpoint, picked = random_checkpoint(model, work / "checkpoint"), random.Random(2)
                ids = [picked.randrange(SIZES["vocab_size"]) for _ in range(TOKENS + 1)]
            for experts, found in losses(checkpoint, ids, args.experts.split(","), work):
                print(json.dumps({"model": model, "experts": experts, **asdict(found)}), flush=True)


if __name__ == "__main__":
    main()

"""Writes a Hugging Face checkpoint with random weights, of any supported family and size.

    python -m tools.bench.make_model --out DIR [--family qwen3_moe] [--layers 16] [--hidden 1024] ...

Without options: the 3.3 GB Qwen3-MoE of the decode benchmark. For a model larger than the disk, run `edgemoe pack DIR
--wait --delete-shards` at the same time, and limit the shards with `--most-shards 4`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ExpertNames, ModelSpec, dense_shapes, row_tables

PIECE = 1 << 22  # elements drawn at once
SHARD_BYTES = 1 << 30
WAIT_S = 0.2  # between checks whether a shard has been deleted
EMBED_STD = 1.0  # with less, attention dominates, and neighbouring tokens choose the same experts
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)
FAMILIES: dict[str, dict[str, Any]] = {  # the families' differences
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}
Tensors = list[tuple[str, tuple[int, ...]]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_moe")
    for name, value in {
        "layers": 16,
        "hidden": 1024,
        "heads": 16,
        "kv-heads": 4,
        "head-dim": 64,
        "experts": 64,
        "expert-width": 512,
        "top-k": 8,
        "vocab": 32000,
        "context": 40960,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--dtype", choices=sorted(SAFETENSORS_TYPES), default="bfloat16")
    parser.add_argument("--layout", choices=["separate", "stacked"], default="separate", help="of expert tensors")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--std", type=float, default=0.02, help="standard deviation of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-shards", type=int, default=0, help="files of weights at a time; 0: all")
    parser.add_argument("--tokenizer-from", type=Path, help="directory whose tokenizer to copy")
    return parser.parse_args()


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    """Returns `config.json` as transformers 5 writes it."""
    return {
        **FAMILIES[args.family],
        "model_type": args.family,
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.expert_width,
        "moe_intermediate_size": args.expert_width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "num_local_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "norm_topk_prob": True,
        "max_position_embeddings": args.context,
        "tie_word_embeddings": args.tied,
        "hidden_act": "silu",
        "sliding_window": None,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": args.dtype,
    }


def tensors(spec: ModelSpec, layout: str) -> Tensors:
    """Returns name and shape of every tensor, layer by layer."""
    result = list((dense_shapes(spec) | row_tables(spec)).items())
    for layer in spec.expert_layers:
        result += _experts(spec, spec.names.experts(layer), layout)
    return result


def _experts(spec: ModelSpec, names: ExpertNames, layout: str) -> Iterable[tuple[str, tuple[int, ...]]]:
    if layout == "stacked":
        yield names.gate_up, (spec.geometry.experts, *spec.geometry.gate_up_shape)
        yield names.down, (spec.geometry.experts, *spec.geometry.down_shape)
        return
    row = (spec.geometry.width, spec.hidden)
    for expert in range(spec.geometry.experts):
        found = (spec.names.spellings(name)[-1] for name in names.separate(expert))
        yield from zip(found, (row, row, spec.geometry.down_shape), strict=True)


def shards(spec: ModelSpec, all_tensors: Tensors) -> Iterator[Tensors]:
    """Yields groups of at most SHARD_BYTES, or of one tensor."""
    group: Tensors = []
    size = 0
    for name, shape in all_tensors:
        more = int(np.prod(shape)) * spec.dtype_bytes
        if group and size + more > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append((name, shape))
        size += more
    yield group


def write_shard(path: Path, spec: ModelSpec, group: Tensors, std: float, random: np.random.Generator) -> None:
    """Writes one safetensors file: the length of the header, the header, the values."""
    header, offset = {}, 0
    for name, shape in group:
        after = offset + int(np.prod(shape)) * spec.dtype_bytes
        header[name] = {
            "dtype": SAFETENSORS_TYPES[spec.dtype],
            "shape": list(shape),
            "data_offsets": [offset, after],
        }
        offset = after
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in group:
            own = EMBED_STD if "embed" in name and not spec.block.tied else std
            write_values(file, int(np.prod(shape)), spec, 0.0 if "norm" in name else own, random)


def write_values(file: BinaryIO, count: int, spec: ModelSpec, std: float, random: np.random.Generator) -> None:
    """Writes normal values around 0; norms (`std` 0) are 1."""
    for start in range(0, count, PIECE):
        n = min(PIECE, count - start)
        values = random.standard_normal(n, np.float32) * np.float32(std) if std else np.ones(n, np.float32)
        bits = values.view(np.uint32)
        file.write((bits >> 16).astype(np.uint16).data if spec.dtype == "bfloat16" else values.data)


def fill_up(path: Path, size: int) -> None:
    """Gives every id below `size` without a word one of its own: a token without text shows in no stream."""
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"\u0120{number}": number for number in range(size) if number not in known})
    path.write_text(json.dumps(tokenizer))


def main() -> None:
    args = arguments()
    config = make_config(args)
    spec = spec_from_config(config)
    groups = begin_checkpoint(args.out, spec, config, args.layout)
    for file in TOKENIZER_FILES if args.tokenizer_from else ():
        if (args.tokenizer_from / file).exists():
            shutil.copy(args.tokenizer_from / file, args.out / file)
    if args.tokenizer_from:
        fill_up(args.out / "tokenizer.json", args.vocab)
    random = np.random.default_rng(args.seed)
    for name, group in groups.items():
        while args.most_shards and len(list(args.out.glob("*.safetensors"))) >= args.most_shards:
            time.sleep(WAIT_S)
        write_shard(args.out / name, spec, group, args.std, random)
        print(name, flush=True)


def begin_checkpoint(directory: Path, spec: ModelSpec, config: dict[str, Any], layout: str) -> dict[str, Tensors]:
    """Writes all but the shards of a new checkpoint. Returns the tensors of each of these."""
    directory.mkdir(parents=True)
    groups = list(shards(spec, tensors(spec, layout)))
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    found = dict(zip(names, groups, strict=True))
    write_index(directory, spec, found)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return found


def write_index(directory: Path, spec: ModelSpec, groups: dict[str, Tensors]) -> None:
    """Writes the index, which names the shard of every tensor."""
    total = sum(int(np.prod(shape)) * spec.dtype_bytes for group in groups.values() for _, shape in group)
    weight_map = {tensor: name for name, group in groups.items() for tensor, _ in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()

"""Fuzzes a store's files, its manifest with a valid checksum, and the checkpoint that it is packed from.

For any contents the result is a typed error or the packed bytes, within memory bounded by the files' sizes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from edgemoe.cli.model_tables import packed_table
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import dense_shapes
from edgemoe.store import catalog as models
from edgemoe.store.files import page_memory
from edgemoe.store.manifest import MANIFEST, Manifest, spec_of, verify_copies, verify_dense
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from tools.fuzzing.trees import spoil, text_of
from tools.fuzzing.trials import memory_folder, run_trials

WHATS = ("files", "manifest", "checkpoint")
GROWTH_MB = 200.0  # of the process, at its largest: for a manifest of deeply nested text
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 128,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
Files = dict[str, bytes]
Experts = dict[tuple[int, int], bytes]


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Damages and uses the store `count` times for each part of the interface."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-fuzz-", dir=memory_folder()) as name:
        door = _Door(Path(name))
        parts = (what,) if what else WHATS
        return run_trials(parts, count, seed, lambda part, rng: str(getattr(door, part)(rng)), GROWTH_MB)


class _Door:
    """A good checkpoint and its store, put back after each trial."""

    def __init__(self, folder: Path) -> None:
        self._source, self._store, self._made = folder / "source", folder / "store", folder / "made"
        self._source.mkdir()
        _write_checkpoint(self._source)
        pack(self._source, self._store)
        self._source_files, self._store_files = _files(self._source), _files(self._store)
        self._right = _use(self._store)

    def files(self, rng: random.Random) -> str:
        """Damages one file in some way."""
        with _restored(self._store, self._store_files):
            _damage(self._store / rng.choice(sorted(self._store_files)), rng)
            assert _use(self._store) == self._right, "what was read is not what was packed"
        return "unharmed"

    def manifest(self, rng: random.Random) -> str:
        """Changes the manifest, under a correct checksum if that is possible."""
        tree = spoil(json.loads(self._store_files[MANIFEST]), rng)
        with _restored(self._store, self._store_files):
            try:
                msgspec.convert(tree, Manifest).save(self._store)
            except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
                (self._store / MANIFEST).write_bytes(text_of(tree, rng))
            for key, read in _use(self._store).items():
                assert read == self._right.get(key), f"expert {key} is another's"
        return "accepted"

    def checkpoint(self, rng: random.Random) -> str:
        """Changes one part of the checkpoint; packs it, and uses the store if there is one."""
        with _restored(self._source, self._source_files):
            name = rng.choice(("config.json", "config.json", "model.safetensors", "model.safetensors", "any"))
            path = self._source / name
            match name:
                case "config.json":
                    path.write_bytes(text_of(spoil(CONFIG, rng), rng))
                case "model.safetensors":
                    path.write_bytes(_lying_header(self._source_files[name], rng))
                case "any":
                    _damage(self._source / rng.choice(sorted(self._source_files)), rng)
            try:
                pack(self._source, self._made)
                _use(self._made)
            finally:
                shutil.rmtree(self._made, ignore_errors=True)
        return "packed"


def _use(store: Path) -> Experts:
    """Uses a store as a daemon and `edgemoe models` do. Returns the experts' bytes."""
    models.verify(store)
    packed_table(store.parent)
    manifest = Manifest.load(store)
    spec = spec_of(manifest)
    verify_copies(store, manifest)
    verify_dense(store, manifest.dense, lambda share: None)
    experts: Experts = {}
    with ExpertStore(store, manifest, threads=1) as opened:
        room = page_memory(spec.geometry.stride_bytes(0))
        for layer, entry in enumerate(manifest.layers):
            for expert in entry.experts:
                opened.read_into(layer, expert.expert, room)
                experts[layer, expert.expert] = bytes(room[: expert.bytes])
    return experts


def _damage(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data) + 1)
    way = rng.choice(("flip", "flip", "flip", "cut", "grow", "zero", "repeat", "gone", "folder", "fifo", "loop"))
    match way:
        case "flip":
            for _ in range(rng.choice((1, 1, 2, 50))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "cut":
            del data[at:]
        case "grow":
            data += rng.randbytes(rng.choice((1, 8, 4096)))
        case "zero":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        case "repeat":
            data[at:at] = data[at : at + 512]
    path.unlink()
    match way:
        case "gone":
            pass
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case _:
            path.write_bytes(data)


def _lying_header(raw: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    header = text_of(spoil(json.loads(raw[8 : 8 + size]), rng), rng)
    stated = rng.choice((len(header),) * 8 + (len(header) + 1, 0, 1 << 63, (1 << 64) - 1))
    return stated.to_bytes(8, "little") + header + raw[8 + size :]


def _write_checkpoint(folder: Path) -> None:
    spec = spec_from_config(CONFIG)
    shapes = dense_shapes(spec)
    for layer in spec.expert_layers:
        for expert in range(spec.geometry.experts):
            gate, up, down = spec.names.experts(layer).separate(expert)
            rows = (spec.geometry.width, spec.hidden)
            shapes |= {gate: rows, up: rows, down: spec.geometry.down_shape}
    draw = np.random.default_rng(1)
    tensors = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")


def _files(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size
    }


@contextmanager
def _restored(folder: Path, files: Files) -> Iterator[None]:
    """Restores every file that has changed."""
    try:
        yield
    finally:
        for name, data in files.items():
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            if path.is_symlink() or path.is_fifo():
                path.unlink()
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

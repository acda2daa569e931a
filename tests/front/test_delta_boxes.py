"""Two whole boxes with gated delta nets: tokens are transformers', though half of the experts are elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.box_processes import Box, make_boxes
from support.checkpoints import partial_store, tiny_checkpoint
from support.front_kit import byte_level_tokenizer, write_model
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until
from test_boxes import Oracle, settled

from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry import metrics as names
from edgemoe.types.experts import padded

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
NODES = ("a", "b")
LAYERS, EXPERTS = 3, 16
SLOTS = LAYERS * EXPERTS // 2 + 2  # of RAM: the boxes together hold all
TURNS = ["number one", "a longer prompt of several words " * 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "hf"
    vocab = byte_level_tokenizer().get_vocab_size()
    tiny_checkpoint("qwen3_next", folder, vocab_size=vocab, max_position_embeddings=1024)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = (folder / "config.json").read_text()
    write_model(folder)
    (folder / "config.json").write_text(config)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Box]]:
    """Boxes that have a plan; a's disk lacks half of the experts."""
    folder = tmp_path_factory.mktemp("x")
    store = ensure_store(checkpoint, folder / "stores")
    half = partial_store(store, folder / "half", np.tile(np.arange(EXPERTS) < EXPERTS // 2, (LAYERS, 1)))
    made = make_boxes(
        folder,
        {"a": half, "b": store},
        free_ports(len(NODES)),
        model={"name": "tiny", "store_dir": str(STORES)},
        memory={"ram_bytes": SLOTS * padded(Manifest.load(store).entry(0, 0).bytes), "kv_bytes": 8 << 20},
        engine={"threads": 1},
        service={"max_restarts": 50, "drain_s": 2.0},
        cluster={"coordination": "single", "leader": "b", "replicas": 1, "absent_s": 60.0},
    )
    for box in made:
        box.start()
    try:
        await until(lambda: settled(made, NODES))
        yield {box.node: box for box in made}
    finally:
        for box in made:
            await box.close()


async def test_boxes_generate_one_box_s_tokens(boxes: dict[str, Box], checkpoint: Path) -> None:
    oracle = Oracle(checkpoint)
    said = await asyncio.gather(*(box.complete(turn, 64) for box, turn in zip(boxes.values(), TURNS, strict=True)))
    assert said == [oracle.complete(turn, 64) for turn in TURNS]
    metrics = names.parse(await boxes["a"].metrics())
    assert names.select(metrics, names.REMOTE_EXPERTS) + names.select(metrics, names.EXPERTS_FETCHED) > 0


async def test_a_stream_goes_on_when_its_engine_dies(boxes: dict[str, Box], checkpoint: Path) -> None:
    said = await boxes["a"].stream("go on", 300, 20, boxes["a"].kill_engine)
    assert said == Oracle(checkpoint).complete("go on", 300)

"""Boxes that serve 4-bit and 8-bit layers generate the tokens of the dequantised weights, wherever the experts are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.checkpoints import partial_store, tiny_checkpoint
from support.dequantised import dequantised
from support.engines import EXPERTS, LAYERS, EngineBox, adopt, peers_of, plan_for, prompts, running
from support.waiting import wait_until

from edgemoe.store.layout import WantedEncodings
from edgemoe.store.packer import pack

SHAPE = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
TOTAL, TOKENS = LAYERS * EXPERTS, 64
MIXED = "int4,first=int8"
ROOM = TOTAL - 2  # in the larger experts' size: in models this small, slabs of two sizes lose much to whole pages


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint"), **SHAPE)


@pytest.fixture(scope="module")
def store(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    pack(checkpoint, directory, wanted=WantedEncodings.parse(MIXED, "int8"))
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Greedy tokens of transformers with the dequantised weights."""
    plain = dequantised(checkpoint, tmp_path_factory.mktemp("plain") / "hf", MIXED, "int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    found = []
    for prompt in prompts():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=2)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    "slots",
    [pytest.param(TOTAL, marks=pytest.mark.slow, id="everything resident"), pytest.param(2, id="two experts resident")],
)
def test_a_store_in_4_and_8_bits_generates_its_dequantised_weights_tokens(
    store: Path, expected: list[list[int]], tmp_path: Path, slots: int
) -> None:
    box = EngineBox("alone", store, slots, tmp_path)
    with running(box):
        assert box.generate(prompts(), TOKENS, within_s=120) == expected


def test_boxes_compute_experts_in_few_bits_for_each_other(
    store: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    thirds = [np.tile(np.arange(EXPERTS) % 3 == n, (LAYERS, 1)) for n in range(3)]
    three = [
        EngineBox(node, partial_store(store, tmp_path / node, held), ROOM, tmp_path)
        for node, held in zip("abc", thirds, strict=True)
    ]
    with running(*three):
        adopt(plan_for(three), *three)
        assert [box.generate(prompts(), TOKENS, within_s=120) for box in three] == [expected] * 3
        assert all(box.remote.experts > 0 for box in three)


def test_a_box_without_a_disk_fetches_experts_in_few_bits(
    store: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    nothing = np.zeros((LAYERS, EXPERTS), np.bool_)
    full, empty = (
        EngineBox("full", store, TOTAL, tmp_path),
        EngineBox("empty", partial_store(store, tmp_path / "bare", nothing), TOTAL // 2, tmp_path),
    )
    with running(full, empty):
        adopt(plan_for([full, empty]), full, empty)
        assert empty.generate(prompts(), TOKENS, within_s=120) == expected
        assert full.side.plane.bulk.sent_bytes > 0


def test_a_box_with_the_same_model_in_another_encoding_is_refused_by_name(
    checkpoint: Path, store: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack(checkpoint, tmp_path / "other", wanted=WantedEncodings.parse("int8", "int8"))
    one, other = EngineBox("one", store, TOTAL, tmp_path), EngineBox("other", tmp_path / "other", TOTAL, tmp_path)
    with running(one, other, know=False):
        one.obey(peers_of(other))
        other.obey(peers_of(one))
        wait_until(lambda: any("the same encodings" in str(vars(record)) for record in caplog.records))
        assert one.generate(prompts(), TOKENS, within_s=120) == expected
        assert not one.remote.experts

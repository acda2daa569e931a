"""A division of layers by memory: even, possible on each box, and refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import tiny_checkpoint
from support.published import CONFIGURATIONS

from edgemoe.cli import main
from edgemoe.cli.plan.layer_division import StagePlan, named_boxes, plan_stages
from edgemoe.cli.plan.speed import ModelVariant, find_model
from edgemoe.config.settings import ClusterSettings, Settings, faults
from edgemoe.errors import ConfigError
from edgemoe.families.sparse_families import beginnings
from edgemoe.types.stages import parse_stages

LARGE = "DeepSeek-V3"  # 34 GB of dense weights


def variant_of(path: Path) -> ModelVariant:
    return next(find_model(str(path), path.parent).variants())


def division(path: Path, *boxes: str) -> StagePlan:
    return plan_stages(variant_of(path), named_boxes(boxes), Settings(), 125e6, kv_tokens=16384)


@pytest.mark.parametrize(
    "boxes", [("a:24GB", "b:24GB", "c:24GB"), ("tower:24GB", "laptop:16GB"), ("laptop:16GB", "tower:24GB")]
)
def test_each_box_takes_about_the_same_share_of_its_memory(boxes: tuple[str, ...]) -> None:
    path = CONFIGURATIONS[LARGE]
    plan = division(path, *boxes)
    stages = parse_stages(plan.line)
    assert [stage.node for stage in stages] == [box.node for box in named_boxes(boxes)]
    assert stages[-1].after == variant_of(path).spec.layers
    shares = [
        stage.dense_bytes / (box.memory_bytes - Settings().memory.headroom_bytes)
        for stage, box in zip(plan.stages, named_boxes(boxes), strict=True)
    ]
    assert max(shares) < 1
    assert max(shares) - min(shares) < 0.1
    dense_bytes = variant_of(path).dense_bytes
    assert sum(stage.dense_bytes for stage in plan.stages) == pytest.approx(dense_bytes, rel=1e-4)
    assert plan.latencies == 2 * (len(boxes) - 1)
    assert plan.token_s > len(boxes[1:]) * 1e-3


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        (("a:48GB", "b:64GB"), "not needed"),
        (("a:24GB",), "it takes two boxes"),
        (("a:8GB", "b:8GB", "c:8GB"), "too little memory for the dense weights"),
        (tuple(f"n{n}:4GB" for n in range(62)), "has 61 layers only"),
    ],
)
def test_no_division_is_suggested_where_none_is_needed_or_possible(boxes: tuple[str, ...], why: str) -> None:
    plan = division(CONFIGURATIONS[LARGE], *boxes)
    assert not plan.line
    assert why in plan.why


def test_a_family_that_reads_rows_of_a_table_is_named(tmp_path: Path) -> None:
    path = tiny_checkpoint("gemma4_text", tmp_path / "m", hidden_size_per_layer_input=16)
    if variant_of(path).spec.layer_inputs is None:
        pytest.skip("this tiny model has no table")
    needed = Settings().memory.headroom_bytes
    assert "gemma4" in division(path, f"a:{needed}", f"b:{needed}").why


@pytest.mark.parametrize(
    ("boxes", "why"),
    [(("24GB",), "as in tower:24GB"), (("a:24GB", "a:16GB"), "named twice"), (("a:much",), "much")],
)
def test_a_box_that_cannot_be_read_is_refused_by_name(boxes: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        named_boxes(boxes)


@pytest.mark.slow
def test_the_command_prints_the_line_that_settings_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    boxes = [part for box in ("a:24GB", "b:24GB", "c:24GB") for part in ("--box", box)]
    command = ["plan", str(CONFIGURATIONS[LARGE]), *boxes, "--disk", "3GB/s", "--set", f"model.store_dir={tmp_path}"]
    assert main([*command, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)["stages"]["line"]
    settings = Settings(cluster=ClusterSettings(node="b", stages=line))
    assert not [fault for fault in faults(settings) if "stages" in fault]
    assert main(command) == 0
    assert f'stages = "{line}"' in capsys.readouterr().out
    assert main([*command, "--boxes", "2"]) == 2
    assert "--box names 3" in capsys.readouterr().err


def test_a_box_begins_with_a_layer_that_has_an_indexer(tmp_path: Path) -> None:
    config = json.loads(CONFIGURATIONS[LARGE].read_text())
    sparse = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "index_topk_freq": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | sparse))
    plan = division(tmp_path / "config.json", "a:24GB", "b:24GB", "c:24GB")
    spec = variant_of(tmp_path / "config.json").spec
    assert len(beginnings(spec)) < spec.layers / 2
    assert {stage.first for stage in plan.stages} <= set(beginnings(spec))
    assert plan.stages[-1].last == spec.layers - 1

"""The network follows the source's steps; exports are checked before they are believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from edgemoe.experts.predict.scoutgate_model import (
    RECORD,
    WEIGHTS,
    ScoutGate,
    ScoutGateShape,
    cardinality,
    read_export,
    write_export,
)

SHAPE = ScoutGateShape((3, 5), top_k=2, embedding=12)
MODEL = {"id": "m", "digest": "d", "tokenizer": "t"}


def gate(shape: ScoutGateShape = SHAPE) -> ScoutGate:
    torch.manual_seed(1)
    return ScoutGate(shape).eval()


def test_scores_equal_the_six_steps_written_out() -> None:
    g, tokens = gate(), torch.randn(8, 12)
    scores = g(g.project(tokens)[None], torch.ones(1, 8, dtype=torch.bool))[0]
    z = torch.nn.functional.layer_norm(tokens @ g.projection.weight.T + g.projection.bias, (128,))  # step 3
    wanted = []
    for v, size in enumerate(SHAPE.experts * SHAPE.horizons):
        h = torch.cat([z.flatten(), g.layer_embedding.weight[v]])  # step 4
        w_h = torch.cat([g.context.weight, g.layer.weight], 1)
        for _ in range(size):
            e = len(wanted)
            wanted.append((w_h @ h) @ (g.expert.weight @ g.expert_embedding.weight[e]) + g.bias[e])  # step 5
    torch.testing.assert_close(scores, torch.stack(wanted), rtol=1e-4, atol=1e-5)


def test_before_training_it_expects_k_experts_per_layer() -> None:
    g = ScoutGate(ScoutGateShape((16, 64), top_k=4, embedding=12))
    with torch.no_grad():
        g.expert_embedding.weight.zero_()
        logits = g(torch.randn(2, 8, 128), torch.ones(2, 8, dtype=torch.bool))
    sums = torch.stack([p.sum(-1) for p in logits.sigmoid().split([16, 64, 16, 64], -1)], -1)
    torch.testing.assert_close(sums, torch.full((2, 4), 4.0))
    assert cardinality(logits, g.shape) < 1e-8


def test_a_missing_token_is_not_token_zero() -> None:
    g, projected = gate(), torch.randn(1, 8, 128)
    present = torch.ones(1, 8, dtype=torch.bool)
    absent = present.clone()
    absent[0, 0] = False
    assert not torch.allclose(g(projected, present), g(projected, absent))


def test_the_context_variant_hears_of_the_previous_experts() -> None:
    g = gate(ScoutGateShape((3, 5), top_k=2, embedding=12, hidden=6, variant="context"))
    projected, present = torch.randn(1, 8, 128), torch.ones(1, 8, dtype=torch.bool)
    plain = g(projected, present)
    assert not torch.allclose(plain, g(projected, present, torch.tensor([[0, 1, 3, 4]])))
    assert not torch.allclose(plain, g(projected, present, None, torch.ones(1, 6)))


def written(folder: Path) -> Path:
    count = SHAPE.horizons * SHAPE.layers
    write_export(folder, gate(), (torch.ones(count), torch.zeros(count)), MODEL, {"recall": 1.0})
    return folder


def test_an_export_holds_no_pickle_and_comes_back(tmp_path: Path) -> None:
    back = read_export(written(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {WEIGHTS, RECORD}
    assert back.shape == SHAPE
    for name, value in gate().state_dict().items():
        torch.testing.assert_close(back.gate.state_dict()[name], value)


def test_flipped_or_missing_weights_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path) / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="damaged"):
        read_export(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="not a ScoutGate export"):
        read_export(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format"),
        ({"shape": {"experts": [3, 5]}}, "shape"),
        ({"shape": {**SHAPE.as_dict(), "experts": [3, 6]}}, "cannot be used"),
        ({"shape": {**SHAPE.as_dict(), "experts": [3, 10**12]}}, "out of range"),
        ({"shape": {**SHAPE.as_dict(), "variant": "other"}}, "out of range"),
        ({"calibration": {"scale": [1.0], "shift": [0.0]}}, "calibration"),
        ({"calibration": None}, "cannot be used"),
        ({"model": "m"}, "cannot be used"),
        ({"metrics": None}, "cannot be used"),
        ({"metrics": {"horizons": None}}, "cannot be used"),
        ({"metrics": {"horizons": {"this_token": {"scoutgate": {"log_loss": float("nan")}}}}}, "log-loss"),
        ({"model": {"id": 4}}, "named"),
    ],
)
def test_a_foreign_record_is_refused_with_a_reason(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = written(tmp_path) / RECORD
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        read_export(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '"x"'])
def test_a_record_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (written(tmp_path) / RECORD).write_text(text)
    with pytest.raises(ValueError, match=r"scoutgate|ScoutGate"):
        read_export(tmp_path)

"""Gates' look-ahead hints are recorded on request, and judged beside ScoutGate and EWMA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import tiny_checkpoint
from support.kept import STORES
from support.synthetic import EMBEDDING, EXPERTS, TOP_K, VOCAB, requests
from support.tiers_kit import running

from edgemoe.config.settings import EngineSettings, MemorySettings, ModelSettings, RecordSettings, Settings
from edgemoe.experts.predict.scoutgate_model import ScoutGate, ScoutGateShape
from edgemoe.store.packer import pack
from edgemoe.telemetry.routing_recording import AHEAD, OWN, read_recording
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.worker.assemble import assemble
from scoutgate.convert import convert, recordings
from scoutgate.data import Meta, Recording, Routes, write
from scoutgate.evaluate import judge


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pack(tiny_checkpoint("qwen3_moe", folder / "checkpoint"), folder / "store")
    return folder / "store"


def served(store: Path, folder: Path, hints: bool, hidden: bool = False) -> None:
    """Records one request of 5 tokens and 9 more; every expert fits."""
    settings = Settings(
        model=ModelSettings(path=str(store), store_dir=str(STORES)),
        memory=MemorySettings(kv_bytes=4 << 20),
        engine=EngineSettings(threads=1),
        record=RecordSettings(dir=str(folder), hints=hints, hidden=hidden),
    )
    emitted: list[Emission] = []
    assembly = assemble(settings, emitted.extend, lambda *_: None)
    with running(assembly.tiers, fill=True):
        loop = assembly.engine.loop
        sampling = Sampling(temperature=0.0, max_tokens=10)
        loop.submit(Request(id="r", prompt=(5, 6, 7, 8, 9), sampling=sampling, seed=1), (), 1, 60.0)
        while not any(one.finish for one in emitted):
            loop.step()
    assembly.close()


def test_a_daemons_own_recordings_hold_gates_hints_of_decoded_tokens(store: Path, tmp_path: Path) -> None:
    served(store, tmp_path / "records", hints=True)
    assert convert([tmp_path / "records"], store, tmp_path / "data") == 14
    recording = Recording(tmp_path / "data")
    assert recording.gate is not None
    everywhere = np.arange(recording.count)
    np.testing.assert_array_equal(recording.hinted(everywhere), recording.decode.astype(bool))
    early = recording.gate[recording.decode.astype(bool)]  # [9, L, E]
    np.testing.assert_allclose(early[:, 1:].astype(np.float32).sum(-1), 1, atol=1e-2)
    assert not early[:, 0].any()


@pytest.mark.parametrize(("recorded", "taken"), [(False, True), (True, False)])
def test_hints_are_left_out_where_nobody_asks_for_them(
    recorded: bool, taken: bool, store: Path, tmp_path: Path
) -> None:
    served(store, tmp_path / "records", hints=recorded)
    assert recordings(tmp_path / "records", store, tmp_path / "data", hints=taken) == 14
    assert Recording(tmp_path / "data").gate is None


@pytest.mark.parametrize("hints", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_hidden_states_are_the_gates_inputs(dtype: torch.dtype, hints: bool, tmp_path: Path) -> None:
    store = tmp_path / "store"
    pack(tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint", dtype), store)
    served(store, tmp_path / "records", hints, hidden=True)
    (file,) = (tmp_path / "records").iterdir()
    dense = load_file(store / "dense.safetensors")
    gates = torch.stack([dense[f"model.layers.{layer}.mlp.gate.weight"].float() for layer in range(3)])
    steps = [step for step in read_recording(file)[1] if step.hidden is not None]
    assert len(steps) == 9  # decoding steps
    for step in steps:
        assert step.hidden is not None
        assert step.hints.keys() == ({OWN, AHEAD} if hints else {OWN})
        logits = torch.from_numpy(step.hidden) @ gates.transpose(1, 2)
        np.testing.assert_allclose(step.hints[OWN], logits.softmax(-1), atol=2e-3)
        chosen = logits.topk(step.ids.shape[-1]).indices.numpy()
        np.testing.assert_array_equal(np.sort(step.ids, -1), np.sort(chosen, -1))
    recordings(tmp_path / "records", store, tmp_path / "data")
    data = Recording(tmp_path / "data")
    assert data.hidden is not None
    decoded = data.decode.astype(bool)
    np.testing.assert_allclose(data.hidden[decoded], [step.hidden[-1, 0] for step in steps], atol=1e-2)  # type: ignore[index]
    assert not data.hidden[~decoded].any()


def with_gate(request: Routes, asked: bool) -> Routes:
    """Returns the request with hints of a gate that is always right; without hints unless `asked`."""
    gate = np.zeros((len(request.tokens), len(EXPERTS), max(EXPERTS)), np.float16)
    np.put_along_axis(gate, request.ids.astype(np.int64), 1 / TOP_K, axis=2)
    gate[:, 0] = 0
    return Routes(request.tokens, request.ids, request.decode, gate=gate * (request.decode & asked)[:, None, None])


@pytest.mark.parametrize("share", [0, 2])
def test_gates_are_judged_where_they_were_asked(share: int, tmp_path: Path) -> None:
    meta = Meta("tests/synthetic", EXPERTS, TOP_K, gate=True)
    write(tmp_path, meta, (with_gate(each, bool(share and n % share)) for n, each in enumerate(requests(120))))
    torch.manual_seed(0)
    gate = ScoutGate(ScoutGateShape(EXPERTS, TOP_K, EMBEDDING)).eval()
    horizons = judge(gate, Recording(tmp_path), torch.randn(VOCAB, EMBEDDING)).metrics["horizons"]
    assert ("layer_ahead" in horizons) == bool(share)
    if share:
        judged = horizons["layer_ahead"]
        assert min(judged["next_layer_gate"]["recall_per_layer"][1:]) == 1.0
        assert {"ewma", "scoutgate", "fusion"} < judged.keys()

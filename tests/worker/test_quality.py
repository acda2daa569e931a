"""Losses of encodings on the demo model, as `edgemoe pack --check` measures them."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import quantised
from support.checkpoints import FAMILY_SIZES, tiny_checkpoint
from support.kept import KERNELS

from edgemoe.cli import main
from edgemoe.cli.plan import measure
from edgemoe.cli.plan.measure import resident_tiers
from edgemoe.demo import model_path
from edgemoe.engine.driver import SequenceDriver
from edgemoe.errors import ConfigError
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.store.checkpoint import Checkpoint
from edgemoe.store.layout import WantedEncodings, plan
from edgemoe.store.manifest import DENSE, Manifest, spec_of
from edgemoe.store.packer import AS_IT_IS, no_progress, pack
from edgemoe.store.reader import ExpertStore
from edgemoe.worker.quality import StoreQuality, TextModel, TextReader, compare, original, stored, summary
from tools.demo_model import arithmetic, chat


@pytest.fixture(scope="module")
def text() -> str:
    """Texts that the demo model was trained on."""
    made = random.Random(1)
    parts = [document(made)[:700] for _ in range(4) for document in (arithmetic.document, chat.document)]
    return "\n".join([*parts, Path(random.__file__).read_text()[:1500]])


def quality(tmp_path: Path, text: str, experts: str, dense: str) -> StoreQuality:
    pack(model_path(), tmp_path, wanted=WantedEncodings.parse(experts, dense))
    return compare(tmp_path, model_path(), text, no_progress)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FILL_S", 600.0)  # random experts come late on a starved machine


@pytest.mark.parametrize(
    ("experts", "dense", "most", "least"),
    [
        pytest.param("int8", "keep", 1.5e-4, 0.993, marks=pytest.mark.slow),
        pytest.param("keep", "int8", 3e-4, 0.99, marks=pytest.mark.slow),
        ("int4", "int8", 0.005, 0.95),
    ],
)
def test_encoded_weights_predict_nearly_the_same(
    tmp_path: Path, text: str, experts: str, dense: str, most: float, least: float
) -> None:
    found = quality(tmp_path, text, experts, dense)
    assert found.tokens > 2000
    assert 0 < found.divergence < most, found
    assert least < found.same_top < 1, found
    assert abs(found.perplexity / found.reference_perplexity - 1) < 0.02


def test_keys_and_values_in_int8_predict_nearly_the_same(tmp_path: Path, text: str) -> None:
    manifest = pack(model_path(), tmp_path)
    ids = TextModel(tmp_path).encode(text, add_special_tokens=False)
    with torch.inference_mode(), stored(tmp_path, manifest) as plain, stored(tmp_path, manifest) as coded:
        spec = replace(coded.decoder.spec, kv_int8=True)
        coded = TextReader(Decoder.load(spec, tmp_path / DENSE), coded.experts)
        found = summary(ids, plain, coded, no_progress)
    assert 0 < found.divergence < 3e-4, found
    assert found.same_top > 0.988, found


class KernelReader:
    """A model in bfloat16 that reads whole windows of text with the kernels of the CPU."""

    def __init__(self, store: Path, manifest: Manifest, opened: ExpertStore, kernels: Kernels) -> None:
        plain = spec_of(manifest)
        names = tuple(plain.geometry.encoding(layer).name for layer in range(plain.geometry.layers))
        spec = replace(plain, dtype="bfloat16", encodings=names)
        self.decoder = Decoder.load(spec, store / DENSE, kernels=kernels)
        self.experts = resident_tiers(spec, kernels, store=opened).experts

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Returns the logits after each token, float32 [T, V]."""
        sequence = SequenceDriver(self.decoder.spec, 1, len(ids))
        meta, batch = sequence.step([ids], every_row=True)
        self.experts.begin_step(meta)
        found = self.decoder.forward(batch, sequence.cache, self.experts).float()
        self.experts.end_step()
        return found


# The bits of each encoding's kernels are tested in test_encoded_rows.py.
@pytest.mark.parametrize("experts", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_activations_in_8_bits_predict_nearly_the_same(tmp_path: Path, text: str, experts: str) -> None:
    """Of a prompt in bfloat16, against the same with activations in bfloat16."""
    manifest = pack(model_path(), tmp_path, wanted=WantedEncodings.parse(experts, "int8"))
    ids = TextModel(tmp_path).encode(text, add_special_tokens=False)
    with torch.inference_mode(), ExpertStore(tmp_path, manifest) as opened:
        kinds = [Kernels(1, True, KERNELS, byte_activations=in_bytes) for in_bytes in (False, True)]
        floats, in_bytes = (KernelReader(tmp_path, manifest, opened, kernels) for kernels in kinds)
        found = summary(ids, floats, in_bytes, no_progress)
    print(f"activations in 8 bits, {experts}: {found}")
    for kernels in kinds:
        kernels.close()
    assert found.divergence < 1e-3, found
    assert found.same_top > 0.975, found


def test_a_store_in_the_original_encoding_predicts_the_same(tmp_path: Path, text: str) -> None:
    found = quality(tmp_path, text[:2000], "keep", "keep")
    assert (found.divergence, found.same_top) == (0, 1)


@pytest.mark.parametrize("family", FAMILY_SIZES)
def test_every_family_can_be_compared_with_its_checkpoint(family: str, tmp_path: Path) -> None:
    checkpoint, ids = tiny_checkpoint(family, tmp_path / "checkpoint"), list(range(40))
    manifest, layout = pack(checkpoint, tmp_path / "store"), plan(Checkpoint.open(checkpoint), AS_IT_IS)
    with torch.inference_mode(), original(layout) as theirs, stored(tmp_path / "store", manifest) as ours:
        found = summary(ids, theirs, ours, no_progress)
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.same_top == 1


def test_fp8_in_blocks_predicts_nearly_the_same_as_its_source(tmp_path: Path, text: str) -> None:
    source = shutil.copytree(model_path(), tmp_path / "fp8")
    quantised.quantise(source, by_expert, quantised.ABOUT_FP8, quantised.is_expert)
    manifest = pack(source, tmp_path / "store")
    assert {*manifest.encodings} == {"fp8", ""}
    layout, ids = plan(Checkpoint.open(model_path()), AS_IT_IS), TextModel(model_path()).encode(text, False)
    with torch.inference_mode(), original(layout) as theirs, stored(tmp_path / "store", manifest) as ours:
        found = summary(ids, theirs, ours, no_progress)
    assert 0 < found.divergence < 0.001, found
    assert found.same_top > 0.975, found


def by_expert(name: str, weight: torch.Tensor, parts: quantised.Tensors) -> torch.Tensor:
    """Stores a stack as one matrix for each expert, as fp8 checkpoints have them."""
    if weight.dim() == 2:
        return quantised.block_fp8(name, weight, parts)
    prefix, _, kind = name.rpartition(".")
    for expert, matrix in enumerate(weight):
        gate, *up = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
        first = "gate_proj" if up else "down_proj"
        quantised.block_fp8(f"{prefix}.{expert}.{first}.weight", gate.contiguous(), parts)
        for half in up:
            quantised.block_fp8(f"{prefix}.{expert}.up_proj.weight", half.contiguous(), parts)
    return weight


def test_the_command_tells_divergence_perplexity_and_same_top_token(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text"
    file.write_text(text[:1500])
    assert main(["pack", str(model_path()), str(tmp_path / "store"), "--experts", "int4", "--check", str(file)]) == 0
    store, told = capsys.readouterr().out.strip().splitlines()
    assert Manifest.load(Path(store)).encodings[:6] == ("int4",) * 6
    assert re.fullmatch(
        r"\d+ tokens: KL divergence 0\.00\d+, same top token 9\d\.\d\d%, perplexity [\d.]+ \(checkpoint: [\d.]+\)", told
    )


def test_another_checkpoint_than_the_stores_is_refused(tmp_path: Path, text: str) -> None:
    pack(model_path(), tmp_path / "store")
    other = shutil.copytree(model_path(), tmp_path / "other")
    (other / "config.json").touch()
    with pytest.raises(ConfigError, match="packed from another checkpoint"):
        compare(tmp_path / "store", other, text, no_progress)

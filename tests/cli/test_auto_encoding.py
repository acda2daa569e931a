"""`--experts auto` takes the encoding with the fewest misses on this box, and of those the one that loses least."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from edgemoe.cli import auto_encoding, main
from edgemoe.cli.auto_encoding import AUTO, DIVERGENCE, resolve_experts, with_encoding
from edgemoe.cli.plan import speed
from edgemoe.cli.plan.choice import EncodingOffer, choose
from edgemoe.cli.plan.measure import MachineRates
from edgemoe.cli.plan.plan_command import Planner, PlanOptions
from edgemoe.cli.plan.speed import ALL, ModelVariant, find_model
from edgemoe.config.served_models import served_models
from edgemoe.config.settings import MemorySettings, ModelSettings, Settings
from edgemoe.demo import model_path
from edgemoe.errors import CapacityError
from edgemoe.front import main as daemon
from edgemoe.store.layout import ENCODING_NAMES, WantedEncodings
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store
from edgemoe.types.encoding import AFFINE, INT4, INT8, PAIR
from edgemoe.types.machine import Gpu, Machine
from edgemoe.worker.model_preparation import needs_of

ARGS = argparse.Namespace(config=None, set=[])


@pytest.fixture
def variants(tmp_path: Path) -> list[ModelVariant]:
    return list(find_model(str(model_path() / "config.json"), tmp_path).variants(ALL))


def chosen(variants: list[ModelVariant], ram_bytes: int, gpus: tuple[Gpu, ...] = ()) -> EncodingOffer:
    machine = Machine(64 << 30, ram_bytes, 2, None, gpus)
    settings = Settings(memory=MemorySettings(headroom_bytes=0))
    planner = Planner(PlanOptions(256, 1, 1, 1, speed.USUAL), settings, machine, MachineRates(0.0, 0.0, 0.0))
    return choose(planner.offers(variants), speed.USUAL)


def room_for(variant: ModelVariant, share: float = 1.0) -> int:
    """Returns the bytes of RAM in which a share of the experts fits beside all else."""
    need = needs_of(variant.spec, variant.dense_bytes)
    return need.dense_bytes + 4 * 256 * need.kv_bytes_per_token + int(share * need.experts.all_bytes)


def test_every_encoding_that_can_be_named_is_planned(variants: list[ModelVariant]) -> None:
    planned = {each.packing.removeprefix("--experts ").partition(" ")[0] for each in variants}
    assert planned >= {each.name for each in (INT4, INT8, *AFFINE)} == {*ENCODING_NAMES} - {"bf16", "f32", "keep"}
    labels = [each.label for each in variants]
    assert len(labels) == len({*labels})


def test_every_encoding_of_the_choice_is_planned_and_larger_ones_lose_less(variants: list[ModelVariant]) -> None:
    bits = {each.packing.removeprefix("--experts "): each.expert_bits for each in variants}
    assert {*DIVERGENCE} <= {*bits}
    best = sorted(DIVERGENCE, key=lambda name: (bits[name], DIVERGENCE[name]))
    for fewer, more in pairwise(best):
        assert DIVERGENCE[more] <= DIVERGENCE[fewer], f"{fewer} is smaller than {more}, and loses less"


def test_a_model_that_fits_is_kept_as_it_is(variants: list[ModelVariant]) -> None:
    offer = chosen(variants, 4 * room_for(variants[0]))
    assert (offer.packing, offer.divergence, offer.misses(speed.USUAL)) == ("", 0.0, (0.0, 0.0))
    assert "nothing is lost" in offer.reason(speed.USUAL)


def test_less_memory_takes_fewer_bits_and_never_more_misses_than_another(variants: list[ModelVariant]) -> None:
    """From a quarter more than the whole model takes down to a tenth, in small steps."""
    full, found = room_for(variants[0]), list[EncodingOffer]()
    for percent in range(125, 10, -5):
        try:
            found.append(chosen(variants, full * percent // 100))
        except CapacityError:
            break
    assert len({each.packing for each in found}) > 3
    for before, after in pairwise(found):
        assert after.divergence >= before.divergence
        assert after.misses(speed.USUAL) >= before.misses(speed.USUAL)
    assert found[-1].bits < 5


def test_of_encodings_with_as_many_misses_the_one_that_loses_least_is_taken() -> None:
    fine = EncodingOffer("q6_k", "--experts q6_k", 6.56, 0.0, 0.9, 0.0001)
    coarse = replace(fine, packing="--experts q4_k", bits=4.63, divergence=0.002)
    assert choose([coarse, fine], speed.USUAL) is fine
    assert choose([replace(coarse, in_ram=1.0), fine], speed.USUAL).packing == coarse.packing
    both = [replace(coarse, in_vram=0.9, in_ram=1.0), replace(fine, in_vram=0.5, in_ram=1.0)]
    assert choose(both, speed.USUAL) is both[0], "all are in RAM, and a GPU decides"


def test_a_box_without_room_says_what_is_missing(variants: list[ModelVariant]) -> None:
    with pytest.raises(CapacityError, match="dense weights"):
        chosen(variants, 1 << 20)


def test_a_quantised_model_is_never_made_larger(tmp_path: Path) -> None:
    config = json.loads((model_path() / "config.json").read_text())
    about = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    variants = list(find_model(str(tmp_path / "config.json"), tmp_path).variants(ALL))
    assert chosen(variants, 1 << 30).packing == ""


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_the_choice_is_asked_of_the_planner_and_printed(
    tmp_path: Path, variants: list[ModelVariant], capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_experts(AUTO, model_path(), ARGS, str(tmp_path)) == "keep"
    assert "bfloat16: 16 bits a weight, 100% in RAM" in told(capsys)
    wanted = next(each for each in variants if each.label == "int8")
    few = argparse.Namespace(config=None, set=[f"memory.limit_bytes={room_for(wanted)}", "engine.context_tokens=256"])
    name = resolve_experts(AUTO, model_path(), few, str(tmp_path))
    assert name in DIVERGENCE
    assert f"--experts auto: {name}" in told(capsys)
    with pytest.raises(CapacityError, match="no encoding fits"):
        resolve_experts(AUTO, model_path(), argparse.Namespace(config=None, set=["memory.limit_bytes=1MB"]), "")


def test_a_store_that_is_here_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("the planner was asked")

    monkeypatch.setattr(auto_encoding, "ask", ask)
    names = sorted(DIVERGENCE, key=lambda name: -DIVERGENCE[name])
    pair = next(at for at, name in enumerate(names) if PAIR in name)
    for name in (names[0], names[pair // 2], names[pair]):
        ensure_store(model_path(), tmp_path, wanted=WantedEncodings.parse(name, "keep"))
        assert resolve_experts(AUTO, model_path(), ARGS, str(tmp_path)) == name
        assert f"{name}, for its store is here" in told(capsys)
    (store, *_) = tmp_path.iterdir()
    assert resolve_experts(AUTO, store, ARGS, str(tmp_path)) == "keep"
    named = with_encoding(ModelSettings(path=store.name, store_dir=str(tmp_path), experts=AUTO), ARGS)
    assert named.experts == "keep"
    assert resolve_experts("int4", model_path(), ARGS, str(tmp_path)) == "int4"


def test_a_planner_that_does_not_answer_is_an_error_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_encoding, "ASK_S", 0.01)
    with pytest.raises(CapacityError, match="name an encoding"):
        auto_encoding.ask(model_path(), ARGS)


@pytest.mark.parametrize("experts", [AUTO, "q5_k"])
def test_further_models_are_chosen_for_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    first, further = (shutil.copytree(model_path(), tmp_path / name) for name in ("first", "further"))
    choices = {first: "int8", further: "q4_k"}
    served: list[tuple[Settings, Callable[..., ModelSettings]]] = []
    monkeypatch.setattr(auto_encoding, "ask", lambda model, _: choices[model])
    monkeypatch.setattr(daemon, "run", lambda settings, **given: served.append((settings, given["find_store"])) or 0)
    words = (f"model.store_dir={tmp_path / 'stores'}", f"models.more.path={further}", f"api.socket={tmp_path / 's'}")
    options = [option for word in words for option in ("--set", word)]
    assert main(["serve", "--model", str(first), "--experts", experts, *options]) == 0
    ((settings, find_store),) = served
    found = find_store(served_models(settings)["more"].engine.model, lambda *_: None)
    encodings = [
        {layer.encoding for layer in Manifest.load(Path(path)).layers} for path in (settings.model.path, found.path)
    ]
    assert encodings == ([{"int8"}, {"q4_k"}] if experts == AUTO else [{"q5_k"}, {"q5_k"}])


def test_pack_and_its_store_are_in_the_chosen_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto_encoding, "ask", lambda *_: "q5_k")
    source = shutil.copytree(model_path(), tmp_path / "source")
    words = ["--set", f"model.store_dir={tmp_path / 'stores'}"]
    assert main(["pack", str(source), "--experts", "auto", "--dense", "int8", *words]) == 0
    manifest = Manifest.load(Path(capsys.readouterr().out.strip()))
    assert {layer.encoding for layer in manifest.layers} == {"q5_k"}
    assert manifest.dense.encoding == "int8"

"""A plan before a download: sizes as a store has them, and seconds that follow from rates."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.kept import KERNELS, STORES
from support.published import CONFIGURATIONS

from edgemoe.cli import bench, main
from edgemoe.cli.plan import disk, plan_command, speed
from edgemoe.cli.plan import measure as rates
from edgemoe.cli.plan.compiled_kernels import CompiledKernels
from edgemoe.cli.plan.measure import LayerTimes, MachineRates, resident_tiers
from edgemoe.cli.plan.plan_command import PhaseReport, Planner, PlanOptions, SpeedForecast
from edgemoe.cli.plan.speed import find_model
from edgemoe.cli.status_command import StatusSnapshot
from edgemoe.config.settings import DeviceSettings, MemorySettings, ModelSettings, Settings
from edgemoe.demo import model_path
from edgemoe.encodings.codec import pack as encode
from edgemoe.errors import EdgemoeError
from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.compiled_parts import kernels_of, tiers_and_rows
from edgemoe.experts.compute.cost_model import WORTH_S
from edgemoe.families.spec import ModelSpec
from edgemoe.jit.object_cache import compile_ahead
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.store.checkpoint import INDEX, LFS_POINTER, SINGLE
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import pack
from edgemoe.telemetry import probes
from edgemoe.types.encoding import Encoding
from edgemoe.types.machine import Gpu, Machine
from edgemoe.worker.model_preparation import needs_of

MODEL = model_path()
MODEL_SIZES = speed.PlannedSizes(layers=10, experts=64, top_k=4, expert_bytes=1 << 20)
WORK = speed.StepWork(tokens=1, layer_s=1e-3, head_s=1e-3, read_bytes=0.0)
DISK_S = tuple(1e-4 + count * (1 << 20) / 1e9 for count in speed.READ_AT_ONCE)
RATES = MachineRates(1e10, 1e9, 0.0)
ALL = speed.TierShares(top=1.0, ram=1.0, link_bytes_per_s=0.0, disk_s=DISK_S, memory_bytes_per_s=1e10)


@pytest.mark.parametrize("wanted", [("keep", "keep"), ("int8", "keep"), ("int4", "int8")])
def test_a_configuration_alone_tells_the_sizes_that_the_store_will_have(
    wanted: tuple[str, str], tmp_path: Path
) -> None:
    experts, dense = wanted
    pack(MODEL, tmp_path / "store", wanted=WantedEncodings.parse(experts, dense))
    manifest = Manifest.load(tmp_path / "store")
    options = "" if experts == "keep" else f"--experts {experts}" + (f" --dense {dense}" if dense != "keep" else "")
    (planned,) = (
        each for each in find_model(str(MODEL / "config.json"), tmp_path).variants() if each.packing == options
    )
    (packed,) = find_model(str(tmp_path / "store"), tmp_path).variants()
    assert planned.spec == packed.spec
    assert planned.spec.geometry.expert_bytes(0) == manifest.layers[0].experts[0].bytes
    assert planned.dense_bytes == pytest.approx(manifest.dense.bytes, rel=0.02, abs=8192)


def test_a_configuration_in_half_precision_is_planned_as_it_will_be_packed(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    config.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    assert find_model(str(tmp_path / "config.json"), tmp_path).spec.dtype == "bfloat16"


def test_folders_without_a_model_are_refused_by_name(tmp_path: Path) -> None:
    for text, why in (
        ("[1]", "must hold a JSON object"),
        ("{", "is not JSON"),
        ("{}", "architecture"),
        ('{"architectures": [["Qwen3MoeForCausalLM"]]}', "a list of names"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(EdgemoeError, match=why):
            find_model(str(tmp_path), tmp_path)


FAULTS = {
    "a pointer": (lambda folder: (folder / SINGLE).write_bytes(LFS_POINTER), "is a Git LFS pointer"),
    "a shard that was cut": (lambda folder: os.truncate(folder / SINGLE, 100_000), "is cut short: 100000 bytes"),
    "a missing shard": (lambda folder: (folder / SINGLE).rename(folder / "a-00001-of-00002.safetensors"), "is missing"),
    "pickles": (lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"), "only pickled weights"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "no weights yet": (lambda folder: (folder / SINGLE).unlink(), ""),
    "nothing": (lambda folder: None, ""),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_plan_names_the_fault_of_files_that_cannot_be_packed(kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    if kind == "a missing shard":
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "a-00002-of-00002.safetensors"}}))
    spoil, said = FAULTS[kind]
    spoil(folder)
    fault = find_model(str(folder), tmp_path).fault
    assert said in fault
    assert bool(said) == bool(fault)


def test_more_sequences_than_can_be_measured_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MODEL), "--sequences", "1000000"]) == 2
    assert "1024 at most" in capsys.readouterr().err


def test_a_step_takes_its_layers_and_its_misses() -> None:
    resident = speed.step(MODEL_SIZES, WORK, ALL, "even")
    assert resident.total_s == pytest.approx(10 * 1e-3 + 1e-3 + speed.STEP_S)
    half = speed.step(MODEL_SIZES, WORK, replace(ALL, top=0.5, ram=0.5), "even")
    assert half.disk_s == pytest.approx(10 * DISK_S[1])  # two experts of each layer at once
    assert half.limit == "disk"
    skewed = speed.step(MODEL_SIZES, WORK, replace(ALL, top=0.5, ram=0.5), "usual")
    assert skewed.disk_s == pytest.approx(10 * 4 * 0.13 * DISK_S[0])
    linked = speed.step(MODEL_SIZES, WORK, replace(ALL, top=0.25, link_bytes_per_s=1e10), "even")
    assert linked.disk_s == 0.0
    assert linked.link_s == pytest.approx(10 * 3 * (1 << 20) / 1e10)
    slow = speed.step(MODEL_SIZES, WORK, replace(ALL, top=0.25, link_bytes_per_s=1e8), "even")
    assert slow.link_s == pytest.approx(10 * WORTH_S), "the CPU computes what would take longer to bring up"


def test_several_boxes_compute_for_each_other_where_that_is_faster_than_the_disk() -> None:
    sizes, half = replace(MODEL_SIZES, row_bytes=8192), replace(ALL, top=0.5, ram=0.5)
    alone = speed.step(sizes, WORK, half, "even")
    slow = replace(half, boxes=2, box_link_bytes_per_s=125e6)
    layer_s = speed.REMOTE_S + 8192 / 125e6 + 2 * (1 << 20) / 1e10  # two experts of each layer, at one box
    together = speed.step(sizes, WORK, slow, "even")
    assert (together.disk_s, together.boxes_s) == (0.0, pytest.approx(10 * layer_s))
    assert together.total_s < alone.total_s
    fast_disk = replace(slow, disk_s=tuple(1e-4 * count for count in speed.READ_AT_ONCE))
    assert speed.step(sizes, WORK, fast_disk, "even").boxes_s == 0.0, "the disk is as fast"
    slow_disk = tuple(10 * seconds for seconds in DISK_S)
    few = speed.step(sizes, WORK, replace(slow, top=0.25, ram=0.25, disk_s=slow_disk), "even")
    assert few.disk_s == pytest.approx(10 * speed.read_s(2, slow_disk)), "half of the experts are in no box's memory"
    for ram in (0.1, 0.3, 0.6, 0.9, 1.0):
        for boxes in (2, 3, 8):
            for rate in (1e6, 1e8, 1e9):
                one = replace(ALL, top=ram, ram=ram)
                several = replace(one, boxes=boxes, box_link_bytes_per_s=rate)
                times = [speed.step(sizes, WORK, places, "usual").total_s for places in (several, one)]
                assert times[0] <= times[1], "never slower than alone"


def test_experts_that_a_step_lacks_are_read_together_and_many_one_after_the_other() -> None:
    assert speed.read_s(3, DISK_S) == pytest.approx((DISK_S[1] + DISK_S[2]) / 2)
    assert speed.read_s(24, DISK_S) == pytest.approx(3 * DISK_S[3])


def test_an_expert_larger_than_the_probe_takes_longer_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [0.0]

    def read(file: object, room: memoryview, place: int) -> None:
        clock_s[0] += len(room) / 1e9

    monkeypatch.setattr(disk, "READING_BYTES", 8 << 20)
    monkeypatch.setattr(disk, "_expert", read)
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s[0])
    small, large = disk.read_times(tmp_path, [1 << 20, 352 << 20], (1, 8))
    assert small == pytest.approx([(1 << 20) / 1e9, (8 << 20) / 1e9])
    assert large == pytest.approx([(352 << 20) / 1e9, 8 * (352 << 20) / 1e9])
    assert disk.disk_rate(tmp_path) == pytest.approx(1e9)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_slow_disk_is_asked_for_600_mib_at_most(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, clock_s = list[int](), [0.0]

    def slow(file: object, room: memoryview, place: int) -> None:
        read.append(len(room))
        clock_s[0] += len(room) / 50e6

    monkeypatch.setattr(disk, "probe_file", lambda _: contextlib.nullcontext("/dev/null"))
    monkeypatch.setattr(disk, "_expert", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s[0])
    variants = find_model(str(CONFIGURATIONS[name]), tmp_path).variants()
    sizes = [each.spec.geometry.largest_bytes for each in variants]
    assert all(len(each) == len(speed.READ_AT_ONCE) for each in disk.read_times(tmp_path, sizes, speed.READ_AT_ONCE))
    assert 0 < sum(read) <= 600 << 20


@pytest.mark.parametrize("why", [errno.EACCES, errno.EROFS])
def test_a_disk_that_may_not_be_written_to_is_not_measured(
    why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(disk, "NewFile", refuse)
    assert disk.read_times(tmp_path, [1 << 20, 2 << 20], (1, 8)) == [(), ()]
    assert disk.disk_rate(tmp_path) == 0


def test_times_of_sizes_between_two_are_between_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, read = [4 << 20, 1 << 20, 2 << 20], set[int]()

    def together(_file: object, _threads: object, size: int, count: int) -> float:
        read.add(size)
        return 1e-3 + count * size / 1e9

    monkeypatch.setattr(disk, "_together_s", together)
    found = disk.read_times(tmp_path, sizes, (1, 8))
    assert found == [pytest.approx([1e-3 + count * size / 1e9 for count in (1, 8)]) for size in sizes]
    assert read == {1 << 20, 4 << 20}


def test_plans_without_a_measured_disk_predict_no_misses(tmp_path: Path) -> None:
    (variant, *_) = find_model(str(MODEL / "config.json"), tmp_path).variants()
    settings = Settings(memory=MemorySettings(ram_bytes=2 << 20))
    planner = Planner(
        PlanOptions(64, 1, 32, 1, "usual"), settings, Machine(16 << 30, 16 << 30, 2, None), MachineRates(1e10, 0.0, 0.0)
    )
    found = planner.forecast(variant, LayerTimes(1e-6, 1e-6, 1, 1e-6, 32))
    assert found.on_disk > 0
    assert (found.tokens_per_s, found.limit) == (0, "not foretold: the disk was not measured")


def test_a_machine_without_the_memory_to_measure_is_told_so_and_nothing_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (variant, *_) = find_model(str(MODEL / "config.json"), tmp_path).variants()
    machine = Machine(16 << 30, rates.SPARE_BYTES + 1024, 2, None)
    monkeypatch.setattr(probes, "probe_machine", lambda: machine)
    (times,) = rates.measure_layers(
        [variant], cast(Kernels, None), 1, 32, lambda _: None, math.inf
    )  # touches no kernel
    assert re.fullmatch("measuring takes .* of memory, and 1.* can be spared", times.why)
    planner = Planner(
        PlanOptions(64, 1, 32, 1, "usual"), Settings(), replace(machine, ram_available_bytes=8 << 30), RATES
    )
    found = planner.forecast(variant, times)
    assert (found.why, found.in_ram, found.tokens_per_s) == ("", 1, 0)
    assert found.limit == f"not measured: {times.why}"


def test_time_goes_to_encodings_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_second(variants: Sequence[speed.ModelVariant], *_: object) -> list[LayerTimes]:
        timed.extend(each.label for each in variants)
        return [LayerTimes(1.0, 1.0, 1, 1.0, 32) for _ in variants]

    timed, memory = list[str](), MemorySettings(headroom_bytes=0)
    settings = Settings(memory=memory, model=ModelSettings(store_dir=str(STORES)))
    subject = find_model(str(MODEL / "config.json"), tmp_path)
    *_, smallest = subject.variants()
    need = needs_of(smallest.spec, smallest.dense_bytes)
    room = need.dense_bytes + 32 * need.kv_bytes_per_token + 2 * need.experts.expert_bytes(0)
    monkeypatch.setattr(probes, "probe_machine", lambda **_: Machine(16 << 30, room, 2, None))
    monkeypatch.setattr(plan_command, "measure_layers", one_second)
    monkeypatch.setattr(plan_command, "read_times", lambda _, sizes, __: [DISK_S for _ in sizes])
    monkeypatch.setattr(plan_command, "memory_rate", lambda _: 1e10)
    monkeypatch.setattr(plan_command, "COMPILED_S", math.inf)
    monkeypatch.setattr(plan_command, "DEADLINE_S", math.inf)
    question, now_s = PlanOptions(16, 1, 32, 1, "usual"), time.monotonic()
    planner, measured = plan_command._measure(list(subject.variants()), question, settings, PhaseReport(), now_s)
    forecasts = [planner.forecast(*each) for each in measured]
    assert timed == [each.encoding for each in forecasts if not each.why] == [smallest.label]
    assert all("dense weights" in each.why for each in forecasts[:-1])


def test_encodings_whose_kernels_are_not_compiled_in_time_get_the_limit_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "read_times", lambda _, sizes, __: [DISK_S for _ in sizes])
    monkeypatch.setattr(plan_command, "memory_rate", lambda _: 1e10)
    monkeypatch.setattr(rates, "BUDGET_S", 0.1)
    monkeypatch.setattr(plan_command, "DEADLINE_S", math.inf)
    variants = list(find_model(str(MODEL / "config.json"), tmp_path).variants())
    settings = Settings(model=ModelSettings(store_dir=str(tmp_path / "stores")))
    question, long_ago_s = PlanOptions(16, 1, 32, 1, "usual"), time.monotonic() - plan_command.COMPILED_S

    def planned() -> list[SpeedForecast]:
        planner, measured = plan_command._measure(variants, question, settings, PhaseReport(), long_ago_s)
        return [planner.forecast(*each) for each in measured]

    late = planned()
    assert {each.limit for each in late} == {f"not measured: {rates.NOT_COMPILED}"}
    assert all(each.most_tokens_per_s > 0 for each in late)
    assert not list((tmp_path / "kernels").glob("*.o")), "the processes have ended"
    (tmp_path / "kernels").rmdir()
    (tmp_path / "kernels").symlink_to(KERNELS)
    for part in (*kernels_of("bfloat16"), *tiers_and_rows("bfloat16", "bfloat16", "int8")):
        compile_ahead(part.codes, KERNELS, part.variant)
    some = {each.encoding: each for each in planned()}
    assert min(some["bfloat16"].tokens_per_s, some["int8"].tokens_per_s) > 0
    assert some["bfloat16"].most_tokens_per_s == 0


def test_nothing_is_compiled_for_models_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "read_times", lambda _, sizes, __: [DISK_S for _ in sizes])
    monkeypatch.setattr(plan_command, "memory_rate", lambda _: 1e10)
    monkeypatch.setattr(probes, "probe_machine", lambda **_: Machine(16 << 30, 1 << 20, 2, None))
    variants = list(find_model(str(MODEL / "config.json"), tmp_path).variants())
    settings = Settings(model=ModelSettings(store_dir=str(tmp_path / "stores")))
    question = PlanOptions(16, 1, 32, 1, "usual")
    _, measured = plan_command._measure(variants, question, settings, PhaseReport(), time.monotonic())
    assert {times.why for _, times in measured} == {"it does not fit"}
    assert not (tmp_path / "kernels").exists()


def test_kernels_that_cannot_be_kept_are_compiled_into_a_folder_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = find_model(str(MODEL / "config.json"), tmp_path).spec
    with closing(CompiledKernels(None, [spec])) as compiled:
        (folder,) = tmp_path.glob("edgemoe-*")
        compiled.wait(time.monotonic())
        assert not compiled.has_code(spec)
    assert not folder.exists()


class SlowMachine:
    """A clock that only work moves on: making experts and dense weights, and each token."""

    now_s = 0.0
    token_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fed = list[int]()
        monkeypatch.setattr(rates, "time", self)
        monkeypatch.setattr(rates, "resident_tiers", self.fill)
        monkeypatch.setattr(rates, "random_decoder", lambda *_: self.spend(5.0))
        monkeypatch.setattr(rates, "_feed", self.feed)

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    def fill(self, spec: ModelSpec, _kernels: Kernels) -> SimpleNamespace:
        self.spend(10.0)
        return SimpleNamespace(geometry=spec.geometry)

    def feed(self, _model: object, sequences: int, tokens: int) -> float:
        self.fed.append(tokens)
        self.spend(taken_s := self.token_s * sequences * tokens)
        return taken_s


@pytest.mark.parametrize("token_s", [0.01, 1.0, 20.0])
def test_nothing_is_begun_after_the_deadline(token_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine, said = SlowMachine(monkeypatch), list[str]()
    machine.token_s = token_s
    variants = list(find_model(str(MODEL / "config.json"), tmp_path).variants())
    found = rates.measure_layers(variants, cast(Kernels, None), 2, 256, said.append, rates.DEADLINE_S)
    longest_s = max(15.0, (rates.LEAST_PROMPT + 2) * token_s)
    assert machine.now_s <= rates.DEADLINE_S + longest_s
    late = [times.why for times in found if not times.prompt_s]
    assert late
    assert all(why == rates.LATE for why in late)
    assert said[0].startswith("measuring bfloat16, 1 of 6")


def test_a_prompt_that_takes_too_long_is_foretold_by_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SlowMachine(monkeypatch)
    model: Any = SimpleNamespace(begin=lambda *_: None, spec=SimpleNamespace(router=SimpleNamespace(experts=8)))
    machine.token_s = 0.01
    assert rates._prompt_s(model, 8, 256, 0.0) == pytest.approx(2.56)
    assert machine.fed == [rates.LEAST_PROMPT, 256]
    machine.token_s, machine.fed = 0.1, []
    assert rates._prompt_s(model, 8, 256, 0.0) == pytest.approx(25.6)
    assert machine.fed == [rates.LEAST_PROMPT]


def test_random_experts_repeat_a_few_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed = list[int]()

    def noted(rows: Any, encoding: Encoding) -> Any:
        packed.append(len(rows))
        return encode(rows, encoding)

    monkeypatch.setattr(rates, "pack", noted)
    monkeypatch.setattr(rates, "OWN_ROWS", 16)
    spec = find_model(str(MODEL / "config.json"), tmp_path).spec
    store = rates.RandomStore(spec)
    assert packed == [16, 16]
    for expert in range(2):
        data = bytearray(store.expert_bytes(0, expert))
        asyncio.run(store.read(0, expert, memoryview(data)))
        rows = np.frombuffer(data, np.uint8)[: spec.geometry.gate_up_shape[0] * spec.geometry.hidden * 2]
        assert len(np.unique(rows.reshape(spec.geometry.gate_up_shape[0], -1), axis=0)) == 16


def test_a_model_that_was_measured_leaves_no_memory_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = list[weakref.ref[object]]()

    def noted(*args: Any) -> ExpertTiers:
        tiers.append(weakref.ref(made := resident_tiers(*args)))
        return made

    monkeypatch.setattr(rates, "resident_tiers", noted)
    monkeypatch.setattr(rates, "FILL_S", 200.0)  # the tiers' code may be compiled meanwhile
    monkeypatch.setattr(rates, "random_decoder", lambda *_: None)
    monkeypatch.setattr(rates, "_time_s", lambda *_: 1.0)
    monkeypatch.setattr(rates, "_feed", lambda *_: 1.0)
    (variant, *_) = find_model(str(MODEL / "config.json"), tmp_path).variants()
    before = threading.enumerate()
    (times,) = rates.measure_layers([variant], cast(Kernels, None), 1, 32, lambda _: None, math.inf)
    assert times.decode_s > 0
    assert [each() for each in tiers] == [None]
    assert threading.enumerate() == before


def test_measurements_are_kept_if_the_stores_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/var/lib/edgemoe/stores")

    monkeypatch.setattr(bench, "WORKER_ENV", {})
    monkeypatch.setattr("edgemoe.cli.plan.speed_bounds.bounds", refuse)
    now = StatusSnapshot("", {"model": {}}, {})
    found, why = bench._allowed(now, argparse.Namespace(config=None, set=[], prompt=8, tokens=8))
    assert not found
    assert "Permission denied: '/var/lib/edgemoe/stores'" in why


def test_a_prompt_touches_nearly_every_expert_and_a_token_its_own() -> None:
    assert speed.distinct(MODEL_SIZES, 1) == pytest.approx(4)
    assert 63 < speed.distinct(MODEL_SIZES, 128) <= 64


@pytest.mark.parametrize(("kind", "limit"), [("auto", "not foretold for a GPU"), ("cpu", "memory and processor")])
def test_a_box_with_a_gpu_is_planned_if_the_settings_do_not_use_it(kind: str, limit: str, tmp_path: Path) -> None:
    (variant, *_) = find_model(str(MODEL / "config.json"), tmp_path).variants()
    settings = Settings(device=(DeviceSettings(kind=kind),))
    machine = Machine(16 << 30, 16 << 30, 2, None, (Gpu(0, "a GPU", 8 << 30, 8 << 30),))
    planner = Planner(PlanOptions(64, 1, 32, 1, "usual"), settings, machine, MachineRates(1e10, 1e9, 1e10))
    assert planner.forecast(variant, LayerTimes(1e-6, 1e-6, 1, 1e-6, 32, DISK_S)).limit == limit


@pytest.mark.slow
def test_the_command_shows_fitting_models_and_their_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "edgemoe").mkdir()
    KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
    (tmp_path / "edgemoe/kernels").symlink_to(KERNELS)
    monkeypatch.setattr(plan_command, "DEADLINE_S", math.inf)
    words = ["plan", str(MODEL / "config.json"), "--prompt", "32", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"bfloat16", "int8", "int4"} <= {each["encoding"] for each in told["encodings"]} | {"bfloat16"}
    assert all(each["tokens_per_s"] > 1 and each["in_ram"] == 1 for each in told["encodings"])
    small = [*words, "--set", "memory.ram_bytes=2MiB", "--set", "engine.threads=1"]
    assert main(small) == 0
    fewer = json.loads(capsys.readouterr().out)["encodings"][0]
    assert fewer["on_disk"] > 0
    assert main([*words, "--set", "memory.ram_bytes=1KiB"]) == 1
    assert "memory.ram_bytes" in json.loads(capsys.readouterr().out)["encodings"][0]["why"]
    assert not list(Path(os.environ["HOME"]).rglob(".probe-*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_encoding_of_published_models_is_foretold_or_has_its_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "config.json").write_text(CONFIGURATIONS[name].read_text())
    KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(KERNELS)
    words = ["plan", str(tmp_path), "--json", "--set", f"model.store_dir={tmp_path}/stores"]
    fits = main(words) == 0
    told = capsys.readouterr()
    rows = json.loads(told.out)["encodings"]
    assert len(rows) >= 3
    assert all(each["why"] or each["limit"] for each in rows)
    assert fits == any(not each["why"] for each in rows)
    assert "edgemoe plan: reading the disk took" in told.err

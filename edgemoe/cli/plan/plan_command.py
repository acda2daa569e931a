"""Runs `edgemoe plan`: the tiers that hold the weights, the model's speed and its limit, and the best remedies."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Group
from rich.table import Table

from edgemoe.cli.auto_encoding import AUTO, DIVERGENCE
from edgemoe.cli.output import console
from edgemoe.cli.plan import speed
from edgemoe.cli.plan.choice import EncodingOffer, choose
from edgemoe.cli.plan.compiled_kernels import CompiledKernels
from edgemoe.cli.plan.disk import ROOM_BYTES, read_times
from edgemoe.cli.plan.layer_division import PlannedBox, named_boxes, plan_stages
from edgemoe.cli.plan.measure import (
    COMPILED_S,
    DEADLINE_S,
    NOT_COMPILED,
    LayerTimes,
    MachineRates,
    dense_bytes,
    measure_layers,
    memory_rate,
)
from edgemoe.cli.plan.speed import ModelVariant, PlannedModel, find_model, model_of, rest_bytes
from edgemoe.config.budgets import Budgets, devices_of, resolve_budgets, runs_on_gpu
from edgemoe.config.loading import load
from edgemoe.config.settings import Settings
from edgemoe.config.sizes import format_rate, format_size, parse_rate
from edgemoe.errors import CapacityError, ConfigError
from edgemoe.jit.thread_pool import ThreadPool
from edgemoe.rights import become_owner
from edgemoe.store.checkpoint import CONFIG
from edgemoe.telemetry import probes
from edgemoe.types.machine import Machine
from edgemoe.types.size_classes import SlabLayout
from edgemoe.worker.model_preparation import kernel_dir, needs_of

MOST_SEQUENCES = 1024  # whose steps are measured
MORE_BYTES = 16 << 30  # of RAM, in one of the remedies


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The load to plan for: context, sequences, prompt, boxes, and the curve of misses."""

    context_tokens: int
    sequences: int
    prompt_tokens: int
    boxes: int
    curve: str
    box_link_bytes_per_s: float = speed.LINK_BYTES_PER_S  # between boxes
    disk_bytes_per_s: float = 0.0  # of each box; 0: as measured here


@dataclass(frozen=True, slots=True)
class SpeedForecast:
    """One encoding on this machine. Bytes, shares of all experts, seconds; `why` says why it does not fit."""

    encoding: str
    packing: str
    dense_bytes: int
    kv_bytes: int  # of the sequences at the context asked for
    expert_bytes: int  # of all of them
    why: str = ""
    in_vram: float = 0.0
    in_ram: float = 0.0
    on_disk: float = 0.0  # that are in no memory of any box
    table_bytes: int = 0  # of tables that stay on disk
    row_cache_bytes: int = 0  # for rows of them in RAM
    context_tokens: int = 0  # the longest sequence that fits
    tokens_per_s: float = 0.0  # of one sequence
    batch_tokens_per_s: float = 0.0  # of all sequences together
    first_token_s: float = 0.0
    most_tokens_per_s: float = 0.0  # of one sequence, by the rates of memory and disk; where nothing was measured
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Planner:
    """Forecasts encodings for one question, with the settings, the machine and its rates."""

    question: PlanOptions
    settings: Settings
    machine: Machine
    rates: MachineRates

    def forecast(self, variant: ModelVariant, times: LayerTimes, more_bytes: int = 0, boxes: int = 0) -> SpeedForecast:
        """Returns the forecast of a variant, with `more_bytes` of RAM added, or on `boxes` boxes."""
        question, needs = self.question, needs_of(variant.spec, variant.dense_bytes)
        kv_bytes = question.sequences * (needs.held_bytes(question.context_tokens) + needs.state_bytes)
        found = SpeedForecast(variant.label, variant.packing, needs.dense_bytes, kv_bytes, needs.experts.all_bytes)
        try:
            budgets = self._budgets(variant, more_bytes)
        except CapacityError as error:
            return replace(found, why=str(error))
        if budgets.context_tokens < min(question.context_tokens, needs.context_tokens):
            found = replace(found, why=f"a context of {budgets.context_tokens} tokens fits; raise memory.kv_bytes")
        places = self._places(budgets, boxes or question.boxes, times.disk_s)
        below = min(1.0, places.ram * places.boxes)
        found = replace(
            found,
            in_vram=places.top if places.link_bytes_per_s else 0.0,
            in_ram=places.ram,
            on_disk=1.0 - below,
            context_tokens=budgets.context_tokens,
            table_bytes=budgets.table_bytes,
            row_cache_bytes=budgets.row_cache_bytes,
        )
        return self._timed(found, variant, times, places)

    def has_room(self, variant: ModelVariant) -> bool:
        """Returns whether the variant can be served from this machine's memory."""
        try:
            self._budgets(variant)
        except CapacityError:
            return False
        return True

    def offers(self, variants: Sequence[ModelVariant]) -> list[EncodingOffer]:
        """Returns the encodings of a model's experts that fit here, of which `choose` takes one. Raises CapacityError.

        The model as it is loses nothing. Others are of experts alone, and take less memory than that.
        """
        found, fault = list[EncodingOffer](), CapacityError("the model does not fit")
        kept_bytes = variants[0].spec.geometry.all_bytes
        for variant in variants:
            name = variant.packing.removeprefix("--experts ")
            if name and (name not in DIVERGENCE or variant.spec.geometry.all_bytes >= kept_bytes):
                continue
            try:
                places = self._places(self._budgets(variant), 1, ())
            except CapacityError as error:
                fault = error
                continue
            in_vram = (
                places.top if places.link_bytes_per_s or runs_on_gpu(devices_of(self.settings, self.machine)) else 0.0
            )
            loss = DIVERGENCE[name] if name else 0.0
            found.append(EncodingOffer(variant.label, variant.packing, variant.expert_bits, in_vram, places.ram, loss))
        if not found:
            raise fault
        return found

    def _budgets(self, variant: ModelVariant, more_bytes: int = 0) -> Budgets:
        """Returns the budgets with `more_bytes` of RAM added. Raises CapacityError."""
        machine = replace(self.machine, ram_available_bytes=self.machine.ram_available_bytes + more_bytes)
        return resolve_budgets(self.settings, machine, needs_of(variant.spec, variant.dense_bytes))

    def _timed(
        self, found: SpeedForecast, variant: ModelVariant, times: LayerTimes, places: speed.TierShares
    ) -> SpeedForecast:
        if runs_on_gpu(devices_of(self.settings, self.machine)):
            return replace(found, limit="not foretold for a GPU")
        if times.why:
            most = 1 / self._least_s(variant, times, places) if times.disk_s or not found.on_disk else 0.0
            return replace(found, limit=f"not measured: {times.why}", most_tokens_per_s=most)
        if found.on_disk and not times.disk_s:
            return replace(found, limit="not foretold: the disk was not measured")
        question, spec = self.question, variant.spec
        model = model_of(variant)
        rest_s = rest_bytes(variant) / self.rates.memory_bytes_per_s
        context_bytes = spec.kv_layout.held_bytes(question.context_tokens // 2)

        def step(tokens: int, layer_s: float, context: float) -> speed.PlannedStep:
            return speed.step(model, speed.StepWork(tokens, layer_s, rest_s, context), places, question.curve)

        one = step(1, times.decode_s, context_bytes)
        several = step(times.sequences, times.batch_s, context_bytes * times.sequences)
        first = step(times.prompt_tokens, times.prompt_s, 0.0)
        return replace(
            found,
            tokens_per_s=1 / one.total_s,
            batch_tokens_per_s=times.sequences / several.total_s,
            first_token_s=first.total_s * question.prompt_tokens / times.prompt_tokens,
            limit=one.limit,
        )

    def _least_s(self, variant: ModelVariant, times: LayerTimes, places: speed.TierShares) -> float:
        """Returns the seconds of a step of one token whose layers take no longer than memory takes to be read."""
        model, geometry, rest = model_of(variant), variant.spec.geometry, rest_bytes(variant)
        experts = geometry.all_bytes / geometry.count * geometry.top_k
        rate = self.rates.memory_bytes_per_s
        layer_s = (experts + (dense_bytes(variant.spec) - rest) / model.layers) / rate
        work = speed.StepWork(
            1, layer_s, rest / rate, variant.spec.kv_layout.held_bytes(self.question.context_tokens // 2)
        )
        return speed.step(model, work, replace(places, disk_s=times.disk_s), self.question.curve).total_s

    def _places(self, budgets: Budgets, boxes: int, disk_s: tuple[float, ...]) -> speed.TierShares:
        device = next((device for device in budgets.devices if device.kind != "cpu"), None)
        ram = _share(budgets, budgets.ram_bytes)
        top = ram if device is None else _share(budgets, device.expert_bytes)
        link = device.link_bytes_per_s if device is not None else 0.0
        memory, box_link = self.rates.memory_bytes_per_s, self.question.box_link_bytes_per_s
        return speed.TierShares(top, ram, link, disk_s, memory, boxes, box_link)


class PhaseReport:
    """Reports on standard error the present phase, and the duration of the one before."""

    def __init__(self) -> None:
        self._began_s, self._phase = time.monotonic(), ""

    def __call__(self, phase: str) -> None:
        now_s = time.monotonic()
        if self._phase:
            print(f"edgemoe plan: {self._phase} took {now_s - self._began_s:.1f} s", file=sys.stderr, flush=True)
        self._began_s, self._phase = now_s, phase
        if phase:
            print(f"edgemoe plan: {phase} ...", file=sys.stderr, flush=True)


def run(args: argparse.Namespace, began_s: float) -> int:
    """Prints the plan. Returns 0 if an encoding fits. Raises ConfigError, CheckpointError, StoreError.

    The command began at `began_s` of `time.monotonic`: importing torch takes a part of its time.
    """
    named = named_boxes(args.box)
    if named and args.boxes not in (1, len(named)):
        raise ConfigError(f"--boxes {args.boxes}, but --box names {len(named)}; leave one of them out")
    args.boxes = len(named) or args.boxes
    if min(args.sequences, args.prompt, args.boxes) < 1 or args.context < 0 or args.sequences > MOST_SEQUENCES:
        raise ConfigError(
            f"--context, --sequences, --prompt and --boxes are 1 at least, --sequences {MOST_SEQUENCES} at most"
        )
    settings = load(Path(args.config) if args.config else None, args.set).settings
    become_owner(Path(settings.model.store_dir))
    subject = find_model(args.model, Path(settings.model.store_dir))
    variants = list(subject.variants("" if args.experts == AUTO else args.experts))
    context = args.context or min(subject.spec.context_tokens, 4096)
    rates = [parse_rate(text) if text else 0.0 for text in (args.link, args.disk)]
    if min((rate for rate, text in zip(rates, (args.link, args.disk), strict=True) if text), default=1.0) <= 0:
        raise ConfigError("--link and --disk are rates above 0, as in 1Gbit/s and 3GB/s")
    question = PlanOptions(
        context, args.sequences, args.prompt, args.boxes, args.routing, rates[0] or speed.LINK_BYTES_PER_S, rates[1]
    )
    planner, measured = _measure(variants, question, settings, PhaseReport(), began_s)
    forecasts = [planner.forecast(*each) for each in measured]
    advice = list(advise(planner, measured, forecasts))
    alone = planner.forecast(*measured[0], boxes=1) if args.boxes > 1 else None
    chosen = _chosen(planner, subject)
    alike = [PlannedBox(f"box-{n + 1}", planner.machine.ram_available_bytes) for n in range(args.boxes)]
    stages = plan_stages(
        variants[0],
        named or alike,
        settings,
        question.box_link_bytes_per_s,
        kv_tokens=question.sequences * question.context_tokens,
    )
    if args.json:
        found = _as_json(subject, planner, forecasts, advice, alone, chosen) | {"stages": asdict(stages)}
        print(json.dumps(found, indent=2))
    else:
        console().print(_picture(subject, planner, forecasts, advice, alone, chosen))
        if args.boxes > 1 or forecasts[0].why:
            print("\n".join(stages.lines()))
    return 0 if stages.line or any(not each.why for each in forecasts) else 1


def _chosen(planner: Planner, subject: PlannedModel) -> EncodingOffer | None:
    """Returns the choice of `--experts auto`; None for a store, which has its encoding, and where nothing fits."""
    try:
        variants = list(subject.variants(speed.ALL))
        return choose(planner.offers(variants), planner.question.curve) if subject.store is None else None
    except CapacityError:
        return None


def chosen_here(model: str, settings: Settings) -> tuple[EncodingOffer, str]:
    """Returns the encoding that `--experts auto` takes for a checkpoint on this machine, and the reason.

    Raises CapacityError where none fits, CheckpointError and UnsupportedModel.
    """
    machine = probes.probe_machine(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    subject = find_model(model, Path(settings.model.store_dir))
    question = PlanOptions(subject.spec.context_tokens, 1, 1, 1, speed.USUAL)
    planner = Planner(question, settings, machine, MachineRates(0.0, 0.0, 0.0))
    chosen = choose(planner.offers(list(subject.variants(speed.ALL))), speed.USUAL)
    return chosen, chosen.reason(speed.USUAL)


def _measure(
    variants: Sequence[ModelVariant], question: PlanOptions, settings: Settings, say: PhaseReport, began_s: float
) -> tuple[Planner, list[tuple[ModelVariant, LayerTimes]]]:
    """Returns a planner with this machine's rates, and the layer times of each encoding of the model.

    Encodings that do not fit are not timed, nor those for which the time does not suffice: the command began at
    `began_s` of `time.monotonic`.
    """
    machine = probes.probe_machine(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    threads = settings.engine.threads or machine.cpus
    torch.set_num_threads(threads)
    pool = ThreadPool(threads)
    untimed = LayerTimes(0.0, 0.0, question.sequences, 0.0, min(question.prompt_tokens, settings.engine.step_tokens))
    times = {variant.label: replace(untimed, why="it does not fit") for variant in variants}
    planner = Planner(question, settings, machine, MachineRates(0.0, 0.0, 0.0))
    fitting = [variant for variant in variants if planner.has_room(variant)]
    times.update((variant.label, replace(untimed, why=NOT_COMPILED)) for variant in fitting)
    specs = [variant.spec for variant in fitting]
    with closing(CompiledKernels(kernel_dir(settings), specs)) if fitting else nullcontext() as compiled:
        say("reading the disk")  # while the kernels are compiled
        reads = _reads(variants, question, settings)
        if compiled is not None:
            say("compiling kernels")
            compiled.wait(began_s + COMPILED_S)
        planner = replace(planner, rates=_rates(variants[0], reads[0], pool, settings))
        if compiled is not None and (ready := [each for each in fitting if compiled.has_code(each.spec)]):
            kernels = compiled.link(threads, settings.engine.prompt_activations == "int8")
            ends_s = began_s + DEADLINE_S
            timed = measure_layers(ready, kernels, question.sequences, untimed.prompt_tokens, say, ends_s)
            times.update((variant.label, taken) for variant, taken in zip(ready, timed, strict=True))
    say("")
    return planner, [
        (each, replace(times[each.label], disk_s=disk_s)) for each, disk_s in zip(variants, reads, strict=True)
    ]


def _reads(variants: Sequence[ModelVariant], question: PlanOptions, settings: Settings) -> list[tuple[float, ...]]:
    """Returns for each variant the seconds of reading some experts at once; (): not measured."""
    sizes = [variant.spec.geometry.largest_bytes for variant in variants]
    if rate := question.disk_bytes_per_s:
        return [tuple(count * size / rate for count in speed.READ_AT_ONCE) for size in sizes]
    return read_times(Path(settings.model.store_dir), sizes, speed.READ_AT_ONCE)


def _rates(variant: ModelVariant, disk_s: Sequence[float], pool: ThreadPool, settings: Settings) -> MachineRates:
    """Returns the rates of this machine, whose disk takes `disk_s` for experts of the variant."""
    device = settings.device[0]
    read_bytes = speed.READ_AT_ONCE[-1] * variant.spec.geometry.largest_bytes
    disk_bytes_per_s = read_bytes / disk_s[-1] if disk_s else 0.0
    return MachineRates(device.memory_bytes_per_s or memory_rate(pool), disk_bytes_per_s, device.link_bytes_per_s)


def advise(
    planner: Planner, measured: Sequence[tuple[ModelVariant, LayerTimes]], forecasts: Sequence[SpeedForecast]
) -> Iterator[tuple[str, float]]:
    """Yields possible changes, each with the factor by which the model would be faster; the greatest first."""
    now = forecasts[0]
    tried = [(f"edgemoe pack {each.packing}", each) for each in forecasts[1:]]
    tried.append((f"{format_size(MORE_BYTES)} more RAM", planner.forecast(*measured[0], more_bytes=MORE_BYTES)))
    another = planner.question.boxes + 1
    tried.append((f"{another} boxes like this one", planner.forecast(*measured[0], boxes=another)))
    gains = [(what, each.tokens_per_s / now.tokens_per_s if now.tokens_per_s else 0.0) for what, each in tried]
    yield from sorted(((what, gain) for what, gain in gains if gain > 1.05), key=lambda each: -each[1])


def _share(budgets: Budgets, size_bytes: int) -> float:
    layout = SlabLayout.within(size_bytes, budgets.experts)
    if layout is None:
        return 0.0
    slots = sum(per * given for per, given in zip(layout.per_extent, layout.divided(), strict=True))
    return min(1.0, slots / budgets.experts.count)


def _as_json(
    subject: PlannedModel,
    planner: Planner,
    forecasts: Sequence[SpeedForecast],
    advice: Sequence[tuple[str, float]],
    alone: SpeedForecast | None,
    chosen: EncodingOffer | None,
) -> dict[str, object]:
    one_box = {"one_box": asdict(alone)} if alone is not None else {}
    auto = {"auto": asdict(chosen)} if chosen is not None else {}
    return (
        one_box
        | auto
        | {
            "model": subject.name,
            "family": subject.spec.family,
            "fault": subject.fault,
            "question": asdict(planner.question),
            "machine": asdict(planner.machine),
            "rates": asdict(planner.rates),
            "encodings": [asdict(each) for each in forecasts],
            "would_help": [{"what": what, "times_as_fast": round(gain, 2)} for what, gain in advice],
        }
    )


def _picture(
    subject: PlannedModel,
    planner: Planner,
    forecasts: Sequence[SpeedForecast],
    advice: Sequence[tuple[str, float]],
    alone: SpeedForecast | None,
    chosen: EncodingOffer | None,
) -> Group:
    question, rates, geometry = planner.question, planner.rates, subject.spec.geometry
    table = Table(title=f"{subject.name} ({subject.spec.family}) on {_boxes(question.boxes)}")
    for column in ("encoding", "dense", f"KV, {question.sequences} x {question.context_tokens}", "experts"):
        table.add_column(column, justify="left" if column == "encoding" else "right")
    for column in ("in VRAM", "in RAM", "disk only", "tokens/s", f"with {question.sequences}", "first token", "limit"):
        table.add_column(column, justify="left" if column == "limit" else "right")
    for each in forecasts:
        sizes = (format_size(size) for size in (each.dense_bytes, each.kv_bytes, each.expert_bytes))
        shares = (f"{share:.0%}" for share in (each.in_vram, each.in_ram, each.on_disk))
        known = [f"{each.tokens_per_s:.1f}", f"{each.batch_tokens_per_s:.1f}", f"{each.first_token_s:.2f} s"]
        most = f"< {each.most_tokens_per_s:.1f}" if each.most_tokens_per_s else ""
        speeds = known if each.tokens_per_s else [most, "", ""]
        table.add_row(
            each.encoding, *sizes, *(shares if each.context_tokens else [""] * 3), *speeds, each.why or each.limit
        )
    disk = f"at {format_rate(rates.disk_bytes_per_s)}"
    if not rates.disk_bytes_per_s:
        disk = f"at an unknown rate (model.store_dir may not be written to, or has not {format_size(ROOM_BYTES)} free)"
    lines = [
        f"{geometry.layers} layers of {geometry.experts} experts, {geometry.top_k} a token. This machine reads memory "
        f"at {format_rate(rates.memory_bytes_per_s)}, the disk of the stores {disk}, "
        f"and has {format_size(planner.machine.ram_available_bytes)} of RAM free.",
        f"First token: of a prompt of {question.prompt_tokens} tokens. Routing: {question.curve}.",
        *(
            ["<: the limit by the rates of memory and disk."]
            if any(each.most_tokens_per_s for each in forecasts)
            else []
        ),
        *_rows_lines(forecasts),
        *([compared(question, forecasts[0], alone)] if alone is not None else []),
        *([f"--experts auto takes {chosen.reason(question.curve)}."] if chosen is not None else []),
        *(f"Would help: {what} ({gain:.1f} times as fast)" for what, gain in advice),
        *([f"Planned by {CONFIG} alone, for the files cannot be packed: {subject.fault}"] if subject.fault else []),
    ]
    return Group(table, "\n".join(lines))


def _rows_lines(forecasts: Sequence[SpeedForecast]) -> list[str]:
    """Returns a line on the tables that stay on disk, if the model has some."""
    for each in forecasts:
        if each.table_bytes:
            on_disk, in_ram = format_size(each.table_bytes), format_size(each.row_cache_bytes)
            return [f"Tables of {on_disk} ({each.encoding}) stay on disk, with {in_ram} of RAM for rows of them."]
    return []


def compared(question: PlanOptions, together: SpeedForecast, alone: SpeedForecast) -> str:
    """Returns a line that compares several boxes with one of them, for the model as it is."""
    boxes = f"{_boxes(question.boxes)}, at {format_rate(question.box_link_bytes_per_s)}"
    if not (together.tokens_per_s and alone.tokens_per_s):
        return f"{boxes}: not compared with one box ({together.why or together.limit or alone.limit})."
    gain = together.tokens_per_s / alone.tokens_per_s
    speeds = f"{together.tokens_per_s:.1f} tokens/s, one alone {alone.tokens_per_s:.1f}"
    if gain > 1.02:
        return f"{boxes}: {speeds}, {gain:.1f} times as fast."
    why = "all experts fit into its memory" if not alone.on_disk else "its disk brings experts as soon as the others do"
    return f"{boxes}: {speeds}: no gain, for {why}. Several boxes then stand the death of one, and share requests."


def _boxes(boxes: int) -> str:
    return "this machine" if boxes == 1 else f"{boxes} boxes like this one"

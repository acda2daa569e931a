"""Builds an engine from settings: budgets, store, dense weights, KV blocks, tiers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import torch
from llguidance import LLTokenizer

from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.budgets import Budgets, resolve_budgets
from edgemoe.config.settings import Settings
from edgemoe.engine.engine import Engine, ServingBudget
from edgemoe.engine.grammar import GrammarCompiler
from edgemoe.engine.loop import Emit
from edgemoe.engine.steps import LoadedModel, StepObservers
from edgemoe.errors import CapacityError, CheckpointError
from edgemoe.experts import compiled_parts
from edgemoe.experts.activity import ActivityCounter
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.moe import FetchOptions
from edgemoe.experts.compute.ram_scrubber import RamScrubber
from edgemoe.experts.predict.scoutgate_forecaster import ScoutGateForecaster
from edgemoe.families.spec import ModelSpec
from edgemoe.jit.object_cache import link
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder, StagedDecoder
from edgemoe.model.dense_weights import held_bytes
from edgemoe.model.kv import KVCache
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.files import note_use
from edgemoe.store.manifest import DENSE, Manifest, served_info, spec_of, verify_copies, verify_dense, verify_table
from edgemoe.store.reader import ExpertStore
from edgemoe.store.row_table import RowTable, open_row_table
from edgemoe.telemetry import probes
from edgemoe.telemetry.recorder import Recorder
from edgemoe.telemetry.routing_recording import RecordingHeader
from edgemoe.types.experts import ExpertGeometry, LivePolicy, ServedModel, Tier
from edgemoe.types.machine import Machine
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.step import StepRouting
from edgemoe.worker.cache_policy import PredictivePolicy, costs_file, predictive_policy, scoutgate_for
from edgemoe.worker.model_preparation import ReportPhase, kernel_dir, link_kernels, needs_of, report_compiling

if TYPE_CHECKING:
    from edgemoe.worker.cluster_parts import ClusterParts
    from edgemoe.worker.stage_parts import StageParts

log = logging.getLogger(__name__)

P = ParamSpec("P")
MISSING_EXPERT_TIMEOUT_CALLS = 2  # time-outs of expert calls for which a request waits for a missing expert


@dataclass(frozen=True, slots=True)
class Assembly:
    """A model in memory, ready to run. `close` it when the step loop and the tiers have ended."""

    settings: Settings
    model: ModelInfo
    budgets: Budgets
    engine: Engine
    tiers: ExpertTiers
    store: ExpertStore
    close: Callable[[], None]
    activity: ActivityCounter | None = None  # no placement depends on it
    sharing: ClusterParts | None = None  # without a cluster
    scrubber: RamScrubber | None = None
    scoutgate: ScoutGateForecaster | None = None  # without cache.scoutgate
    controller: PredictivePolicy | None = None  # with cache.policy = "lru", or all experts in place
    table: RowTable | None = None  # of rows; most models have none
    stages: StageParts | None = None  # other boxes hold some of the layers


def assemble(settings: Settings, emit: Emit, report: ReportPhase) -> Assembly:
    """Loads the packed store at `settings.model.path` on the calling thread, which takes seconds to minutes.

    Raises StoreError, CheckpointError, CapacityError, ConfigError.
    """
    directory = Path(settings.model.path)
    manifest = Manifest.load(directory)
    spec = _held_part(settings, replace(spec_of(manifest), kv_int8=settings.engine.kv_cache_dtype == "int8"))
    served, geometry = ServedModel(manifest.digest, spec.geometry), spec.geometry
    budgets = _budgets(settings, spec, directory, manifest)
    torch.set_num_threads(budgets.threads)
    with ExitStack() as opened:
        store = opened.enter_context(ExpertStore(directory, manifest, mirrors=settings.model.mirrors))
        note_use(directory)
        verify_copies(directory, manifest)
        verify_dense(directory, manifest.dense, lambda share: report("verifying", share))
        device = torch.device(budgets.devices[0].kind.replace("emulated", "cpu"))
        kernels = _kernels(settings, budgets, geometry, device, report)
        if kernels is not None:
            opened.callback(kernels.close)
        if (table := _row_table(spec, directory, manifest, budgets)) is not None:
            opened.callback(table.close)
        decoder = _decoder(settings, spec, directory, device, kernels, partial(report, "weights"), table)
        report("experts")
        activity = _activity(settings, geometry, budgets)
        sharing = _cluster_parts(settings, served, store, activity)
        embedding = decoder.embedding if isinstance(decoder, Decoder) else None
        scoutgate = None if embedding is None else scoutgate_for(settings, manifest, served, embedding)
        if scoutgate is not None:
            opened.callback(scoutgate.close)
        name = "lru" if budgets.all_fit or spec.held is not None else settings.cache.policy  # others see all layers
        controller = predictive_policy(name, settings, geometry, directory, scoutgate, kernel_dir(settings))
        policy = controller.policy if controller else LRU(geometry.layers, geometry.experts)
        memory = _memory(settings, budgets, report)
        tiers = _tiers(settings, geometry, memory, store, sharing, kernels, policy)
        opened.callback(tiers.close)
        tiers.spread_by(activity)
        if controller is not None:
            opened.callback(controller.close)
            if settings.cache.prefetch:
                controller.attach(tiers.residency, tiers.loader, geometry)
        recorder = _recorder(settings, served)
        if recorder is not None:
            opened.callback(recorder.close)
        observers = _observers(controller, recorder, scoutgate, activity, sharing)
        model = _loaded(budgets, decoder, tiers, _grammars(directory, spec), table)
        engine = _engine(settings, budgets, model, emit, observers)
        opened.callback(engine.close)
        closing = opened.pop_all()
    info, stages = served_info(settings.model.name, manifest, spec), _stage_parts(settings, decoder, model, engine)
    parts = activity, sharing, _scrubber(geometry, tiers, store, sharing, engine), scoutgate, controller, table
    return Assembly(settings, info, budgets, engine, tiers, store, closing.close, *parts, stages)


def _budgets(settings: Settings, spec: ModelSpec, directory: Path, manifest: Manifest) -> Budgets:
    """Returns the budgets, and logs them. Raises CapacityError, StoreError."""
    dense_bytes = manifest.dense.bytes if spec.held is None else held_bytes(spec, directory / DENSE)
    budgets = resolve_budgets(settings, _machine(), needs_of(spec, dense_bytes))
    for line in budgets.lines():
        log.info(line)
    return budgets


def _row_table(spec: ModelSpec, directory: Path, manifest: Manifest, budgets: Budgets) -> RowTable | None:
    """Verifies and opens the model's table of rows; None where it has none. Raises StoreError."""
    for entry in manifest.tables:
        verify_table(directory, entry)
    return open_row_table(spec, directory, budgets.row_cache_bytes)


def _held_part(settings: Settings, spec: ModelSpec) -> ModelSpec:
    """Returns the spec with this box's layers where they are divided over boxes. Raises ConfigError."""
    if not settings.cluster.stages:
        return spec
    from edgemoe.worker.stage_parts import spec_of_stage  # a box on its own loads nothing of the cluster

    return spec_of_stage(spec, settings)


def _stage_parts(
    settings: Settings, decoder: Decoder | StagedDecoder, model: LoadedModel, engine: Engine
) -> StageParts | None:
    """Returns the parts of an engine whose decoder has some layers only; None for a whole one."""
    if not isinstance(decoder, StagedDecoder):
        return None
    from edgemoe.worker.stage_parts import stage_parts  # a box on its own loads nothing of the cluster

    return stage_parts(settings, decoder, model, engine)


def _decoder(
    settings: Settings,
    spec: ModelSpec,
    directory: Path,
    device: torch.device,
    kernels: Kernels | None,
    progress: Callable[[float], object],
    table: RowTable | None,
) -> Decoder | StagedDecoder:
    """Loads the dense weights of this box's layers, or of all."""
    if spec.held is not None:
        return StagedDecoder.load(spec, directory / DENSE, device, kernels, progress)
    return Decoder.load(spec, directory / DENSE, device, kernels, progress, settings.engine.cuda_graphs, table)


def _kernels(
    settings: Settings, budgets: Budgets, geometry: ExpertGeometry, device: torch.device, report: ReportPhase
) -> Kernels | None:
    """Links the tiers' code, and the kernels if the CPU computes."""
    if device.type == "cpu" or not budgets.all_fit:  # the CPU computes experts that a GPU does not hold
        return link_kernels(settings, budgets.threads, geometry.bf16, report)
    report("kernels")
    link(compiled_parts.TIERS.codes, kernel_dir(settings), progress=report_compiling(report, "kernels"))
    return None


def _machine() -> Machine:
    return probes.probe_machine(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))


def _memory(settings: Settings, budgets: Budgets, report: ReportPhase) -> TierMemory:
    return TierMemory(
        budgets.ram_bytes,
        budgets.devices,
        containment=budgets.containment,
        costs=costs_file(settings),
        progress=lambda share: report("pinning", share),
    )


def _tiers(
    settings: Settings,
    geometry: ExpertGeometry,
    memory: TierMemory,
    store: ExpertStore,
    sharing: ClusterParts | None,
    kernels: Kernels | None,
    policy: LivePolicy,
) -> ExpertTiers:
    tiers = ExpertTiers(
        geometry,
        store if sharing is None else sharing.store,
        memory,
        {Tier.VRAM: policy, Tier.RAM: policy},
        kernels,
        fetching=FetchOptions(settings.cache.prefetch, settings.record.hints, settings.record.hidden),
        on_disk=None if sharing is None else sharing.shelf.on_disk(),
    )
    if sharing is not None:
        sharing.shelf.attach(tiers.residency, tiers.ram)
    return tiers


def _scrubber(
    geometry: ExpertGeometry, tiers: ExpertTiers, store: ExpertStore, sharing: ClusterParts | None, engine: Engine
) -> RamScrubber:
    def checksum_of(layer: int, expert: int) -> str | None:
        if sharing is not None:
            return sharing.shelf.checksum(layer, expert)
        return store.manifest.entry(layer, expert).xxh3_128 if store.manifest.present(layer, expert) else None

    source = store if sharing is None else sharing.store
    return RamScrubber(geometry, tiers.residency, tiers.ram, source, checksum_of, engine.is_idle)


def _activity(settings: Settings, geometry: ExpertGeometry, budgets: Budgets) -> ActivityCounter | None:
    """Returns the counter of chosen experts where placement over boxes or devices depends on it, else None."""
    if settings.cluster.node:
        return ActivityCounter(geometry, successions=settings.cluster.placement == "gimbal")
    return ActivityCounter(geometry) if len(budgets.devices) > 1 else None


def _cluster_parts(
    settings: Settings, served: ServedModel, store: ExpertStore, activity: ActivityCounter | None
) -> ClusterParts | None:
    """Returns the parts that a box in a cluster has besides; None outside one."""
    if not settings.cluster.node or activity is None:
        return None
    from edgemoe.worker.cluster_parts import cluster_parts_of  # a box on its own loads nothing of the cluster

    return cluster_parts_of(Path(settings.model.path), served, store, activity)


def _recorder(settings: Settings, served: ServedModel) -> Recorder | None:
    if not settings.record.dir:
        return None
    sizes, record = served.geometry, settings.record
    more = record.hints, sizes.hidden * record.hidden, sizes.bf16
    return Recorder(record, RecordingHeader(served.digest, sizes.layers, sizes.experts, sizes.top_k, *more))


def _observers(
    controller: PredictivePolicy | None,
    recorder: Recorder | None,
    scoutgate: ScoutGateForecaster | None,
    activity: ActivityCounter | None,
    sharing: ClusterParts | None,
) -> StepObservers:
    """Returns the observers of each step, called in this order."""
    observers: list[Callable[[StepRouting], None]] = []
    if controller is not None:
        observers.append(controller.observe)
    if recorder is not None:
        observers.append(recorder.add)
    if scoutgate is not None:
        observers.append(scoutgate.learn)
    if activity is not None:
        observers.append(activity.add)
    if sharing is not None:
        observers += [sharing.last_chunks.on_step_ended, sharing.lending.on_step_ended]
    expecting = (scoutgate, controller, sharing.last_chunks if sharing is not None else None)
    return StepObservers(_to_all(observers), _to_all([each.on_step_begun for each in expecting if each is not None]))


def _to_all(listeners: Sequence[Callable[P, None]]) -> Callable[P, None] | None:
    if len(listeners) < 2:
        return listeners[0] if listeners else None

    def notify_all(*news: P.args, **named: P.kwargs) -> None:
        for listen in listeners:
            listen(*news, **named)

    return notify_all


def _loaded(
    budgets: Budgets,
    decoder: Decoder | StagedDecoder,
    tiers: ExpertTiers,
    grammars: GrammarCompiler | None,
    table: RowTable | None,
) -> LoadedModel:
    """Allocates keys, values and states. Raises CapacityError."""
    spec, blocks, windows = decoder.spec, budgets.kv_blocks, budgets.window_blocks
    if not blocks:
        raise CapacityError(f"{budgets.kv_bytes} bytes hold no block of KV; raise memory.kv_bytes")
    cache = KVCache.of(spec, blocks, budgets.state_slots, decoder.device, windows)
    return LoadedModel(spec, decoder, tiers.experts, cache, decoder.device, grammars, table)


def _engine(settings: Settings, budgets: Budgets, model: LoadedModel, emit: Emit, watchers: StepObservers) -> Engine:
    blocks, windows = budgets.kv_blocks, budgets.window_blocks
    timeout_s = MISSING_EXPERT_TIMEOUT_CALLS * settings.cluster.call_timeout_s if settings.cluster.node else 0.0
    return Engine(
        model,
        settings.engine,
        ServingBudget(blocks, budgets.context_tokens, budgets.kv_swap_bytes, budgets.state_slots, timeout_s, windows),
        emit,
        watchers=watchers,
    )


def _grammars(directory: Path, spec: ModelSpec) -> GrammarCompiler | None:
    """Returns the compiler of grammars, or None where the model has no tokenizer. Raises CheckpointError."""
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    ends = list(TextModel(directory).eos) or None
    try:
        return GrammarCompiler(LLTokenizer(tokenizer.read_text(encoding="utf-8"), n_vocab=spec.vocab, eos_token=ends))
    except ValueError as error:  # such as more tokens than the model has
        raise CheckpointError(f"{tokenizer} does not fit the model: {error}; pull or pack the model again") from error

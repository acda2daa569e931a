"""Divides a model's layers over boxes, as `cluster.stages` says: this box's part, and the way to the others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from edgemoe.cluster.data.data_plane import EXPERT_CALL_BYTES, DataPlane
from edgemoe.cluster.data.messages import OpenStage
from edgemoe.cluster.data.stage_calls import StageClient
from edgemoe.config.settings import ClusterSettings, Settings
from edgemoe.engine.engine import Engine
from edgemoe.engine.stage_host import StageHost
from edgemoe.engine.steps import LoadedModel
from edgemoe.errors import ConfigError
from edgemoe.families.sparse_families import beginnings
from edgemoe.families.spec import ModelSpec
from edgemoe.model.decoder import StagedDecoder
from edgemoe.model.dense_weights import held_bytes
from edgemoe.store.manifest import DENSE
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.stages import CacheRoom, Stage, parse_stages

ROW_BYTES = 4  # of a number of the residual


def spec_of_stage(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """Returns the spec with this box's layers, as `cluster.stages` says. Raises ConfigError."""
    stages, node = parse_stages(settings.cluster.stages), settings.cluster.node
    if stages[-1].after != spec.layers:
        raise ConfigError(
            f"cluster.stages ends with layer {stages[-1].after - 1}, but the model's last is {spec.layers - 1}"
        )
    if spec.layer_inputs is not None:
        raise ConfigError(
            f"cluster.stages: layers of the family {spec.family} read rows of a table, which only boxes with all "
            "layers can do yet; serve it without stages"
        )
    if stranded := [stage.first for stage in stages if stage.first not in beginnings(spec)]:
        raise ConfigError(
            f"cluster.stages: layer {stranded[0]} needs the layer before it on the same box, which chooses its tokens. "
            f"Begin a box's layers with one of {', '.join(map(str, beginnings(spec)))}"
        )
    largest_bytes = (settings.engine.step_tokens + settings.engine.max_sequences) * spec.hidden * ROW_BYTES
    if largest_bytes > EXPERT_CALL_BYTES // 2:
        most = EXPERT_CALL_BYTES // 2 // (spec.hidden * ROW_BYTES) - settings.engine.max_sequences
        raise ConfigError(
            f"cluster.stages: a step's tokens are too many for one message; set engine.step_tokens={most}"
        )
    first = next(stage for stage in stages if stage.node == node)
    return replace(spec, held=(first.first, first.after))


class StageParts(NamedTuple):
    """Parts of an engine that only a model with layers divided over boxes needs."""

    stages: tuple[Stage, ...]
    decoder: StagedDecoder
    host: StageHost | None  # computes this box's layers for another box; None on the box with the first stage
    dense_bytes: Mapping[str, int]  # of each box's layers, by node

    @property
    def takes_requests(self) -> bool:
        """Returns whether this box has the first stage."""
        return self.host is None

    def join(self, digest: str, cluster: ClusterSettings, engine: Engine, plane: DataPlane) -> None:
        """Connects the box with the first stage to the other stages, which serve theirs. Used on the event loop."""
        if self.host is not None:
            plane.stage.join(self.host, self.decoder.spec.hidden)
            return

        rooms: dict[str, CacheRoom] = {}

        def restart(node: str, room: CacheRoom, then: Callable[[], None]) -> None:
            rooms[node] = room
            engine.compute_again(CacheRoom.least(rooms.values()))
            engine.loop.call(then)

        timeouts_s = cluster.call_timeout_s, cluster.stage_timeout_s
        self.decoder.callers = [
            plane.stage_client(stage, OpenStage(digest, stage.first, stage.after), timeouts_s, restart)
            for stage in self.stages[1:]
        ]

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of steps of stages for /metrics, by their final names."""
        values: dict[str, float] = {
            named(names.STAGE_DENSE_BYTES, peer=node): size for node, size in self.dense_bytes.items()
        }
        if self.host is not None:
            return values | {names.STAGE_STEPS_SERVED: self.host.steps}
        for caller in self.decoder.callers:
            if isinstance(caller, StageClient):
                node = caller.stage.node
                values[named(names.STAGE_OPEN, peer=node)] = float(caller.is_open)
                values[named(names.STAGE_STEPS, peer=node)] = caller.steps
                values[named(names.STAGE_FAILURES, peer=node)] = caller.failures
                values[named(names.STAGE_SECONDS, peer=node)] = caller.waited_s
        return values


def stage_parts(settings: Settings, decoder: StagedDecoder, model: LoadedModel, engine: Engine) -> StageParts:
    """Returns the parts of an engine whose decoder has some layers only."""
    stages, node = parse_stages(settings.cluster.stages), settings.cluster.node
    host = None if decoder.spec.has_ends else StageHost(stages, node, decoder.own, model, engine)
    dense, whole = Path(settings.model.path) / DENSE, decoder.spec
    dense_bytes = {each.node: held_bytes(replace(whole, held=(each.first, each.after)), dense) for each in stages}
    return StageParts(stages, decoder, host, dense_bytes)

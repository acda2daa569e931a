"""Divides a model's layers over boxes by their memory, for `cluster.stages`."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from edgemoe.cli.plan.speed import ModelVariant
from edgemoe.config.budgets import Budgets, resolve_budgets
from edgemoe.config.settings import Settings
from edgemoe.config.sizes import format_size, parse_size
from edgemoe.errors import CapacityError, ConfigError
from edgemoe.families.sparse_families import beginnings
from edgemoe.types.machine import Machine
from edgemoe.types.stages import Stage
from edgemoe.worker.model_preparation import needs_of

NAMED = re.compile(r"([a-z0-9][a-z0-9-]{0,62}):(.+)")
STAGE_S = 1.3e-3  # that each box after the first adds to a token, beside its link (docs/design/stages.md)
NUMBER_BYTES = 4  # of a residual, which is sent in float32
MOST_BOXES = 64  # of a cluster
STEPS = 30  # of the search for the evenest division


@dataclass(frozen=True, slots=True)
class PlannedBox:
    """A box by its name in `cluster.stages`, and the memory that is free there."""

    node: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A box's layers, the bytes of their dense weights, and the share of all experts in its memory."""

    node: str
    first: int
    last: int
    dense_bytes: int
    in_ram: float


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A division of the layers: the value of `cluster.stages`; "" with the reason where there is none."""

    line: str
    why: str = ""
    stages: tuple[PlannedStage, ...] = ()
    token_s: float = 0.0  # that a token takes longer, beside the latency of links
    latencies: int = 0  # of links, that a token waits for

    def lines(self) -> list[str]:
        """Returns the lines to print."""
        if not self.line:
            return [f"Layers divided over boxes (cluster.stages): {self.why}."]
        rows = [
            f"  {each.node}: {Stage(each.node, each.first, each.last + 1)}, {format_size(each.dense_bytes)} of dense "
            f"weights, {each.in_ram:.0%} of all experts in RAM"
            for each in self.stages
        ]
        return [
            "The dense weights do not fit every box. Divide the layers by this line, in [cluster] of each box:",
            f'stages = "{self.line}"',
            *rows,
            f"Each token then takes {1e3 * self.token_s:.1f} ms longer, and {self.latencies} latencies of the link.",
        ]


def named_boxes(texts: Sequence[str]) -> list[PlannedBox]:
    """Returns the boxes in texts like "tower:24GB". Raises ConfigError."""
    found: list[PlannedBox] = []
    for text in texts:
        if (parts := NAMED.fullmatch(text)) is None:
            raise ConfigError(f"--box {text}: write NAME:MEMORY, as in tower:24GB")
        if parts[1] in [box.node for box in found]:
            raise ConfigError(f"--box {text}: {parts[1]} is named twice")
        found.append(PlannedBox(parts[1], parse_size(parts[2])))
    if len(found) > MOST_BOXES:
        raise ConfigError(f"--box names {len(found)} boxes; {MOST_BOXES} at most")
    return found


def plan_stages(
    variant: ModelVariant, boxes: Sequence[PlannedBox], settings: Settings, link_bytes_per_s: float, *, kv_tokens: int
) -> StagePlan:
    """Returns a division that takes about the same share of each box's memory, in the order of the boxes.

    `kv_tokens` are the tokens whose keys and values should have room.
    """
    spec = variant.spec
    if all(_budgets(variant, box, settings) is not None for box in boxes):
        return StagePlan("", "not needed, for the dense weights fit each box")
    if len(boxes) < 2:
        return StagePlan("", "it takes two boxes; name each with its memory, as in --box tower:24GB --box attic:16GB")
    if spec.layer_inputs is not None:
        return StagePlan("", f"not possible for the family {spec.family}, whose layers read rows of a table")
    if len(boxes) > spec.layers:
        return StagePlan("", f"the model has {spec.layers} layers only")
    bounds = _divided(variant, boxes, settings, kv_tokens)
    if bounds is None:
        return StagePlan("", "these boxes together have too little memory for the dense weights")
    stages: list[PlannedStage] = []
    for box, first, after in zip(boxes, bounds[:-1], bounds[1:], strict=True):
        part = _part(variant, first, after)
        if (budgets := _budgets(part, box, settings)) is None:
            return StagePlan("", f"{box.node} has too little memory for an even share of the layers; add a box")
        in_ram = min(1.0, budgets.ram_bytes / spec.geometry.all_bytes)
        stages.append(PlannedStage(box.node, first, after - 1, part.dense_bytes, in_ram))
    further = len(boxes) - 1
    token_s = further * (STAGE_S + 2 * NUMBER_BYTES * spec.hidden / link_bytes_per_s)
    line = " ".join(f"{each.node}:{each.first}-{each.last}" for each in stages)
    return StagePlan(line, "", tuple(stages), token_s, 2 * further)


def _part(variant: ModelVariant, first: int, after: int) -> ModelVariant:
    return replace(variant, spec=replace(variant.spec, held=(first, after)))


def _budgets(variant: ModelVariant, box: PlannedBox, settings: Settings) -> Budgets | None:
    """Returns a box's budgets; None where the model, or the part of it, does not fit."""
    machine = Machine(box.memory_bytes, box.memory_bytes, cpus=1, memlock_bytes=None)
    try:
        return resolve_budgets(settings, machine, needs_of(variant.spec, variant.dense_bytes))
    except CapacityError:
        return None


def _divided(
    variant: ModelVariant, boxes: Sequence[PlannedBox], settings: Settings, kv_tokens: int
) -> tuple[int, ...] | None:
    """Returns the first layer of each box and the number of layers; None where the boxes hold too little."""
    layers = variant.spec.layers
    sizes = [_layer_bytes(variant, layer, kv_tokens) for layer in range(layers)]
    rooms = [box.memory_bytes - settings.memory.headroom_bytes for box in boxes]
    allowed = {*beginnings(variant.spec), layers}
    found, low, high = _filled(sizes, rooms, 1.0, allowed), 0.0, 1.0
    for _ in range(STEPS if found is not None else 0):
        share = (low + high) / 2
        tried = _filled(sizes, rooms, share, allowed)
        low, high = (low, share) if tried is not None else (share, high)
        found = tried or found
    return found


def _layer_bytes(variant: ModelVariant, layer: int, kv_tokens: int) -> int:
    part = _part(variant, layer, layer + 1)  # the first layer's box also holds embedding and head
    needs = needs_of(part.spec, part.dense_bytes)
    return needs.dense_bytes + needs.held_bytes(kv_tokens) + needs.state_bytes


def _filled(
    sizes: Sequence[int], rooms: Sequence[int], share: float, allowed: Container[int]
) -> tuple[int, ...] | None:
    """Returns the bounds where each box takes as many of the layers as a share of its room holds; None if some stay.

    Every bound is one of `allowed`.
    """
    bounds = [0]
    for number, room in enumerate(rooms):
        first, left = bounds[-1], share * room
        after, last = first, len(sizes) - (len(rooms) - number - 1)  # one layer at least for each box behind
        while after < last and sizes[after] <= left:
            left -= sizes[after]
            after += 1
        while after not in allowed and after > first:
            after -= 1
        if after == first:
            return None
        bounds.append(after)
    return tuple(bounds) if bounds[-1] == len(sizes) else None

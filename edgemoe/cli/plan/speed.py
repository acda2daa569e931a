"""Forecasts a model's speed from the machine's rates and the share of its experts in memory. Pure but for `find_model`.

A step takes its layers' time with every expert in memory, plus the time that missing experts take to arrive. The miss
ratio is read from a fixed curve: the mean of the policy `learned` on recordings of two models
(tools/research/results/cache_replay.md). `even` is for gates that choose evenly, as random weights do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgemoe.experts.compute.cost_model import WORTH_S
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.store.catalog import fault_of_weights, is_store, resolve, spec_at
from edgemoe.store.checkpoint import CONFIG
from edgemoe.store.layout import KEEP, WantedEncodings, stored_encoding, table_sizes
from edgemoe.store.manifest import Manifest, spec_of
from edgemoe.types.encoding import AFFINE, pair_of

# Encodings of experts and dense weights that a checkpoint can be packed in: few, for each has kernels of its own.
PACKINGS = (("int8", KEEP), ("q6_k", KEEP), ("q4_k", KEEP), ("int4", KEEP), ("int4", "int8"))
ALL = "all"  # asks for every encoding
OTHERS = (each.name for each in AFFINE if (each.name, KEEP) not in PACKINGS)
EVERY_PACKING = (*PACKINGS, ("q4_k+q6_k", KEEP), *((name, KEEP) for name in OTHERS))
HEADER_BYTES = 160  # of one tensor in a file's header, about


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """A model in one encoding, and how to get it so."""

    label: str
    spec: ModelSpec
    packing: str  # options of `edgemoe pack`; "" is the model as it is

    @property
    def dense_bytes(self) -> int:
        """Returns the size of the file of dense weights, to about a page."""
        shapes = dense_shapes(self.spec)
        return sum(dense_size(self.spec, name, shape) + HEADER_BYTES for name, shape in shapes.items())

    @property
    def table_bytes(self) -> int:
        """Returns the size of the tables that stay on disk, to about a page."""
        return table_sizes(self.spec)[0]

    @property
    def expert_bits(self) -> float:
        """Returns the mean bits of an expert's weight."""
        geometry = self.spec.geometry
        weights = geometry.hidden * (geometry.first_rows + geometry.width)
        sizes = [geometry.expert_bytes(layer) - geometry.bias_bytes for layer in range(geometry.layers)]
        return 8 * sum(sizes) / len(sizes) / weights


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model: its name, its spec as it is, its store where it has one, and the fault of its files."""

    name: str
    spec: ModelSpec
    store: Path | None
    fault: str = ""

    def variants(self, experts: str = "") -> Iterator[ModelVariant]:
        """Yields the model as it is, then in possible encodings; a store has only its own.

        `experts` is an option of `edgemoe pack` that names the only other one, or "all". Raises ConfigError.
        """
        yield ModelVariant(_label(self.spec), self.spec, "")
        if self.store is not None:
            return
        named = ((experts, KEEP),) if experts and experts != ALL else PACKINGS
        seen = {_label(self.spec)}
        for wanted, dense in EVERY_PACKING if experts == ALL else named:
            spec = self._packed(WantedEncodings.parse(wanted, dense))
            if spec is not None and _label(spec) not in seen:
                seen.add(_label(spec))
                packing = f"--experts {wanted}" + (f" --dense {dense}" if dense != KEEP else "")
                yield ModelVariant(_label(spec), spec, packing)

    def _packed(self, wanted: WantedEncodings) -> ModelSpec | None:
        """Returns the spec in these encodings; None where they do not fit its experts."""
        spec, geometry = self.spec, self.spec.geometry
        names = [wanted.of_layer(layer, geometry.layers) for layer in range(geometry.layers)]
        kept = [geometry.encoding_name(layer) if name == KEEP else name for layer, name in enumerate(names)]
        sizes = (geometry.hidden, geometry.width)
        if not all(each.fits(size) for name in {*kept} for each in pair_of(name) for size in sizes):
            return None
        dense = spec.dense_encoding if wanted.dense == KEEP else wanted.dense
        return replace(spec, encodings=tuple(kept), dense_encoding=dense)


def find_model(name: str, store_dir: Path) -> PlannedModel:
    """Returns the model in a checkpoint's folder, a packed store (by name, too) or a config.json.

    Raises CheckpointError, UnsupportedModel, StoreError.
    """
    path = Path(name).expanduser()
    if path.exists() and not is_store(path):
        about = path.absolute()
        is_config = about.is_file() and about.name == CONFIG
        fault = fault_of_weights(about) if about.is_dir() else ""
        return PlannedModel(about.parent.name if is_config else about.name, spec_at(path), None, fault)
    store = resolve(name, store_dir)
    return PlannedModel(store.name, spec_of(Manifest.read(store)), store)


def dense_size(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of one dense tensor as it is stored."""
    *rows, columns = shape
    size = stored_encoding(spec, name, columns).row_bytes(columns)
    for count in rows:
        size *= count
    return size


def layer_bytes(spec: ModelSpec, layer: int) -> int:
    """Returns the bytes of a layer's dense tensors as they are stored."""
    shapes = dense_shapes(spec).items()
    return sum(dense_size(spec, name, shape) for name, shape in shapes if f".layers.{layer}." in name)


def _label(spec: ModelSpec) -> str:
    encodings = spec.encodings or (spec.dtype,)
    usual = max(dict.fromkeys(encodings), key=encodings.count)
    others = ", ".join(name for name in dict.fromkeys(encodings) if name != usual)
    return (
        usual
        + (f" (and {others})" if others else "")
        + (f", dense {spec.dense_encoding}" if spec.dense_encoding else "")
    )


USUAL = "usual"
HELD = (0.0, 0.10, 0.25, 0.50, 0.75, 1.0)
MISSES = {USUAL: (1.0, 0.55, 0.31, 0.13, 0.04, 0.0), "even": tuple(1 - held for held in HELD)}
READ_AT_ONCE = (1, 2, 4, 8)  # experts; more are read one after the other
STEP_S = 1.4e-3  # of a step that no layer takes: scheduling, sampling, and messages; on two cores of an EPYC
REMOTE_S = 1e-3  # of a layer's calls to other boxes, side by side, beside rows on the link and computing
LINK_BYTES_PER_S = 125e6  # between boxes, where no rate is given


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step of one kind. `layer_s` is of one layer with every expert in memory."""

    tokens: int  # in the step
    layer_s: float
    head_s: float
    read_bytes: float  # of keys and values of the context so far


@dataclass(frozen=True, slots=True)
class PlannedSizes:
    """The sizes that speed depends on."""

    layers: int  # with experts
    experts: int  # of a layer
    top_k: int
    expert_bytes: int
    row_bytes: int = 0  # of a token's hidden state, which a call sends and gets back


@dataclass(frozen=True, slots=True)
class TierShares:
    """Shares of all experts in each tier, and how fast those below move."""

    top: float  # held where they are computed
    ram: float  # held in RAM; the same as `top` without a device of its own memory
    link_bytes_per_s: float  # RAM to device; 0: there is none
    disk_s: tuple[float, ...]  # that READ_AT_ONCE experts take from the disk; (): none is read from there
    memory_bytes_per_s: float
    boxes: int = 1
    box_link_bytes_per_s: float = LINK_BYTES_PER_S  # between boxes, each way


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The seconds of a step, by cause."""

    compute_s: float
    link_s: float
    disk_s: float
    boxes_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.link_s + self.disk_s + self.boxes_s

    @property
    def limit(self) -> str:
        """Returns the cause that takes most of the step."""
        parts = {
            "memory and processor": self.compute_s,
            "link": self.link_s,
            "disk": self.disk_s,
            "boxes": self.boxes_s,
        }
        return max(parts, key=lambda name: parts[name])


def step(model: PlannedSizes, work: StepWork, places: TierShares, curve: str) -> PlannedStep:
    """Returns the seconds of one step."""
    touched = model.layers * distinct(model, work.tokens)
    held, below = min(1.0, places.top * places.boxes), min(1.0, places.ram * places.boxes)
    lacking, absent = touched * missed(held, curve), touched * missed(below, curve)
    compute_s = STEP_S + model.layers * work.layer_s + work.head_s + work.read_bytes / places.memory_bytes_per_s
    link_s = 0.0
    if places.link_bytes_per_s:
        by_link_s = lacking / model.layers * model.expert_bytes / places.link_bytes_per_s
        link_s = model.layers * min(by_link_s, WORTH_S)  # beyond that the CPU computes experts from RAM
    alone = touched * missed(min(1.0, places.ram), curve)
    disk_s, boxes_s = _beyond_memory(model, work, places, (alone, absent))
    return PlannedStep(compute_s, link_s, disk_s, boxes_s)


def _beyond_memory(
    model: PlannedSizes, work: StepWork, places: TierShares, lacking: tuple[float, float]
) -> tuple[float, float]:
    """Returns a step's seconds of reading and of calling other boxes.

    `lacking` are the experts in no memory, of one box alone and of all. As the daemon does, takes the faster way.
    """
    layers, (alone, absent) = model.layers, lacking
    alone_s = layers * read_s(alone / layers, places.disk_s) if places.disk_s else 0.0
    if places.boxes == 1 or alone <= absent:
        return alone_s, 0.0
    elsewhere = (alone - absent) / layers  # experts of a layer
    asked = min(places.boxes - 1, elsewhere)
    rows_s = asked * work.tokens * model.row_bytes / places.box_link_bytes_per_s  # both directions at once
    compute_s = elsewhere / (places.boxes - 1) * model.expert_bytes / places.memory_bytes_per_s
    boxes_s = layers * (min(1.0, elsewhere) * REMOTE_S + rows_s + compute_s)
    disk_s = layers * read_s(absent / layers, places.disk_s) if places.disk_s else 0.0
    is_faster = not places.disk_s or boxes_s + disk_s < alone_s
    return (disk_s, boxes_s) if is_faster else (alone_s, 0.0)


def read_s(experts: float, disk_s: Sequence[float]) -> float:
    """Returns the seconds of reading a layer's missing experts: few at once do not keep a disk busy."""
    most = READ_AT_ONCE[-1]
    if experts > most:
        return disk_s[-1] * experts / most
    return float(np.interp(experts, (0, *READ_AT_ONCE), (0.0, *disk_s)))


def distinct(model: PlannedSizes, tokens: int) -> float:
    """Returns the mean number of a layer's experts that `tokens` tokens touch if gates choose evenly."""
    return model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)


def missed(held: float, curve: str) -> float:
    """Returns the share of a step's experts that are not there where a share `held` of all is."""
    return float(np.interp(held, HELD, MISSES[curve]))


def model_of(variant: ModelVariant) -> PlannedSizes:
    """Returns the sizes that speed depends on."""
    geometry = variant.spec.geometry
    return PlannedSizes(geometry.layers, geometry.experts, geometry.top_k, geometry.largest_bytes, geometry.row_bytes)


def measured_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the layers that are measured: layers with experts, or all layers where each has one part."""
    return tuple(range(spec.layers)) if spec.feed_forward.bare_layers else spec.expert_layers


def rest_bytes(variant: ModelVariant) -> float:
    """Returns the bytes that a step reads outside the layers that were measured: the head, and dense layers."""
    spec = variant.spec
    inside = {f"model.layers.{layer}." for layer in measured_layers(spec)}
    total = 0
    for name, shape in dense_shapes(spec).items():
        layer = ".".join(name.split(".")[:3]) + "."
        if layer not in inside and ("embed_tokens" not in name or spec.block.tied):
            total += dense_size(spec, name, shape)
    return total

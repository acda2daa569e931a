"""Measures this machine: its memory's rate, and layers of the model's own shapes on random weights."""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from edgemoe.cli.plan.speed import ModelVariant, dense_size, layer_bytes, measured_layers
from edgemoe.config.sizes import format_size
from edgemoe.encodings.codec import pack
from edgemoe.engine.driver import SequenceDriver
from edgemoe.errors import CapacityError, StoreError
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.moe import FetchOptions
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes, row_tables
from edgemoe.jit.intrinsics import i64_at, record
from edgemoe.jit.object_cache import chunk
from edgemoe.jit.thread_pool import ThreadPool
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import DTYPES
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.layout import stored_encoding
from edgemoe.telemetry import probes
from edgemoe.types.arrays import IntArray, fields
from edgemoe.types.encoding import Encoding, pair_of
from edgemoe.types.experts import ExpertReader, LivePolicy, Tier
from edgemoe.types.step import BLOCK_TOKENS, StepRouting

STREAM = fields("address", "sums")
STREAM_WORDS = 1 << 15
STD = 0.02
OWN_ROWS = 512  # of a matrix; the others repeat them, but for gates, which tell experts apart
FILL_S = 15.0  # for random experts to be in RAM


@chunk
def _stream(job: int, number: int) -> None:
    a = record(job, STREAM)
    words, total = i64_at(a.address + number * STREAM_WORDS * 8), 0
    for k in range(STREAM_WORDS):
        total += words[k]
    i64_at(a.sums)[number] = total


def with_encodings(spec: ModelSpec, experts: str, dense: str) -> ModelSpec:
    """Returns a model in other encodings, by their names; the model's own type leaves weights as they are."""
    encodings = (experts,) * spec.geometry.layers if experts != spec.dtype else ()
    return replace(spec, encodings=encodings, dense_encoding=dense if dense != spec.dtype else "")


class RandomStore:
    """Experts made on the spot."""

    def __init__(self, spec: ModelSpec) -> None:
        geometry = self._geometry = spec.geometry
        random = np.random.default_rng(0)
        self._made: dict[str, list[npt.NDArray[np.uint8]]] = {}
        for name in {geometry.encoding_name(layer) for layer in range(geometry.layers)}:
            shapes = (geometry.gate_up_shape, geometry.down_shape)
            both = zip(shapes, pair_of(name), strict=True)
            self._made[name] = [_repeated(random, shape, encoding) for shape, encoding in both]

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._geometry.expert_bytes(layer)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Fills `into` with rows that all experts share, in an order of this expert's own."""
        target, at = np.frombuffer(into, np.uint8), 0
        for rows in self._made[self._geometry.encoding_name(layer)]:
            turn = (layer * 977 + expert * 131) % len(rows)
            place = target[at : at + rows.nbytes].reshape(rows.shape)
            place[: len(rows) - turn], place[len(rows) - turn :] = rows[turn:], rows[:turn]
            at += rows.nbytes


def _repeated(random: np.random.Generator, shape: tuple[int, int], encoding: Encoding) -> npt.NDArray[np.uint8]:
    """Returns an encoded random matrix, whose first OWN_ROWS rows the others repeat."""
    rows, columns = shape
    own = random.standard_normal((min(rows, OWN_ROWS), columns), np.float32) * np.float32(STD)
    encoded = pack(own, encoding)
    return np.resize(encoded, (rows, encoded.shape[1]))


def resident_tiers(
    spec: ModelSpec, kernels: Kernels, policy: LivePolicy | None = None, store: ExpertReader | None = None
) -> ExpertTiers:
    """Returns tiers whose RAM holds every expert of `store`, or random ones. Raises StoreError if it cannot."""
    geometry = spec.geometry
    policy = policy or LRU(geometry.layers, geometry.experts)
    policies: Mapping[Tier, LivePolicy] = {Tier.RAM: policy, Tier.VRAM: policy}
    memory = TierMemory(geometry.all_bytes)
    tiers = ExpertTiers(
        geometry, store or RandomStore(spec), memory, policies, kernels, fetching=FetchOptions(prefetch=False)
    )
    try:
        asyncio.run(_fill(tiers))
    except TimeoutError:
        size = format_size(geometry.all_bytes)
        raise StoreError(
            f"{size} of random experts were not in memory after {FILL_S:g} s; is the machine busy?"
        ) from None
    return tiers


async def _fill(tiers: ExpertTiers) -> None:
    """Returns once every expert is in RAM, where none has to be loaded any more: nothing goes on running."""
    every, layers = np.arange(tiers.geometry.experts), range(tiers.geometry.layers)
    async with asyncio.timeout(FILL_S), asyncio.TaskGroup() as group:
        running = group.create_task(tiers.run())
        while not all(tiers.residency.all_on_top(layer, every) for layer in layers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        running.cancel()


def random_decoder(spec: ModelSpec, kernels: Kernels) -> Decoder:
    """Returns a decoder of random dense weights, which are the same for all encodings."""
    random, dtype, tensors = torch.Generator().manual_seed(0), DTYPES[spec.dtype], {}
    for name, shape in dense_shapes(spec).items():
        rows = shape[0] if "mlp.gate." in name or not shape[1:] else min(shape[0], OWN_ROWS)
        some = (rows, *shape[1:])
        values = torch.ones(some) if "norm" in name else torch.randn(some, generator=random) * STD
        encoding = stored_encoding(spec, name, shape[-1])
        is_plain = encoding.name == spec.dtype
        made = values.to(dtype) if is_plain else torch.from_numpy(pack(values.numpy(), encoding))
        tensors[name] = made.repeat(-(-shape[0] // rows), *[1] * (made.dim() - 1))[: shape[0]].contiguous()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dense.safetensors"
        save_file(tensors, path)
        tables = [RandomRows(shape, stored_encoding(spec, name, shape[1])) for name, shape in row_tables(spec).items()]
        return Decoder.load(spec, path, kernels=kernels, table=tables[0] if tables else None)


class RandomRows:
    """A table of random rows, all in memory."""

    def __init__(self, shape: tuple[int, int], encoding: Encoding) -> None:
        self._rows = _repeated(np.random.default_rng(0), shape, encoding)
        self.row_bytes = self._rows.shape[1]

    def begin_reads(self, numbers: IntArray) -> None:
        """Ignores the rows: all are in memory."""

    def take_rows(self, numbers: IntArray) -> npt.NDArray[np.uint8]:
        """Returns the rows of these numbers, [n, row_bytes]."""
        return self._rows[numbers]


def dense_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of dense weights that a step reads, without an untied embedding."""
    total = 0
    for name, (*rows, columns) in dense_shapes(spec).items():
        if "embed_tokens" not in name or spec.block.tied:
            total += int(np.prod(rows)) * stored_encoding(spec, name, columns).row_bytes(columns)
    return total


class ResidentModel:
    """A decoder over tiers whose RAM holds every expert."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, decoder: Decoder, tiers: ExpertTiers) -> None:
        self.spec, self.kernels, self.decoder, self.tiers = spec, kernels, decoder, tiers

    @classmethod
    def plain(cls, config: dict[str, Any], threads: int, policy: LivePolicy | None = None) -> ResidentModel:
        """Makes a model without encodings."""
        spec = spec_from_config(config)
        kernels = Kernels(threads, spec.dtype == "bfloat16")
        return cls(spec, kernels, random_decoder(spec, kernels), resident_tiers(spec, kernels, policy))

    def begin(self, batch: int, most: int) -> None:
        """Makes empty caches for `batch` sequences of at most `most` tokens."""
        self._sequences = SequenceDriver(self.spec, batch, most)

    def feed(self, tokens: torch.Tensor) -> StepRouting:
        """Runs one step of tokens [batch, n]. Returns its routing."""
        meta, batch = self._sequences.step(tokens.tolist())
        self.tiers.experts.begin_step(meta)
        self.decoder.forward(batch, self._sequences.cache, self.tiers.experts).argmax(-1)
        return self.tiers.experts.end_step()

    def decode(self, steps: torch.Tensor) -> tuple[float, float]:
        """Returns the mean seconds and bytes of a step; `steps` is [n, batch, 1]."""
        start = time.perf_counter()
        routings = [self.feed(step) for step in steps]
        taken = (time.perf_counter() - start) / len(steps)
        touched = sum(len(np.unique(ids)) for routing in routings for ids in routing.ids)
        return taken, touched / len(steps) * self.spec.geometry.expert_bytes(0) + dense_bytes(self.spec)

    def stream(self, size_bytes: int) -> float:
        """Returns the seconds of reading `size_bytes` of experts at once, as fast as the box can."""
        slab = self.tiers.ram.bytes
        taken = min(size_bytes, slab.nbytes)
        first = np.random.randint(0, slab.nbytes - taken + 1) & ~4095
        return size_bytes / _streamed(self.kernels.pool, slab.ctypes.data + first, taken)


def stream_bytes_per_s(pool: ThreadPool, size_bytes: int) -> float:
    """Returns the rate at which all threads together read `size_bytes` of memory once."""
    memory = np.ones(size_bytes, np.uint8)
    return _streamed(pool, memory.ctypes.data, size_bytes)


def _streamed(pool: ThreadPool, address: int, size_bytes: int) -> float:
    chunks = size_bytes // (8 * STREAM_WORDS)
    sums, job = np.zeros(chunks, np.int64), np.zeros(1, STREAM)
    job["address"], job["sums"] = address, sums.ctypes.data
    start = time.perf_counter()
    pool.run(_stream.address, job.ctypes.data, chunks)
    return chunks * 8 * STREAM_WORDS / (time.perf_counter() - start)


COLD_BYTES = 128 << 20  # of weights that a step reads before it reads the same again: more than a processor caches
EXPERT_BYTES = 512 << 20  # of experts, as far as a step's own allow
LEAST_LAYERS, MOST_LAYERS, VOCAB = 2, 8, 512  # the head is counted apart
BUDGET_S = 6.0  # of all timed steps together; each time is measured at least once
DEADLINE_S = 40.0  # of the command's time, after which nothing further is measured
PROMPT_S = 3.0  # that a prompt may take; of one that takes longer, LEAST_PROMPT tokens are timed
BOUND_S = 1.0  # of the timed steps of one number of sequences
MEMORY_ROUNDS, MOST_STEPS, WARM_STEPS = 5, 200, 8
LEAST_PROMPT = 64  # tokens of a prompt that is timed in place of a longer one
COMPILED_S = 48.0  # of the command's time, after which nothing more is compiled
LATE = f"{DEADLINE_S:g} s had passed; run it again when the machine is less busy"
NOT_COMPILED = f"its kernels were not compiled after {COMPILED_S:g} s; run it again when the machine is less busy"
SPARE_BYTES = 256 << 20  # left to all else on the machine while something is measured

Say = Callable[[str], None]  # reports the present measurement
Measure = Callable[["ResidentModel"], float]  # returns the seconds of all its layers


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The seconds of one layer with every expert in memory: decoding, a batch, a prompt.

    Where layers are of one part each, it is one with experts and its share of the others.
    """

    decode_s: float  # one token of one sequence
    batch_s: float  # one token of each of `sequences`
    sequences: int
    prompt_s: float  # `prompt_tokens` of one prompt
    prompt_tokens: int
    disk_s: tuple[float, ...] = ()  # that speed.READ_AT_ONCE experts take from the disk
    why: str = ""  # it was not measured


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Of the machine. A link is the one to the first device; 0 where there is none, or nothing to measure it on."""

    memory_bytes_per_s: float
    disk_bytes_per_s: float
    link_bytes_per_s: float


def measure_layers(
    variants: Sequence[ModelVariant], kernels: Kernels, sequences: int, prompt_tokens: int, say: Say, ends_s: float
) -> list[LayerTimes]:
    """Returns for each variant of a model the times of a layer, on random weights of the same shapes.

    Takes about `BUDGET_S`, and the time to make the weights. After the time `ends_s` of `time.monotonic`, or without
    the memory, the times hold the reason instead.
    """
    lab, share_s, found = LayerBench(kernels, ends_s), BUDGET_S / max(1, len(variants)) / 4, list[LayerTimes]()
    tokens = max(sequences * (MOST_STEPS + WARM_STEPS), prompt_tokens)
    for number, variant in enumerate(variants, 1):
        experts = variant.spec.router.experts

        measures: list[Measure] = [partial(_decode_s, sequences=count, budget_s=share_s) for count in (1, sequences)]
        measures.append(partial(_prompt_s, experts=experts, tokens=prompt_tokens, budget_s=2 * share_s))
        times = LayerTimes(0.0, 0.0, sequences, 0.0, prompt_tokens)
        if time.monotonic() < ends_s:
            say(f"measuring {variant.label}, {number} of {len(variants)}")
        try:
            decode_s, batch_s, prompt_s = lab.run(variant.spec, tokens, measures)
        except TimeoutError:
            found.append(replace(times, why=LATE))
        except (CapacityError, StoreError) as error:
            found.append(replace(times, why=str(error)))
        else:
            found.append(replace(times, decode_s=decode_s, batch_s=batch_s, prompt_s=prompt_s))
    lab.close()
    return found


def decode_times(spec: ModelSpec, kernels: Kernels, streams: Sequence[int]) -> list[float]:
    """Returns the seconds of a layer for one token of each sequence, by number of sequences. Raises CapacityError."""
    lab, tokens = LayerBench(kernels, math.inf), max(streams) * (MOST_STEPS + WARM_STEPS)
    times = lab.run(spec, tokens, [partial(_decode_s, sequences=count, budget_s=BOUND_S) for count in streams])
    lab.close()
    return times


class LayerBench:
    """Makes small models of random weights, one at a time. Models with equal expert shapes share their experts."""

    def __init__(self, kernels: Kernels, ends_s: float) -> None:
        """Takes the time of `time.monotonic` after which nothing is begun."""
        self._kernels, self._ends_s = kernels, ends_s
        self._tiers: ExpertTiers | None = None

    def run(self, spec: ModelSpec, tokens: int, measures: Sequence[Measure]) -> list[float]:
        """Measures a miniature model by its layers, with at most that many tokens over all sequences.

        Raises TimeoutError at the deadline, which is looked at before each measure. Raises
        CapacityError where the machine has not as much memory to spare: taken regardless, it would be the kernel that
        ends somebody, likely the engine.
        """
        self._check_time()
        small = miniature(spec)
        if self._tiers is not None and self._tiers.geometry != small.geometry:
            self.close()
        dense = sum(dense_size(small, name, shape) for name, shape in dense_shapes(small).items())
        # dense weights are made, written and read, which may all be in memory at once
        layout = small.kv_layout
        kv_bytes = tokens * (layout.block_bytes + layout.window_block_bytes) // BLOCK_TOKENS
        needed = 3 * dense + kv_bytes + (0 if self._tiers else small.geometry.all_bytes)
        free = probes.probe_machine().ram_available_bytes - SPARE_BYTES
        if needed > free:
            raise CapacityError(
                f"measuring takes {format_size(needed)} of memory, and {format_size(max(0, free))} can be spared"
            )
        if self._tiers is None:
            self._tiers = resident_tiers(small, self._kernels)
        self._check_time()
        model, found = ResidentModel(small, self._kernels, random_decoder(small, self._kernels), self._tiers), []
        for measure in measures:
            self._check_time()
            found.append(measure(model) / small.geometry.layers)
        return found

    def _check_time(self) -> None:
        """Raises TimeoutError after the deadline."""
        if time.monotonic() > self._ends_s:
            raise TimeoutError

    def close(self) -> None:
        """Frees the memory of the experts."""
        self._tiers = None
        gc.collect()  # tiers refer to each other in circles


def miniature(spec: ModelSpec) -> ModelSpec:
    """Returns the last layers of a model with some of their experts; their number ignores the dense encoding.

    The layers are so many that a token finds no weights in the processor's cache, as in the whole model.
    """
    period, expert_bytes, router = _period(spec), spec.geometry.largest_bytes, spec.router
    measured, plain = measured_layers(spec), replace(spec, dense_encoding="")
    of_experts = len(set(measured[-period:]) & set(spec.expert_layers)) * router.top_k * expert_bytes
    periods = -(-COLD_BYTES // (of_experts + sum(layer_bytes(plain, layer) for layer in measured[-period:])))
    layers = min(periods, len(measured) // period) * period
    kept = set(measured[-layers:])
    with_experts = len(kept & set(spec.expert_layers))
    each = -(-router.top_k // router.top_groups)  # that a group has at least
    least = max(router.top_k, router.groups * max(2, each))
    experts = min(router.experts, max(least, EXPERT_BYTES // (with_experts * expert_bytes)))
    dense, bare = (
        frozenset(layer - spec.layers + layers for layer in kept & some)
        for some in (spec.feed_forward.dense_layers, spec.feed_forward.bare_layers)
    )
    return replace(
        spec,
        attention=spec.attention[-layers:],
        vocab=min(spec.vocab, VOCAB),
        layer_inputs=spec.layer_inputs and replace(spec.layer_inputs, tokens=VOCAB),
        router=replace(router, experts=-(-experts // router.groups) * router.groups),
        feed_forward=replace(spec.feed_forward, dense_layers=dense, bare_layers=bare),
        encodings=spec.encodings[-with_experts:],
    )


def memory_rate(pool: ThreadPool) -> float:
    """Returns the bytes a second that all threads together read from memory."""
    return max(stream_bytes_per_s(pool, COLD_BYTES) for _ in range(MEMORY_ROUNDS))


def _period(spec: ModelSpec) -> int:
    """Returns after how many layers their kinds repeat, within bounds, dense ones left out.

    Of layers of one part each, the last ones that have one of every kind are counted.
    """
    kinds, most, bare = spec.attention, min(MOST_LAYERS, len(spec.expert_layers)), spec.feed_forward.bare_layers
    if bare:
        dense = spec.feed_forward.dense_layers
        parts = [(kind, layer in bare, layer in dense) for layer, kind in enumerate(kinds)]
        return next(layers for layers in range(1, spec.layers + 1) if set(parts[-layers:]) == set(parts))
    for layers in range(LEAST_LAYERS, most):
        if all(kinds[n] == kinds[n - layers] for n in range(layers, len(kinds))):
            return layers
    return most


def _decode_s(model: ResidentModel, sequences: int, budget_s: float) -> float:
    """Returns the time of a step. The steps before take no longer than the timed ones."""
    model.begin(sequences, MOST_STEPS + WARM_STEPS)
    began_s = time.perf_counter()
    for _ in range(WARM_STEPS):
        _feed(model, sequences, 1)
        if time.perf_counter() - began_s > budget_s:
            break
    return _time_s(lambda: _feed(model, sequences, 1), budget_s)


def _prompt_s(model: ResidentModel, experts: int, tokens: int, budget_s: float) -> float:
    """Returns the time of a prompt in layers of `experts` experts.

    The prompt that is timed is shorter by as much as the miniature has fewer experts, so that each has as many tokens.
    A prompt that would take longer than `PROMPT_S` is not timed: a token counts as long as one of a shorter prompt.
    """
    count = min(tokens, max(LEAST_PROMPT, tokens * model.spec.router.experts // experts))
    least = min(count, LEAST_PROMPT)

    def token_s(count: int) -> float:
        model.begin(1, count)
        return _feed(model, 1, count) / count

    least_s = token_s(least)
    return tokens * (least_s if count * least_s > PROMPT_S else _time_s(lambda: token_s(count), budget_s))


def _time_s(timed: Callable[[], float], budget_s: float) -> float:
    """Returns the lower quartile of the times measured in `budget_s`, at least one.

    It leaves out steps that other processes delay, and most steps that happen to find much in the cache.
    """
    taken, began_s = [timed()], time.perf_counter()
    while len(taken) < MOST_STEPS and time.perf_counter() - began_s < budget_s:
        taken.append(timed())
    return sorted(taken)[len(taken) // 4]


def _feed(model: ResidentModel, sequences: int, tokens: int) -> float:
    """Returns the seconds of a step of random tokens."""
    given = torch.randint(0, model.spec.vocab, (sequences, tokens))
    began_s = time.perf_counter()
    model.feed(given)
    return time.perf_counter() - began_s

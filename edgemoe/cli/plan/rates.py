"""What this machine does in a second: reads memory and disk, and steps through layers of the model's own shapes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from edgemoe.cli.plan.miniature import Ours, random_decoder, resident_tiers, stream_bytes_per_s
from edgemoe.cli.plan.subject import dense_size, layer_bytes
from edgemoe.config.sizes import format_size
from edgemoe.errors import CapacityError
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.telemetry import probes

T = TypeVar("T")

COLD_BYTES = 128 << 20  # of weights that a step reads before it reads the same again: more than a processor caches
DECODE_BYTES, PROMPT_BYTES = 256 << 20, 512 << 20  # of experts, as far as a step's own allow
LEAST_LAYERS, MOST_LAYERS, VOCAB = 2, 8, 512  # the head is counted apart
MEASURE_S, ROUNDS, MOST_STEPS, WARM_STEPS = 1.0, 5, 200, 8
SPARE_BYTES = 256 << 20  # left to all else on the machine while something is measured


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What one layer takes with every expert in memory, in seconds, and how many of its experts a step touched."""

    decode_s: float  # one token of one sequence
    batch_s: float  # one token of each of `sequences`
    sequences: int
    prompt_s: float  # `prompt_tokens` of one prompt
    prompt_tokens: int
    disk_s: tuple[float, ...] = ()  # that speed.READ_AT_ONCE experts take from the disk
    why: str = ""  # it was not measured


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the machine. A link is the one to the first device; 0 where there is none, or nothing to measure it on."""

    memory_bytes_per_s: float
    disk_bytes_per_s: float
    link_bytes_per_s: float


def measure_layers(spec: ModelSpec, kernels: Kernels, sequences: int, prompt_tokens: int) -> LayerTimes:
    """Returns the times of a layer of average kind, on random weights of the same shapes. Takes seconds.

    Where memory does not allow it, the times say why instead.
    """
    times = LayerTimes(0.0, 0.0, sequences, 0.0, prompt_tokens)
    try:
        decode_s, batch_s = decode_times(spec, kernels, (1, sequences))
        prompt_s = prompt_time(spec, kernels, prompt_tokens)
    except CapacityError as error:
        return replace(times, why=str(error))
    return replace(times, decode_s=decode_s, batch_s=batch_s, prompt_s=prompt_s)


def decode_times(spec: ModelSpec, kernels: Kernels, streams: Sequence[int]) -> list[float]:
    """Returns the seconds of a layer for a token of each of so many sequences. Raises CapacityError."""
    small = cold(spec)
    tokens = max(streams) * (MOST_STEPS + WARM_STEPS)
    times = _measured(small, kernels, tokens, lambda model: [_decode_s(model, count) for count in streams])
    return [each / small.layers for each in times]


def prompt_time(spec: ModelSpec, kernels: Kernels, tokens: int) -> float:
    """Returns the seconds of a layer for a prompt. Raises CapacityError."""
    small = miniature(spec, _period(spec), PROMPT_BYTES)
    return _measured(small, kernels, tokens, lambda model: _prompt_s(model, tokens)) / small.layers


def _measured(small: ModelSpec, kernels: Kernels, tokens: int, measure: Callable[[Ours], T]) -> T:
    """Returns what is measured of a model of random weights, whose memory is free again then.

    Raises CapacityError where the machine has not as much to spare: taken regardless, it would be the kernel that
    ends somebody, likely the engine.
    """
    dense = sum(dense_size(small, name, shape) for name, shape in dense_shapes(small).items())
    # dense weights are made, written and read, which may all be in memory at once
    needed = small.geometry.all_bytes + 3 * dense + tokens * small.kv_bytes_per_token
    free = probes.look().ram_available_bytes - SPARE_BYTES
    if needed > free:
        raise CapacityError(
            f"measuring takes {format_size(needed)} of memory, and {format_size(max(0, free))} can be spared"
        )
    try:
        return measure(Ours(small, kernels, random_decoder(small, kernels), resident_tiers(small, kernels)))
    finally:
        gc.collect()  # tiers refer to each other in circles


def cold(spec: ModelSpec) -> ModelSpec:
    """Returns a miniature of which a token finds no weights in the processor's cache, as in the whole model."""
    period, experts = _period(spec), spec.router.top_k * spec.geometry.largest_bytes
    periods = -(-COLD_BYTES // (period * (experts + layer_bytes(spec, spec.expert_layers[-1]))))
    return miniature(spec, min(periods, len(spec.expert_layers) // period) * period, DECODE_BYTES)


def miniature(spec: ModelSpec, layers: int, most_bytes: int) -> ModelSpec:
    """Returns the last layers of a model, with as many experts as so many bytes hold."""
    expert_bytes = spec.geometry.largest_bytes
    experts = min(spec.router.experts, max(2 * spec.router.top_k, most_bytes // (layers * expert_bytes)))
    groups = spec.router.groups
    return replace(
        spec,
        attention=spec.attention[-layers:],
        vocab=min(spec.vocab, VOCAB),
        router=replace(spec.router, experts=-(-experts // groups) * groups),
        feed_forward=replace(spec.feed_forward, dense_layers=frozenset()),
        encodings=spec.encodings[-layers:],
    )


def memory_rate(kernels: Kernels) -> float:
    """Returns the bytes a second that all threads together read from memory."""
    return max(stream_bytes_per_s(kernels, COLD_BYTES) for _ in range(ROUNDS))


def _period(spec: ModelSpec) -> int:
    """Returns after how many layers their kinds repeat, within bounds, dense ones left out."""
    kinds, most = spec.attention, min(MOST_LAYERS, len(spec.expert_layers))
    for layers in range(LEAST_LAYERS, most):
        if all(kinds[n] == kinds[n - layers] for n in range(layers, len(kinds))):
            return layers
    return most


def _decode_s(model: Ours, sequences: int) -> float:
    """Returns the time of a step."""
    model.begin(sequences, MOST_STEPS + WARM_STEPS)
    _feed(model, sequences, WARM_STEPS)
    return _time_s(lambda: _feed(model, sequences, 1))


def _prompt_s(model: Ours, tokens: int) -> float:
    """Returns the time of a prompt."""

    def prefill() -> float:
        model.begin(1, tokens)
        return _feed(model, 1, tokens)

    return _time_s(prefill)


def _time_s(timed: Callable[[], float]) -> float:
    """Returns the lower quartile of what is measured in a second, and at least ROUNDS times.

    It leaves out most of what others on the machine delay, and the steps that happen to find much in the cache.
    """
    taken, began_s = list[float](), time.perf_counter()
    while len(taken) < ROUNDS or (time.perf_counter() - began_s < MEASURE_S and len(taken) < MOST_STEPS):
        taken.append(timed())
    return sorted(taken)[len(taken) // 4]


def _feed(model: Ours, sequences: int, tokens: int) -> float:
    """Returns the seconds of a step of random tokens."""
    given = torch.randint(0, model.spec.vocab, (sequences, tokens))
    began_s = time.perf_counter()
    model.feed(given)
    return time.perf_counter() - began_s

"""What this machine does in a second: reads memory and disk, and steps through layers of the model's own shapes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from edgemoe.cli.plan.miniature import Ours, random_decoder, resident_tiers, stream_bytes_per_s
from edgemoe.cli.plan.subject import Variant, dense_size, layer_bytes
from edgemoe.config.sizes import format_size
from edgemoe.errors import CapacityError
from edgemoe.experts.build import ExpertTiers
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.telemetry import probes

COLD_BYTES = 128 << 20  # of weights that a step reads before it reads the same again: more than a processor caches
EXPERT_BYTES = 512 << 20  # of experts, as far as a step's own allow
LEAST_LAYERS, MOST_LAYERS, VOCAB = 2, 8, 512  # the head is counted apart
BUDGET_S = 6.0  # of all timed steps together; what has not been timed once is timed all the same
DEADLINE_S = 35.0  # after which no further encoding is measured
BOUND_S = 1.0  # of the timed steps of one number of sequences
MEMORY_ROUNDS, MOST_STEPS, WARM_STEPS = 5, 200, 8
LEAST_PROMPT = 64  # tokens of a prompt that is timed in place of a longer one
SPARE_BYTES = 256 << 20  # left to all else on the machine while something is measured

Say = Callable[[str], None]  # reports what is measured now


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


def measure_layers(
    variants: Sequence[Variant], kernels: Kernels, sequences: int, prompt_tokens: int, say: Say
) -> list[LayerTimes]:
    """Returns for each variant of a model the times of a layer, on random weights of the same shapes.

    Takes about `BUDGET_S`, and what it takes to make the weights. Where memory or `DEADLINE_S` do not allow it, the
    times say why instead.
    """
    lab, share_s, found = Lab(kernels), BUDGET_S / len(variants) / 4, list[LayerTimes]()
    tokens, ends_s = max(sequences * (MOST_STEPS + WARM_STEPS), prompt_tokens), time.monotonic() + DEADLINE_S
    for number, variant in enumerate(variants, 1):
        experts = variant.spec.router.experts

        def measure(model: Ours, experts: int = experts) -> list[float]:
            decode_s = [_decode_s(model, count, share_s) for count in (1, sequences)]
            return [*decode_s, _prompt_s(model, experts, prompt_tokens, 2 * share_s)]

        times = LayerTimes(0.0, 0.0, sequences, 0.0, prompt_tokens)
        if time.monotonic() > ends_s:
            found.append(replace(times, why=f"others took {DEADLINE_S:g} s; run it on a less busy machine"))
            continue
        say(f"measuring {variant.label}, {number} of {len(variants)}")
        try:
            decode_s, batch_s, prompt_s = lab.run(variant.spec, tokens, measure)
        except CapacityError as error:
            found.append(replace(times, why=str(error)))
        else:
            found.append(replace(times, decode_s=decode_s, batch_s=batch_s, prompt_s=prompt_s))
    lab.close()
    return found


def decode_times(spec: ModelSpec, kernels: Kernels, streams: Sequence[int]) -> list[float]:
    """Returns the seconds of a layer for a token of each of so many sequences. Raises CapacityError."""
    lab, tokens = Lab(kernels), max(streams) * (MOST_STEPS + WARM_STEPS)
    times = lab.run(spec, tokens, lambda model: [_decode_s(model, count, BOUND_S) for count in streams])
    lab.close()
    return times


class Lab:
    """Makes small models of random weights, one at a time. Those whose experts are alike use the same ones."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._tiers: ExpertTiers | None = None

    def run(self, spec: ModelSpec, tokens: int, measure: Callable[[Ours], list[float]]) -> list[float]:
        """Measures a miniature model by its layers, with at most that many tokens over all sequences.

        Raises CapacityError where the machine has not as much memory to spare: taken regardless, it would be the
        kernel that ends somebody, likely the engine.
        """
        small = miniature(spec)
        if self._tiers is not None and self._tiers.geometry != small.geometry:
            self.close()
        dense = sum(dense_size(small, name, shape) for name, shape in dense_shapes(small).items())
        # dense weights are made, written and read, which may all be in memory at once
        needed = 3 * dense + tokens * small.kv_bytes_per_token + (0 if self._tiers else small.geometry.all_bytes)
        free = probes.look().ram_available_bytes - SPARE_BYTES
        if needed > free:
            raise CapacityError(
                f"measuring takes {format_size(needed)} of memory, and {format_size(max(0, free))} can be spared"
            )
        if self._tiers is None:
            self._tiers = resident_tiers(small, self._kernels)
        model = Ours(small, self._kernels, random_decoder(small, self._kernels), self._tiers)
        return [taken_s / small.layers for taken_s in measure(model)]

    def close(self) -> None:
        """Frees the experts."""
        self._tiers = None
        gc.collect()  # tiers refer to each other in circles


def miniature(spec: ModelSpec) -> ModelSpec:
    """Returns the last layers of a model with some of their experts, whatever its dense weights are encoded in.

    The layers are so many that a token finds no weights in the processor's cache, as in the whole model.
    """
    period, expert_bytes, router = _period(spec), spec.geometry.largest_bytes, spec.router
    plain = layer_bytes(replace(spec, dense_encoding=""), spec.expert_layers[-1])
    periods = -(-COLD_BYTES // (period * (router.top_k * expert_bytes + plain)))
    layers = min(periods, len(spec.expert_layers) // period) * period
    each = -(-router.top_k // router.top_groups)  # that a group has at least
    least = max(router.top_k, router.groups * max(2, each))
    experts = min(router.experts, max(least, EXPERT_BYTES // (layers * expert_bytes)))
    return replace(
        spec,
        attention=spec.attention[-layers:],
        vocab=min(spec.vocab, VOCAB),
        router=replace(router, experts=-(-experts // router.groups) * router.groups),
        feed_forward=replace(spec.feed_forward, dense_layers=frozenset()),
        encodings=spec.encodings[-layers:],
    )


def memory_rate(kernels: Kernels) -> float:
    """Returns the bytes a second that all threads together read from memory."""
    return max(stream_bytes_per_s(kernels, COLD_BYTES) for _ in range(MEMORY_ROUNDS))


def _period(spec: ModelSpec) -> int:
    """Returns after how many layers their kinds repeat, within bounds, dense ones left out."""
    kinds, most = spec.attention, min(MOST_LAYERS, len(spec.expert_layers))
    for layers in range(LEAST_LAYERS, most):
        if all(kinds[n] == kinds[n - layers] for n in range(layers, len(kinds))):
            return layers
    return most


def _decode_s(model: Ours, sequences: int, budget_s: float) -> float:
    """Returns the time of a step."""
    model.begin(sequences, MOST_STEPS + WARM_STEPS)
    _feed(model, sequences, WARM_STEPS)
    return _time_s(lambda: _feed(model, sequences, 1), budget_s)


def _prompt_s(model: Ours, experts: int, tokens: int, budget_s: float) -> float:
    """Returns the time of a prompt in layers of `experts` experts.

    The prompt that is timed is shorter by as much as the miniature has fewer experts, so that each has as many tokens.
    """
    count = min(tokens, max(LEAST_PROMPT, tokens * model.spec.router.experts // experts))

    def prefill() -> float:
        model.begin(1, count)
        return _feed(model, 1, count)

    return _time_s(prefill, budget_s) * tokens / count


def _time_s(timed: Callable[[], float], budget_s: float) -> float:
    """Returns the lower quartile of what is measured in `budget_s`, and at least once.

    It leaves out most of what others on the machine delay, and the steps that happen to find much in the cache.
    """
    taken, began_s = [timed()], time.perf_counter()
    while len(taken) < MOST_STEPS and time.perf_counter() - began_s < budget_s:
        taken.append(timed())
    return sorted(taken)[len(taken) // 4]


def _feed(model: Ours, sequences: int, tokens: int) -> float:
    """Returns the seconds of a step of random tokens."""
    given = torch.randint(0, model.spec.vocab, (sequences, tokens))
    began_s = time.perf_counter()
    model.feed(given)
    return time.perf_counter() - began_s

"""The decoder on a GPU against the CPU: in float32 the same, in bfloat16 as near to float32.

Neither side uses compiled CPU kernels. The CPU computes experts by the routes that float32 chooses. So a near tie that
rounding decides otherwise counts as a flipped route, not as an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.slotted_experts import EachTwice, SlottedExperts
from support.tiny_models import FAMILIES, GRAPHED, ResidentExperts, Session, Tiny

from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.store.manifest import DENSE
from edgemoe.types.experts import Activation

CHUNKS = ((range(64), range(50, 60)), (range(64, 100), [7]), ([8], [9]), ([10], [11]))  # prompts, then decoding
FACTOR = 2.0  # the most that bfloat16 on the device may differ from float32, relative to bfloat16 on the CPU
TIES = 0.01  # the most flipped routes, as a share, in float32
FLIPS = 0.05  # the most flipped routes beyond the CPU's own in bfloat16


class RoutedExperts(ResidentExperts):
    """Computes on the CPU for a decoder on any device, by the routes of `leader` if there is one."""

    def __init__(self, store: Path, activation: Activation, leader: RoutedExperts | None = None) -> None:
        super().__init__(store, activation)
        self._leader = leader
        self.routes: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and weights [T, k], call by call

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        number = len(self.routes)
        self.routes.append((ids.cpu(), weights.float().cpu()))
        followed = (self._leader or self).routes[number]
        return super().forward(layer, hidden.cpu(), *followed).to(hidden.device)


class DeviceSession(Session):
    """A session whose cache lies on a device."""

    def __init__(self, tiny: Tiny, device: str, sequences: int) -> None:
        super().__init__(tiny, sequences)
        self.kv, self.device = KVCache.of(tiny.spec, 64, 4 * sequences + 2, device), device


@dataclass(frozen=True)
class Run:
    """A decoder's results for CHUNKS."""

    logits: torch.Tensor  # [T, V]
    experts: RoutedExperts
    blocks: torch.Tensor  # two of its cache

    @classmethod
    def of(cls, tiny: Tiny, dtype: str, device: str, leader: RoutedExperts | None = None) -> Run:
        spec = replace(tiny.spec, dtype=dtype)
        experts = RoutedExperts(tiny.store, spec.feed_forward.activation, leader)
        decoder = Decoder.load(spec, tiny.store / DENSE, device)
        session = DeviceSession(replace(tiny, spec=spec, decoder=decoder, experts=experts), device, sequences=2)
        logits = torch.cat([session.step(*map(list, chunks)).cpu() for chunks in CHUNKS])
        blocks = session.kv.gather([3, 5])
        torch.testing.assert_close(blocks, session.kv.data[[3, 5]].cpu(), rtol=0, atol=0)
        return cls(logits, experts, blocks)

    def distance(self, exact: Run) -> float:
        """Returns the distance of the logits from the exact ones, relative to their norm."""
        return float((self.logits - exact.logits).norm() / exact.logits.norm())

    def flips(self, exact: Run) -> float:
        """Returns the share of routes that differ from the exact ones."""
        pairs = zip(self.experts.routes, exact.experts.routes, strict=True)
        same = [(ours[0].sort().values == theirs[0].sort().values).all(dim=1) for ours, theirs in pairs]
        return 1.0 - float(torch.cat(same).float().mean())

    def gating(self, exact: Run) -> float:
        """Returns the distance of the weights from the exact ones, on the routes that agree."""
        apart = size = 0.0
        for (ids, weights), (exact_ids, exact_weights) in zip(self.experts.routes, exact.experts.routes, strict=True):
            order, exact_order = ids.argsort(dim=1), exact_ids.argsort(dim=1)
            same = (ids.gather(1, order) == exact_ids.gather(1, exact_order)).all(dim=1)
            wanted = exact_weights.gather(1, exact_order)[same]
            apart += float((weights.gather(1, order)[same] - wanted).square().sum())
            size += float(wanted.square().sum())
        return (apart / size) ** 0.5


def judge(tiny: Tiny, dtype: str, device: str) -> None:
    """Judges a decoder on the device: it must be as near to float32 as one on the CPU."""
    exact = Run.of(tiny, "float32", "cpu")
    ours = Run.of(tiny, dtype, device, exact.experts)
    if dtype == "float32":
        torch.testing.assert_close(ours.logits, exact.logits, atol=1e-3, rtol=1e-3)
        assert ours.gating(exact) <= 1e-4
        assert ours.flips(exact) <= TIES
        return
    cpu = Run.of(tiny, dtype, "cpu", exact.experts)
    assert ours.distance(exact) <= FACTOR * cpu.distance(exact)
    assert ours.gating(exact) <= FACTOR * cpu.gating(exact) + 1e-6
    assert ours.flips(exact) <= cpu.flips(exact) + FLIPS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_decode_and_mixed_batches(make_tiny: Callable[..., Tiny], family: str, dtype: str) -> None:
    tiny = make_tiny(family, dtype=getattr(torch, dtype), initializer_range=0.05, fused=False)
    judge(tiny, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", GRAPHED)
def test_steps_as_graphs_equal_steps_by_operations(make_tiny: Callable[..., Tiny], family: str) -> None:
    tiny = make_tiny(family, initializer_range=0.05, fused=False)
    slotted = SlottedExperts(tiny, "cuda")
    by_operations = RoutedExperts(tiny.store, tiny.spec.feed_forward.activation)
    pairs = ((False, by_operations), (True, slotted))
    sessions = [
        DeviceSession(
            replace(tiny, decoder=Decoder.load(tiny.spec, tiny.store / DENSE, "cuda", graphs=graphs), experts=experts),
            "cuda",
            sequences=5,
        )
        for graphs, experts in pairs
    ]
    plain, ours = sessions
    for s in range(5):
        prompt = list(range(20 * s, 20 * s + 13 + 9 * s))
        for session in sessions:
            session.step(*([] for _ in range(s)), prompt)
    twice = EachTwice(ours._tiny.decoder._graphed, slotted)  # type: ignore[arg-type]
    ours._tiny.decoder._graphed = twice  # type: ignore[assignment]
    for number, sequences in enumerate(((0,), (0,), (1, 4), (0, 1, 2), (2, 3, 0), (0, 1, 2, 3, 4), (4,))):
        chunks = [[11 + 5 * number + s] if s in sequences else [] for s in range(5)]
        want, got = plain.step(*chunks), ours.step(*chunks)
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    assert len(slotted.told) == 14, "a step was not computed as a graph"
    assert twice.equal, "logits depend on where the experts lie"


def silu(experts: RoutedExperts, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def heavier(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ids, weights * 1.05


def elsewhere(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends every eighth token to other experts."""
    return torch.where(torch.arange(len(ids))[:, None] % 8 == 0, (ids + 1) % 6, ids), weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "fault"),
    [("gemma4_text", silu), ("gpt_oss", silu), ("gpt_oss", heavier), ("gpt_oss", elsewhere)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_decoder_whose_experts_gate_or_routes_are_wrong_is_found(
    make_tiny: Callable[..., Tiny], family: str, fault: Callable[..., Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, made, run = make_tiny(family, dtype=getattr(torch, dtype), initializer_range=0.05, fused=False), [], Run.of
    judge(tiny, dtype, "cpu")

    def of(*words: Any) -> Run:
        """Runs the comparison with the fault in the second decoder, the judged one."""
        made.append(words)
        with monkeypatch.context() as patch:
            if len(made) == 2 and fault is silu:
                patch.setattr(RoutedExperts, "_activated", silu)
            found = run(*words)
        if len(made) == 2 and fault is not silu:
            found.experts.routes[:] = [fault(*route) for route in found.experts.routes]
        return found

    monkeypatch.setattr(Run, "of", of)
    with pytest.raises(AssertionError):
        judge(tiny, dtype, "cpu")

"""What the leader remembers of an engine between its reports: which prompts it had, and what its requests choose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from edgemoe.cluster.control.messages import EngineStatus
from edgemoe.cluster.control.requests.reading import keys_of
from edgemoe.policy.routing.offers import EngineView
from edgemoe.policy.routing.told import MOST_S, ModelSizes, experts_of, resident_of, union_of
from edgemoe.types.arrays import FloatArray
from edgemoe.types.expert_signatures import ExpertDemand

MAX_KEYS = 4096  # of prompts; the longest unused go first, as they do in the engine's cache
TOKENS_PER_S = 1000.0  # of prefill, of an engine that has not measured it
NO_CHOICES = ExpertDemand(b"", b"", (), 0.0, 0.0)


class EngineMemory:
    """One engine's keyed hashes, the latest last, and its last word about choices."""

    def __init__(self) -> None:
        self._choices = NO_CHOICES
        self._experts = 0.0  # that a step loads there
        self._sizes = ModelSizes()
        self._tables: tuple[FloatArray | None, FloatArray | None] = None, None  # resident, union: of its last word
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._prefixes: frozenset[int] = frozenset()

    def note(self, prefix: Iterable[int]) -> None:
        """Adds prompts that the engine has had since."""
        known, new = self._keys, False
        for key in prefix:
            new |= key not in known
            known[key] = None
            known.move_to_end(key)
        while len(known) > MAX_KEYS:
            known.popitem(last=False)
        if new:
            self._prefixes = frozenset(known)

    def hear(self, place: str, use: EngineStatus, sizes: ModelSizes, now_s: float) -> EngineView:
        """Takes the engine's report. Returns what is known of it now."""
        self.note(keys_of(use.prefixes))
        if use.choices is not None:
            self._choices, self._experts = use.choices, experts_of(use.choices.absent)
        choices = self._choices
        if use.choices is not None or sizes != self._sizes:
            self._sizes = sizes
            self._tables = resident_of(choices.far, choices.far_s, sizes), union_of(choices.absent, sizes)
        resident, union = self._tables
        return EngineView(
            place,
            use.slots,
            use.capacity,
            use.blocks,
            use.free_blocks,
            running=use.running,
            waiting=use.waiting,
            prefill_tokens=use.prefill_tokens,
            remaining_tokens=float(use.remaining_tokens),
            tokens_per_s=max(use.tokens_per_s, 1.0) if use.tokens_per_s else TOKENS_PER_S,
            prefixes=self._prefixes,
            taken=frozenset(f"{node}:{number}" for node, number in use.taken),
            reported_s=now_s,
            resident=resident,
            union=union,
            step_s=min(choices.step_s, MOST_S),
            expert_s=min(choices.expert_s, MOST_S),
            decode_s=min(choices.step_s + choices.expert_s * self._experts, MOST_S),
        )

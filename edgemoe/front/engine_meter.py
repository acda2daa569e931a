"""Measures the work of this box's engine and the time of its steps, for reports to the leader.

The front sees every request begin and end, so it need not ask the engine. It estimates the free KV blocks twice: by the
most that its requests can take, and by the engine's metrics of half a second ago. The larger estimate counts.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import structs

from edgemoe.cluster.control.messages import MAX_PREFIX_KEYS, MAX_TAKEN, LoadReport
from edgemoe.front.prompt_hints import KEY_BYTES, PrefixKeys
from edgemoe.front.request_table import HeldRequest
from edgemoe.ipc.messages import ExpertDemandReport, Submit
from edgemoe.telemetry import metrics as names
from edgemoe.types.expert_signatures import MOST_ENDED, EndedRequest, ExpertDemand
from edgemoe.types.request import Request
from edgemoe.types.step import BLOCK_TOKENS

TAKEN_S = 3.0  # for which an offer is reported as arrived at the engine
OUTPUT_RESERVE = 0.25  # of expected output, kept free in KV by engines
MAX_UNREPORTED = 4 * MOST_ENDED  # requests that have ended; the oldest go
MAX_ENDED_BYTES = 1 << 19  # of the signatures of ended requests in one message
MAX_PREFIXES = 8 * MAX_PREFIX_KEYS  # keys that are remembered; of more, the longest unused go
UNUSUAL = 5.0  # times the usual time of a step
PACE_WEIGHT, UNUSUAL_WEIGHT = 0.05, 0.005  # of a step's time in the mean
STALE_S = 30.0  # after which the last step's time no longer counts


class LocalCapacity(NamedTuple):
    """The properties of an engine that takes requests."""

    boot: str
    slots: int
    capacity: int
    kv_tokens: int
    stats: Mapping[str, float]
    expected_tokens: float  # of an answer


class LocalLoad:
    """Owns the measured work of this box's engine."""

    def __init__(
        self, keys: PrefixKeys, facts: Callable[[], LocalCapacity | None], held: Callable[[], Iterable[HeldRequest]]
    ) -> None:
        """Takes `facts`, which is None while no engine takes requests, and `held`, the requests at the engine."""
        self._keys, self._facts, self._held = keys, facts, held
        self._taken: deque[tuple[float, tuple[str, int]]] = deque(maxlen=MAX_TAKEN)
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()  # known, the latest last
        self._unreported: OrderedDict[bytes, None] = OrderedDict()  # of these
        self.demand: ExpertDemand | None = None  # of the last ExpertDemandReport
        self._reported_demand: ExpertDemand | None = None
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_UNREPORTED)  # not reported yet

    def on_choosing(self, message: ExpertDemandReport) -> None:
        """Keeps the experts that the engine's requests choose, and the signatures of ended requests."""
        self.demand = message.choices
        self._ended.extend(message.ended)

    @property
    def engine(self) -> str:
        """Returns the boot id of the engine; "" while none takes requests."""
        facts = self._facts()
        return facts.boot if facts is not None else ""

    def note(self, message: Submit, offer: tuple[str, int] | None = None) -> None:
        """Remembers a request that goes to this box's engine; `offer` is a node and its offer's number."""
        if offer is not None:
            self._taken.append((time.monotonic(), offer))
        prefix = self._keys.cached(message.request)
        for at in range(0, len(prefix), KEY_BYTES):
            self._note_key(prefix[at : at + KEY_BYTES])

    def begins_like(self, prefix: bytes) -> bool:
        """Returns whether the engine has had a prompt with the same first piece; `prefix` has keyed hashes."""
        return prefix[:KEY_BYTES] in self._prefixes

    def use(self) -> LoadReport:
        """Returns the engine's work; `report` adds its unreported changes."""
        facts = self._facts()
        if facts is None:
            return LoadReport()
        held = list(self._held())
        waiting = [one for one in held if not one.emitted]
        blocks = facts.kv_tokens // BLOCK_TOKENS
        most = sum(_blocks(one) for one in held)
        said = facts.stats.get(names.KV_BLOCKS_REFERENCED, float(most)) + sum(map(_blocks, waiting))
        rest = sum(max(0.0, min(facts.expected_tokens, one.max_tokens) - one.emitted) for one in held)
        since_s = time.monotonic() - TAKEN_S
        return LoadReport(
            engine=facts.boot,
            slots=facts.slots,
            capacity=facts.capacity,
            running=len(held) - len(waiting),
            waiting=len(waiting),
            prefill_tokens=sum(one.prompt_tokens for one in waiting),
            remaining_tokens=int(rest),
            blocks=blocks,
            free_blocks=max(0, blocks - int(min(most, said))),
            tokens_per_s=_prefill_speed(facts.stats),
            taken=tuple(offer for when_s, offer in self._taken if when_s > since_s),
        )

    def starts_at_once(self, request: Request) -> bool:
        """Returns whether the engine would begin with this request in its next step."""
        use = self.use()
        if not use.engine or use.waiting or use.running >= use.slots:
            return False
        facts = self._facts()
        expected = min(facts.expected_tokens, request.sampling.max_tokens) if facts is not None else 0.0
        reserve = OUTPUT_RESERVE * (use.remaining_tokens + expected) / BLOCK_TOKENS
        return not use.running or len(request.prompt) // BLOCK_TOKENS + 1 + reserve <= use.free_blocks

    def remembers(self, prefix: bytes) -> bool:
        """Returns whether the engine has had half of a prompt's whole pieces or more, as far as is remembered."""
        keys = [prefix[at : at + KEY_BYTES] for at in range(0, len(prefix), KEY_BYTES)]
        return 2 * sum(key in self._prefixes for key in keys) >= len(keys)

    def report(self, use: LoadReport, again: bool = False) -> LoadReport:
        """Returns `use` with the prefixes, demand and ended requests not reported yet, as many as fit.

        They count as reported then. `again` repeats the demand: the leader may not have known the engine before.
        """
        untold = self._unreported
        prefixes = [untold.popitem(last=False)[0] for _ in range(min(len(untold), MAX_PREFIX_KEYS))]
        demand = self.demand if again or self.demand != self._reported_demand else None
        self._reported_demand = self.demand
        ended = tuple(self._take_ended())
        return structs.replace(use, prefixes=b"".join(prefixes), choices=demand, ended=ended)

    def _note_key(self, key: bytes) -> None:
        known, untold = self._prefixes, self._unreported
        if key not in known:
            untold[key] = None
        known[key] = None
        known.move_to_end(key)
        if len(known) > MAX_PREFIXES:
            oldest, _ = known.popitem(last=False)
            untold.pop(oldest, None)

    def _take_ended(self) -> Iterator[EndedRequest]:
        size = 0
        for _ in range(min(len(self._ended), MOST_ENDED)):
            one = self._ended[0]
            size += len(one.prompt.chosen) + len(one.answer.chosen)
            if size > MAX_ENDED_BYTES:
                return
            yield self._ended.popleft()

    def mark_unreported(self) -> None:
        """Counts all that is known as not reported: there is another leader, or a report did not reach it."""
        self._unreported, self._reported_demand = self._prefixes.copy(), None

    def forget(self, *, engine: bool = False) -> None:
        """Forgets the prefixes, hashed with a former secret; with `engine` all that is known of one that is gone."""
        self._prefixes.clear()
        self._unreported.clear()
        if engine:
            self.demand = self._reported_demand = None
            self._ended.clear()


class EnginePace:
    """The mean time of decode steps of one engine after the other. `read_counters` is called several times a second."""

    def __init__(self) -> None:
        self._steps = self._seconds = 0.0
        self._usual_s = self._lately_s = 0.0
        self._seen_s = float("-inf")  # time of the last measurement

    def read_counters(self, stats: Mapping[str, float], now_s: float) -> None:
        """Updates the step times from the engine's counters."""
        steps = stats.get(names.named(names.STEPS, phase="decode"), 0.0)
        seconds = stats.get(names.named(names.STEP_SECONDS, phase="decode"), 0.0)
        if steps > self._steps and seconds > self._seconds:
            self._lately_s, self._seen_s = (seconds - self._seconds) / (steps - self._steps), now_s
            weight = PACE_WEIGHT if self._lately_s < UNUSUAL * self._usual_s else UNUSUAL_WEIGHT
            self._usual_s += (weight if self._usual_s else 1.0) * (self._lately_s - self._usual_s)
        self._steps, self._seconds = steps, seconds

    def step_s(self, now_s: float) -> float:
        """Returns the time that a step takes now; 0 before the first one."""
        return self._lately_s if now_s - self._seen_s < STALE_S else self._usual_s

    def is_usual(self, now_s: float) -> bool:
        """Whether steps take about as long as usual, as far as is known."""
        return self.step_s(now_s) <= UNUSUAL * self._usual_s


def _blocks(one: HeldRequest) -> int:
    return (one.prompt_tokens + one.emitted) // BLOCK_TOKENS + 1


def _prefill_speed(stats: Mapping[str, float]) -> float:
    seconds = stats.get(names.named(names.STEP_SECONDS, phase="prefill"), 0.0)
    return stats.get(names.named(names.STEP_TOKENS, phase="prefill"), 0.0) / seconds if seconds > 0 else 0.0

"""Measures the work of this box's engine and reports it to the leader.

The front sees every request begin and end, so it need not ask the engine. It estimates the free KV blocks twice: by the
most that its requests can take, and by the engine's metrics of half a second ago. The larger estimate counts.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import structs

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.coordination.coord_store import wait_event
from edgemoe.cluster.control.messages import MAX_PREFIX_KEYS, MAX_TAKEN, LoadReport
from edgemoe.front.prompt_hints import KEY_BYTES, PrefixKeys
from edgemoe.front.request_table import HeldRequest
from edgemoe.ipc.messages import ExpertDemandReport, Submit
from edgemoe.telemetry import metrics as names
from edgemoe.ticking import until_tick
from edgemoe.types.expert_signatures import MOST_ENDED, EndedRequest, ExpertDemand
from edgemoe.types.request import Request
from edgemoe.types.step import BLOCK_TOKENS

TAKEN_S = 3.0  # for which an offer is reported as arrived at the engine
OUTPUT_RESERVE = 0.25  # of expected output, kept free in KV by engines
MAX_UNREPORTED = 4 * MOST_ENDED  # requests that have ended; the oldest go
MAX_ENDED_BYTES = 1 << 19  # of the signatures of ended requests in one message
MAX_PREFIXES = 8 * MAX_PREFIX_KEYS  # keys that are remembered; of more, the longest unused go
LOOK_S = 0.05  # at most, between measurements while the engine has anything to do
GAP_S = 0.01  # at least, between reports
REPEAT_S = 0.5  # after which an unchanged measurement is reported again


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

    def knows(self, prefix: bytes) -> bool:
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


class LoadReporter:
    """Reports the measurements to the leader whenever they have changed."""

    def __init__(self, plane: ControlPlane, meter: LocalLoad) -> None:
        self._changed = asyncio.Event()
        self._plane, self._meter = plane, meter
        self._leadership: tuple[str, int] = ("", 0)  # to which the last report went
        self._reported: tuple[tuple[object, ...], float] = ((), 0.0)  # the last report, and when
        self._idle = False  # the engine, at the last measurement
        self._waited_s = 0.0  # when `wait` returned last

    def on_work_changed(self) -> None:
        """Marks that the engine's work has changed."""
        self._changed.set()

    def on_choosing(self, message: ExpertDemandReport) -> None:
        """Keeps the experts that the engine's requests choose."""
        self._meter.on_choosing(message)
        self._changed.set()

    def on_beat(self) -> None:
        """Reports soon if the leader or this box's engine is another one."""
        if (self._plane.state.leader_tracker.current, self._meter.engine) != self._reported[0][:2]:
            self._changed.set()

    async def wait(self, busy: bool) -> None:
        """Waits until there may be a change to report: LOOK_S at most if `busy` or while the engine has work."""
        await wait_event(self._changed, LOOK_S if busy or not self._idle else until_tick(REPEAT_S))
        await asyncio.sleep(max(0.0, self._waited_s + GAP_S - time.monotonic()))
        self._waited_s = time.monotonic()

    def report(self) -> None:
        """Reports to the leader if the measurement has changed, or the last report is REPEAT_S old."""
        plane, meter, now = self._plane, self._meter, time.monotonic()
        leadership = plane.state.leader_tracker.current
        self._idle = True
        if not plane.leader or not any(plane.state.members):
            return
        use = meter.use()
        self._idle = not use.running and not use.waiting
        marks = leadership, use.engine, use.running, use.waiting, use.prefill_tokens, meter.demand
        if marks == self._reported[0] and now - self._reported[1] < REPEAT_S:
            return
        if leadership != self._leadership:
            self._leadership = leadership
            meter.mark_unreported()
        again, self._reported = marks == self._reported[0], (marks, now)
        report = meter.report(use, again)
        if plane.leader == plane.state.node:
            plane.desk.on_engine_status(plane.leader, report)
        elif not plane.channel.notify_peer(plane.leader, report):
            meter.mark_unreported()


def _blocks(one: HeldRequest) -> int:
    return (one.prompt_tokens + one.emitted) // BLOCK_TOKENS + 1


def _prefill_speed(stats: Mapping[str, float]) -> float:
    seconds = stats.get(names.named(names.STEP_SECONDS, phase="prefill"), 0.0)
    return stats.get(names.named(names.STEP_TOKENS, phase="prefill"), 0.0) / seconds if seconds > 0 else 0.0

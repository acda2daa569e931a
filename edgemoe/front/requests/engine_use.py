"""What our engine has to do, as the leader is told: from what the front has handed to it and has heard of it.

The front sees every request begin and end, so that nothing need be asked of the engine. How many blocks are free is the
larger of two estimates: what its requests take at most, and what it said itself half a second ago.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import structs

from edgemoe.cluster.control.messages import MAX_PREFIX_KEYS, MAX_TAKEN, EngineStatus
from edgemoe.front.requests.prefix_keys import KEY_BYTES, PrefixKeys
from edgemoe.ipc.messages import ExpertDemandReport, Submit
from edgemoe.telemetry import metrics as names
from edgemoe.types.expert_signatures import MOST_ENDED, EndedRequest, ExpertDemand
from edgemoe.types.request import Request
from edgemoe.types.step import BLOCK_TOKENS

TAKEN_S = 3.0  # for which an offer is named that has reached the engine
OUTPUT_RESERVE = 0.25  # of expected output, kept free in KV by engines
MAX_UNTOLD = 4 * MOST_ENDED  # requests that have ended; the oldest go
MOST_BYTES = 1 << 19  # of what they chose, in one message
MAX_PREFIXES = 8 * MAX_PREFIX_KEYS  # keys that are remembered; of more, the longest unused go


class HeldRequest(NamedTuple):
    """A request at our engine."""

    prompt_tokens: int
    emitted: int
    max_tokens: int


class EngineFacts(NamedTuple):
    """An engine that takes requests."""

    boot: str
    slots: int
    capacity: int
    kv_tokens: int
    stats: Mapping[str, float]
    expected_tokens: float  # of an answer


class EngineMeter:
    """Measures our engine's work. One owner, one event loop."""

    def __init__(
        self, keys: PrefixKeys, facts: Callable[[], EngineFacts | None], held: Callable[[], Iterable[HeldRequest]]
    ) -> None:
        """`facts` returns None while no engine takes requests; `held` what it has."""
        self._keys, self._facts, self._held = keys, facts, held
        self._taken: deque[tuple[float, tuple[str, int]]] = deque(maxlen=MAX_TAKEN)
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()  # known, the latest last
        self._untold: OrderedDict[bytes, None] = OrderedDict()  # of these
        self.choices: ExpertDemand | None = None  # as the engine said last
        self._told: ExpertDemand | None = None
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_UNTOLD)  # not told yet

    def hear(self, message: ExpertDemandReport) -> None:
        """Takes what the engine says of its requests' choices."""
        self.choices = message.choices
        self._ended.extend(message.ended)

    @property
    def engine(self) -> str:
        """Returns which engine it is; "" while none takes requests."""
        facts = self._facts()
        return facts.boot if facts is not None else ""

    def note(self, message: Submit, offer: tuple[str, int] | None = None) -> None:
        """Takes note of a request that goes to our engine, by that offer of a front."""
        if offer is not None:
            self._taken.append((time.monotonic(), offer))
        prefix = self._keys.cached(message.request)
        for at in range(0, len(prefix), KEY_BYTES):
            self._note_key(prefix[at : at + KEY_BYTES])

    def begins_like(self, prefix: bytes) -> bool:
        """Returns whether our engine has had a prompt with such a beginning; `prefix` is as it is offered."""
        return prefix[:KEY_BYTES] in self._prefixes

    def use(self) -> EngineStatus:
        """Returns what the engine has to do. What else there is to tell is added by `news`."""
        facts = self._facts()
        if facts is None:
            return EngineStatus()
        held = list(self._held())
        waiting = [one for one in held if not one.emitted]
        blocks = facts.kv_tokens // BLOCK_TOKENS
        most = sum(_blocks(one) for one in held)
        said = facts.stats.get(names.KV_BLOCKS_REFERENCED, float(most)) + sum(map(_blocks, waiting))
        rest = sum(max(0.0, min(facts.expected_tokens, one.max_tokens) - one.emitted) for one in held)
        since_s = time.monotonic() - TAKEN_S
        return EngineStatus(
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
        """Returns whether our engine would begin with this request in its next step."""
        use = self.use()
        if not use.engine or use.waiting or use.running >= use.slots:
            return False
        facts = self._facts()
        expected = min(facts.expected_tokens, request.sampling.max_tokens) if facts is not None else 0.0
        reserve = OUTPUT_RESERVE * (use.remaining_tokens + expected) / BLOCK_TOKENS
        return not use.running or len(request.prompt) // BLOCK_TOKENS + 1 + reserve <= use.free_blocks

    def knows(self, prefix: bytes) -> bool:
        """Returns whether our engine has had half of a prompt's whole pieces or more, as far as is remembered."""
        keys = [prefix[at : at + KEY_BYTES] for at in range(0, len(prefix), KEY_BYTES)]
        return 2 * sum(key in self._prefixes for key in keys) >= len(keys)

    def news(self, use: EngineStatus, again: bool = False) -> EngineStatus:
        """Returns that with prefixes, choices and ended requests not told yet, and counts these as told.

        As many as fit. With `again` choices are among them in any case: the leader may not have known the engine when
        it was told.
        """
        untold = self._untold
        prefixes = [untold.popitem(last=False)[0] for _ in range(min(len(untold), MAX_PREFIX_KEYS))]
        choices = self.choices if again or self.choices != self._told else None
        self._told = self.choices
        ended = tuple(self._take_ended())
        return structs.replace(use, prefixes=b"".join(prefixes), choices=choices, ended=ended)

    def _note_key(self, key: bytes) -> None:
        known, untold = self._prefixes, self._untold
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
            if size > MOST_BYTES:
                return
            yield self._ended.popleft()

    def retell(self) -> None:
        """Counts all that is known as not told yet: there is another leader, or news did not reach it."""
        self._untold, self._told = self._prefixes.copy(), None

    def forget(self, *, engine: bool = False) -> None:
        """Forgets prefixes, hashed with another secret, or with `engine` all of one that is gone."""
        self._prefixes.clear()
        self._untold.clear()
        if engine:
            self.choices = self._told = None
            self._ended.clear()


def _blocks(one: HeldRequest) -> int:
    return (one.prompt_tokens + one.emitted) // BLOCK_TOKENS + 1


def _prefill_speed(stats: Mapping[str, float]) -> float:
    seconds = stats.get(names.named(names.STEP_SECONDS, phase="prefill"), 0.0)
    return stats.get(names.named(names.STEP_TOKENS, phase="prefill"), 0.0) / seconds if seconds > 0 else 0.0

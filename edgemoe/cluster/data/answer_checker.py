"""Computes answers of peers again in spare moments, and reports the boxes whose answers are wrong.

The expert server's thread computes here, when no call of a peer waits. An answer whose experts are not in memory here
is first compared with another box's. Only sums that this box computed by itself count against a box.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgemoe.cluster.data.answer_ledger import AnswerLedger, InMemory, KeptAnswer, is_there
from edgemoe.errors import EdgemoeError, PeerBusy
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.peers import ExpertWork

log = logging.getLogger(__name__)
TICK_S = 0.05
IDLE_SHARE = 0.25  # of the time, while nothing else runs here or a box is suspected
MOST_CREDIT_S = 0.5  # of time to spend that is saved up

ComputeHere = Callable[[Sequence[ExpertWork]], Awaitable[Sequence[Any]]]  # raises PeerBusy, EdgemoeError
AskAnother = Callable[[ExpertWork, str], Awaitable[memoryview | None]]  # another box than that one; None: there is none
MendOwn = Callable[[int, Sequence[int]], Awaitable[bool]]  # (layer, experts) -> whether own copies were damaged


async def _is_sound(_layer: int, _experts: Sequence[int]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class CheckingMeans:
    """The ways to compute an answer again."""

    here: ComputeHere
    another: AskAnother
    in_memory: InMemory
    is_idle: Callable[[], bool]


class SpareTime:
    """Grants a share of the time, by any clock."""

    def __init__(self, now_s: float) -> None:
        self._credit_s, self._since_s = 0.0, now_s

    def has_any(self, share: float, now_s: float) -> bool:
        """Adds the share of the time since the last call. Returns whether some is left."""
        self._credit_s = min(self._credit_s + share * (now_s - self._since_s), MOST_CREDIT_S)
        self._since_s = now_s
        return self._credit_s > 0

    def spend(self, seconds: float) -> None:
        self._credit_s -= seconds


class AnswerChecker:
    """Checks the answers that the ledger draws, until cancelled. Lives on the engine's event loop."""

    def __init__(
        self,
        ledger: AnswerLedger,
        share: float,
        means: CheckingMeans,
        on_cut: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Spends `share` of the time while the engine is busy. Calls `on_cut` with a box that is cut off, and why."""
        self.ledger = ledger
        self.seconds = 0.0  # spent
        self.own_errors = 0  # answers that were right, and computed wrongly here
        self.mend: MendOwn = _is_sound
        self._share, self._means, self._on_cut, self._clock = share, means, on_cut, clock
        self._spare = SpareTime(clock())
        self._say = RateLimitedLog(log)

    async def run(self) -> None:
        """Checks answers until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            while await self.check_some():
                pass

    async def check_some(self) -> bool:
        """Checks some answers if there is time. Returns whether it did."""
        idle = self._means.is_idle()
        share = IDLE_SHARE if idle or self.ledger.has_suspects else self._share
        if not self._spare.has_any(share, self._clock()):
            return False
        batch = self.ledger.next_batch(self._means.in_memory, idle)
        if not batch:
            return False
        began_s = self._clock()
        try:
            await self._check(batch)
        except PeerBusy:
            self.ledger.put_back(batch)
            return False
        except EdgemoeError as error:  # such as an expert that cannot be had
            self._say(logging.INFO, "an answer could not be checked", batch[0].node, why=str(error))
        finally:
            took_s = self._clock() - began_s
            self._spare.spend(took_s)
            self.seconds += took_s
        return True

    async def _check(self, batch: list[KeptAnswer]) -> None:
        """Judges the answers. Raises PeerBusy where this box has no time, EdgemoeError where it cannot compute them."""
        first = batch[0]
        if not is_there(first.work, self._means.in_memory(first.work.layer)):
            another = await self._means.another(first.work, first.node)
            if another is not None and self.ledger.judge(first, another):
                self.ledger.record_right(first.node)
                return
        ours = await self._means.here([answer.work for answer in batch])
        for answer, sums in zip(batch, ours, strict=True):
            if self.ledger.judge(answer, sums) or not await self._is_wrong(answer):
                self.ledger.record_right(answer.node)
            else:
                self._note_wrong(answer)

    async def _is_wrong(self, answer: KeptAnswer) -> bool:
        """Computes a differing answer once more, from experts that were verified."""
        experts = answer.work.experts.tolist()
        damaged = await self.mend(answer.work.layer, experts)
        while True:
            try:
                (again,) = await self._means.here([answer.work])
                break
            except PeerBusy:
                await asyncio.sleep(TICK_S)
        if self.ledger.judge(answer, again):
            self.own_errors += 1
            self._say(logging.ERROR, "an answer was computed wrongly here", answer.node, damaged=damaged)
            return False
        return True

    def _note_wrong(self, answer: KeptAnswer) -> None:
        work = answer.work
        why = f"its sums of layer {work.layer}, experts {work.experts.tolist()} differ from those computed here"
        self._say(logging.WARNING, "a peer's answer is wrong", answer.node, why=why)
        if self.ledger.record_wrong(answer.node):
            record = self.ledger.records[answer.node]
            self._on_cut(answer.node, f"{record.wrong} wrong answers of {record.wrong + record.right} checked; {why}")

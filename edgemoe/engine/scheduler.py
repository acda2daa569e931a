"""Decides which sequences run in the next step and with how many tokens each (reasons: docs/design/engine.md).

`fairness` orders waiting requests. Decoding sequences come first, then prompts in chunks. Principals take turns, and
so do the users of each. When blocks run out, a sequence of the largest user is paused.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgemoe.config.settings import EngineSettings
from edgemoe.engine.blocks import BlockManager, KVSwap
from edgemoe.engine.fairness import FairnessAccounts, ServiceAccounts, StepPrices, StepShares, head_keys, queue_order
from edgemoe.engine.sequence import Sequence, blocks_for
from edgemoe.types.request import NOBODY, Identity
from edgemoe.types.step import BLOCK_TOKENS

if TYPE_CHECKING:
    from edgemoe.engine.speculation import Speculation

MEMORY = 0.9  # weight of the past at each new step
FIRST_GUESS_TOKENS_PER_S = 2000.0
SHORTER = 0.7  # of every second chunk
FIRST_CHUNK_TOKENS = 4 * BLOCK_TOKENS  # beside decoders, before anything is known


class ChunkBudget:
    """Fits the length of prefilling steps and turns it into a token budget."""

    def __init__(self, step_tokens: int, aim_s: float) -> None:
        """Allows at most `step_tokens` a step and aims for steps of `aim_s` seconds; 0 aims for no duration."""
        self._most = step_tokens
        self._aim_s = aim_s
        self._sums = np.zeros((2, 3))  # of (1, n) times (1, n, seconds), decayed
        self._shorter = False  # the next chunk

    @property
    def tokens_per_s(self) -> float:
        """Returns the prompt tokens per second of recent steps that prefilled."""
        _, tokens, seconds = self._sums[0].tolist()
        return tokens / seconds if seconds else FIRST_GUESS_TOKENS_PER_S

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """Adds the duration of a step that prefilled `prefill_tokens` to the fit."""
        row = np.array([1.0, prefill_tokens])
        self._sums = MEMORY * self._sums + np.outer(row, [*row, seconds])
        self._shorter = not self._shorter

    def prefill_tokens(self, decoding: int) -> int:
        """Returns the prompt tokens that a step with `decoding` decoding sequences may prefill, at least one block."""
        room = max(BLOCK_TOKENS, self._most - decoding)
        if not decoding or not self._aim_s:
            return room
        chunk = self._chunk() * (SHORTER if self._shorter else 1.0)
        return int(np.clip(chunk, BLOCK_TOKENS, room))

    def _chunk(self) -> float:
        (count, tokens, seconds), (_, squares, products) = self._sums.tolist()
        if count == 0.0:
            return FIRST_CHUNK_TOKENS
        spread = count * squares - tokens * tokens
        slope = seconds / tokens  # all steps alike: no fixed part to be seen
        if spread > 1e-3 * tokens * tokens:
            slope = min(max((count * products - tokens * seconds) / spread, slope / 3), slope)
        fixed = (seconds - slope * tokens) / count
        return max((self._aim_s - fixed) / slope, fixed / slope)


AGING_SHARE = 0.4  # of the speed of prefill: a request is overtaken for at most 2.5 times its own prefill
OUTPUT_RESERVE = 0.25  # share of a running request's expected remaining output that is reserved in KV
PROMPT_ROWS = 64  # a step's tokens of prompts whose log probabilities are wanted: logits are large
FEW_RUNNING = 4  # sequences that a principal may run beside others' streams, however few tokens these leave it
FIRST_SEQUENCE_TIMEOUT_S = 2.0  # one with nothing running waits at most this long before another's surplus is paused


class ScheduledWork(NamedTuple):
    """One sequence and the number of its tokens that the step computes, and drafted tokens to check after these."""

    seq: Sequence
    tokens: int
    draft: tuple[int, ...] = ()


class PrefillWork(NamedTuple):
    """A waiting request and the tokens that it has to prefill."""

    seq: Sequence
    tokens: int


class LineHead(NamedTuple):
    """The request that is next, and its sorting keys among its principal's users and among principals."""

    waiter: PrefillWork
    user_key: float = 0.0
    principal_key: float = 0.0


class Scheduler:
    """Owns the queues. `now_s` is the time of a monotonic clock, always the same one."""

    def __init__(
        self, settings: EngineSettings, blocks: BlockManager, chunk_budget: ChunkBudget, kv_swap: KVSwap | None = None
    ):
        self.waiting: list[Sequence] = []  # by arrival
        self.running: list[Sequence] = []  # by admission
        self.fairness = FairnessAccounts()
        self.output_reserve = OUTPUT_RESERVE
        self.paused_total = Counter[str]()  # by way: park | recompute
        self.prefix_tokens = Counter[str]()  # by result: hit | miss
        self._settings = settings
        self._blocks = blocks
        self._chunk_budget = chunk_budget
        self.step_shares = StepShares(settings.step_stretch, StepPrices())
        self.speculation: Speculation | None = None  # drafts tokens
        self.steps = 0
        self.max_sequences = settings.max_sequences  # that run at once
        self._kv_swap = kv_swap
        self.admissions = 0
        self._admitted_s = 0.0
        self._gap_s = 1.0  # decayed mean time between admissions

    # --- questions

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def expired(self, now_s: float) -> list[Sequence]:
        """Returns the requests that have made no progress until their deadline."""
        return [seq for seq in (*self.running, *self.waiting) if seq.deadline_s <= now_s]

    @property
    def aging_tokens_per_s(self) -> float:
        """Returns how many prefill tokens one second of waiting outweighs in the order of requests."""
        return AGING_SHARE * self._chunk_budget.tokens_per_s

    def retry_after_s(self) -> float:
        """Returns after how many seconds a refused request may find room in the queue."""
        return float(np.clip(self._gap_s, 1.0, 60.0))

    # --- changes

    def add(self, seq: Sequence) -> Sequence | None:
        """Queues `seq`. Returns the request to refuse where the queue is full, else None.

        That is the newest request of the user who has the most waiting, of the principal that has.
        """
        self.fairness.add_request(seq.identity)
        insort(self.waiting, seq, key=lambda other: other.arrived_s)
        if len(self.waiting) + len(self.running) <= self._settings.max_queue + self.max_sequences:
            return None
        new = [other for other in self.waiting if not other.started and not other.emitted]
        if not new:
            return None
        refused = _newest_of_largest(new)
        self.remove(refused)
        return refused

    def remove(self, seq: Sequence) -> None:
        """Removes `seq` from its queue, frees its blocks and swapped blocks, and has its grammar compiled no more."""
        (self.running if seq.blocks else self.waiting).remove(seq)
        self._blocks.close(seq)
        if self._kv_swap:
            self._kv_swap.drop(seq)
        self.fairness.remove_request(seq.identity)
        if seq.compiling:
            seq.compiling.cancel()

    def restart(self, seq: Sequence) -> None:
        """Queues `seq` to be computed again from its first token, and removes its blocks from the prefix cache."""
        self._blocks.forget(seq.keys)
        self._requeue(seq)

    def restart_all(self) -> None:
        """Queues all sequences to be computed again from their first token, and empties the prefix cache."""
        for seq in list(self.running):
            self.paused_total["recompute"] += 1
            self._requeue(seq)
        for seq in self.waiting:
            if self._kv_swap:
                self._kv_swap.drop(seq)
        self._blocks.forget_all()

    def schedule(self, now_s: float) -> list[ScheduledWork]:
        """Returns the next step's work, decoding sequences first. Every token has a place in a KV block, drafts too."""
        self._extend_decoding()
        if self.waiting:
            self._admit(now_s)
        limits = self._limits_of_principals()
        cut = self._schedule_cut(limits) if limits else []
        whole = [seq for seq in self.running if seq.identity.principal not in limits or seq.missing_expert is not None]
        decoding = [ScheduledWork(seq, 1) for seq in whole if seq.decoding]
        budget = self._chunk_budget.prefill_tokens(len(decoding) + sum(work.tokens for work in cut))
        prefilling = [seq for seq in whole if not seq.decoding]
        works = sorted([*decoding, *cut], key=lambda work: not work.seq.decoding)
        works += self._schedule_prefills(prefilling, now_s, budget)
        self.steps += 1
        works = self._prepare(works)
        return works if self.speculation is None else self.speculation.add_drafts(works)

    def drop_drafts(self, works: Iterable[ScheduledWork]) -> list[ScheduledWork]:
        """Returns the works without drafts, and releases the blocks that only these need."""
        for work in works:
            self._blocks.trim(work.seq)
        return [work._replace(draft=()) for work in works]

    # --- running

    def _prepare(self, works: list[ScheduledWork]) -> list[ScheduledWork]:
        """Returns the works for whose tokens there are blocks, shorter ones where blocks of windows are scarce.

        Where none has a block left, others are paused until the first one has. It can always be computed alone.
        """
        prepared = []
        for seq, tokens, _ in works:
            if (fitting := min(tokens, self._blocks.computable(seq))) > 0:
                seq.last_step = self.steps
                self._blocks.prepare(seq, fitting)
                prepared.append(ScheduledWork(seq, fitting))
        if not works or prepared:
            return prepared
        self._pause(_newest_of_largest([seq for seq in self.running if seq is not works[0].seq]))
        return self._prepare(works[:1])

    def _extend_decoding(self) -> None:
        for seq in [seq for seq in self.running if seq.decoding]:
            while seq.blocks and not self._blocks.can_append(seq):
                self._pause(_newest_of_largest(self.running))
            if seq.blocks:
                self._blocks.append(seq)

    def _pause(self, seq: Sequence) -> None:
        swapped = self._kv_swap is not None and self._kv_swap.swap_out(seq)
        self.paused_total["park" if swapped else "recompute"] += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._blocks.close(seq)
        insort(self.waiting, seq, key=lambda other: other.arrived_s)

    def _limits_of_principals(self) -> dict[str, int]:
        """Returns the most tokens in the next step of each principal whose work would lengthen others' streams."""
        if not self._is_fair:
            return {}
        wanted, decoding = Counter[str](), Counter[str]()
        for seq in self.running:
            if seq.missing_expert is None:
                wanted[seq.identity.principal] += seq.uncomputed
                decoding[seq.identity.principal] += seq.decoding
        return self.step_shares.divide(wanted, +decoding, self.fairness.principals)

    def _schedule_cut(self, limits: dict[str, int]) -> list[ScheduledWork]:
        """Returns the work of principals with limits. Their sequences take turns."""
        works, left, rows = [], dict(limits), PROMPT_ROWS
        for seq in sorted(self.running, key=lambda seq: seq.last_step):
            principal = seq.identity.principal
            if principal in left and seq.missing_expert is None:
                tokens = min(1, left[principal], rows)  # of each: steps of one token a sequence have faster kernels
                left[principal] -= tokens
                rows -= seq.wants_prompt_logprobs
                if tokens:
                    works.append(ScheduledWork(seq, tokens))
        return works

    def _schedule_prefills(self, seqs: list[Sequence], now_s: float, budget: int) -> list[ScheduledWork]:
        works, rows = [], PROMPT_ROWS
        for waiter in self._in_order([PrefillWork(seq, seq.uncomputed) for seq in seqs], now_s):
            reports = waiter.seq.wants_prompt_logprobs
            tokens = min(budget, waiter.tokens, rows if reports else waiter.tokens)
            if waiter.seq.missing_expert is None:  # else it runs alone, and again and again
                budget -= tokens
                rows -= tokens * reports
            if tokens:
                works.append(ScheduledWork(waiter.seq, tokens))
        return works

    def _prefilling_sequences(self) -> list[Sequence]:
        return [seq for seq in self.running if not seq.decoding]

    # --- admission

    def _admit(self, now_s: float) -> None:
        room = self._room_of_principals(now_s)
        waiting = [seq for seq in self.waiting if room.get(seq.identity.principal, 1)] if room else self.waiting
        lines = self._lines_by_user(waiting, now_s)
        while lines:
            head = self._next_head(lines, now_s)
            seq, tokens = head.waiter
            if not seq.ready or self._prefix_in_flight(seq):
                self._pop_head(lines, seq)
            elif not self._fits(seq):
                if (displaced := self._sequence_to_pause(head, now_s)) is not None:
                    self._pause(displaced)
                return
            elif not self._would_get_tokens(seq, tokens, now_s):
                return
            else:
                self._start_running(seq, now_s)
                self._pop_head(lines, seq)
                principal = seq.identity.principal
                if principal in room:
                    room[principal] -= 1
                    if room[principal] <= 0:
                        lines = {identity: line for identity, line in lines.items() if identity.principal != principal}

    def _room_of_principals(self, now_s: float) -> dict[str, int]:
        """Returns how many more sequences each waiting principal may run; {} where nobody else has a stream.

        A principal whose share of a step is few tokens runs few sequences. More would get theirs no sooner, and each
        takes time of every step. One more is admitted after FIRST_SEQUENCE_TIMEOUT_S, so that long ones keep none out.
        """
        streaming = {seq.identity.principal for seq in self.running if seq.decoding}
        waiting = {seq.identity.principal for seq in self.waiting}
        if not self.step_shares.is_bounded or not self._is_fair or not streaming or len(streaming | waiting) < 2:
            return {}
        held = Counter(seq.identity.principal for seq in self.running)
        most = max(FEW_RUNNING, 2 * self.step_shares.level)
        accounts = self.fairness.principals
        late = {name for name in waiting if now_s - accounts[name].turn_s >= FIRST_SEQUENCE_TIMEOUT_S}
        return {name: max(most - held[name], int(name in late)) for name in waiting}

    @property
    def _is_fair(self) -> bool:
        """Returns whether principals and users take turns; by other rules all stand in one line."""
        return self._settings.scheduler == "sjf"

    def _lines_by_user(self, waiting: list[Sequence], now_s: float) -> dict[Identity, deque[PrefillWork]]:
        """Returns each user's waiting requests in order, resumed ones first."""
        lines: dict[Identity, deque[PrefillWork]] = {}
        waiters = self._in_order([PrefillWork(seq, self._tokens_to_prefill(seq)) for seq in waiting], now_s)
        for waiter in sorted(waiters, key=lambda waiter: not waiter.seq.started):
            lines.setdefault(self._line_key(waiter.seq), deque()).append(waiter)
        return lines

    def _line_key(self, seq: Sequence) -> Identity:
        return seq.identity if self._is_fair else NOBODY

    def _pop_head(self, lines: dict[Identity, deque[PrefillWork]], seq: Sequence) -> None:
        line = lines[self._line_key(seq)]
        line.popleft()
        if not line:
            del lines[self._line_key(seq)]

    def _in_order(self, waiters: list[PrefillWork], now_s: float) -> list[PrefillWork]:
        """Orders `waiters`, which come by arrival, by the rule chosen in the settings."""
        if len(waiters) < 2:
            return waiters
        tokens = np.array([waiter.tokens for waiter in waiters])
        waited_s = now_s - np.array([waiter.seq.arrived_s for waiter in waiters])
        ranks = queue_order(tokens, waited_s, self._settings.scheduler, self.aging_tokens_per_s)
        return [waiters[i] for i in ranks]

    def _next_head(self, lines: dict[Identity, deque[PrefillWork]], now_s: float) -> LineHead:
        """Returns the request that is next: the first one of the principal's user whose turn it is."""
        if not self._is_fair:
            return LineHead(lines[NOBODY][0])
        lines_of: dict[str, dict[str, PrefillWork]] = {}
        for identity, line in lines.items():
            lines_of.setdefault(identity.principal, {})[identity.user] = line[0]
        users = {
            principal: self._head_in_turn(heads, self.fairness.users(principal), now_s)
            for principal, heads in lines_of.items()
        }
        heads = {principal: waiter for principal, (waiter, _) in users.items()}
        waiter, key = self._head_in_turn(heads, self.fairness.principals, now_s)
        return LineHead(waiter, users[waiter.seq.identity.principal][1], key)

    def _head_in_turn(
        self, heads: dict[str, PrefillWork], accounts: ServiceAccounts, now_s: float
    ) -> tuple[PrefillWork, float]:
        """Returns the head with the smallest sorting key among these, by name, and that key."""
        waiters = list(heads.values())
        headed_s = [accounts.head_of_line_since(name, head.seq.arrived_s) for name, head in heads.items()]
        keys = head_keys(
            np.array([waiter.tokens for waiter in waiters]),
            np.array(accounts.service_ahead(heads)),
            now_s - np.array(headed_s),
            self.aging_tokens_per_s,
        )
        best = int(np.argmin(keys))
        return waiters[best], float(keys[best])

    def _tokens_to_prefill(self, seq: Sequence) -> int:
        known = seq.swapped.tokens if seq.swapped else self._blocks.known(seq) * BLOCK_TOKENS
        return len(seq.tokens) - known

    def _prefix_in_flight(self, seq: Sequence) -> bool:
        """Returns whether a running prompt is computing the first block that `seq` still needs."""
        known = self._blocks.known(seq)
        missing = seq.keys[known : known + 1]
        if seq.swapped or not missing:
            return False
        promised = (other for other in self._prefilling_sequences() if other.computed // BLOCK_TOKENS <= known)
        return any(other.keys[known : known + 1] == missing for other in promised)

    def _fits(self, seq: Sequence) -> bool:
        if not self.running:
            return True  # no request is accepted that does not fit alone
        if len(self.running) >= self.max_sequences:
            return False
        if self._blocks.needs(seq) + self._reserve([*self.running, seq]) > self._blocks.free:
            return False
        return self._blocks.fits_window(seq, [(other, self._expected_tokens(other)) for other in self.running])

    def _expected_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens a running sequence has after the share of its expected output."""
        expected = self.fairness.expected_output(seq.identity, seq.sampling.max_tokens) - seq.emitted
        return len(seq.tokens) + int(self.output_reserve * max(0.0, expected))

    def _reserve(self, seqs: Iterable[Sequence]) -> int:
        """Counts the blocks to keep free for the share of expected output that these have still to write."""
        expected = self.fairness.expected_output
        tokens = sum(max(0.0, expected(seq.identity, seq.sampling.max_tokens) - seq.emitted) for seq in seqs)
        return blocks_for(int(self.output_reserve * tokens))

    def _sequence_to_pause(self, head: LineHead, now_s: float) -> Sequence | None:
        """Returns the sequence to pause for the next request; None where the request must wait.

        If its principal runs nothing, a principal with several sequences loses one. If only its user runs nothing,
        another user of the same principal loses one. The request must have waited FIRST_SEQUENCE_TIMEOUT_S. Orders
        without turns pause nothing, because the paused sequence would be next again.
        """
        if not self._is_fair:
            return None
        principal, user = head.waiter.seq.identity.principal, head.waiter.seq.identity.user
        own = [other for other in self.running if other.identity.principal == principal]
        if own:
            accounts, name, key, among = self.fairness.users(principal), user, head.user_key, own
            held = Counter(other.identity.user for other in own)
        else:
            accounts, name, key, among = self.fairness.principals, principal, head.principal_key, self.running
            held = Counter(other.identity.principal for other in self.running)
        waited_s = now_s - accounts.head_of_line_since(name, head.waiter.seq.arrived_s)
        may = key <= 0.0 and not held[name] and max(held.values()) > 1 and waited_s >= FIRST_SEQUENCE_TIMEOUT_S
        return _newest_of_largest(among) if may else None

    def _would_get_tokens(self, seq: Sequence, tokens: int, now_s: float) -> bool:
        budget = self._chunk_budget.prefill_tokens(sum(other.decoding for other in self.running))
        mine = PrefillWork(seq, tokens)
        others = (other for other in self._prefilling_sequences() if other.missing_expert is None)
        ordered = self._in_order([*(PrefillWork(other, other.uncomputed) for other in others), mine], now_s)
        return sum(waiter.tokens for waiter in ordered[: ordered.index(mine)]) < budget

    def _start_running(self, seq: Sequence, now_s: float) -> None:
        self.waiting.remove(seq)
        self._blocks.open(seq)
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.computed, seq.prompt_tokens)
            self.prefix_tokens["hit"] += seq.computed
            self.prefix_tokens["miss"] += seq.uncomputed
            self.fairness.add_service(seq.identity, seq.uncomputed, 0)
        if self._kv_swap:
            self._kv_swap.restore(seq)
        self.running.append(seq)
        seq.started = True
        self.fairness.note_admission(seq.identity, now_s)
        self._gap_s += 0.1 * (now_s - max(self._admitted_s, seq.arrived_s) - self._gap_s)
        self._admitted_s = now_s
        self.admissions += 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, blocks, users and swapped blocks agree."""
        both = [*self.running, *self.waiting]
        assert len(set(map(id, both))) == len(both)
        assert all(seq.blocks for seq in self.running)
        assert not any(seq.blocks for seq in self.waiting)
        assert len(self.running) <= self.max_sequences
        self._blocks.check_integrity(self.running)
        self.fairness.check_integrity(Counter(seq.identity for seq in both))
        if self._kv_swap:
            self._kv_swap.check_integrity(self.waiting)


def _newest_of_largest(seqs: list[Sequence]) -> Sequence:
    """Returns the newest of these, which come by age, of the principal with the most of them and its user with most."""
    principals = Counter(seq.identity.principal for seq in seqs)
    users = Counter(seq.identity for seq in seqs)

    def rank(item: tuple[int, Sequence]) -> tuple[int, int, int]:
        at, seq = item
        return principals[seq.identity.principal], users[seq.identity], at

    return max(enumerate(seqs), key=rank)[1]

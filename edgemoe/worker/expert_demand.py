"""Tells the front which experts prompts chose, and which ones the next step is expected to load."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from edgemoe.engine.engine import Engine
from edgemoe.engine.sequence import Sequence, blocks_for
from edgemoe.experts.compute.moe import TieredExperts
from edgemoe.ipc.messages import (
    ExpertDemandReport,
    FromEngine,
    PrefixSignatureReply,
    PrefixSignatureRequest,
    PromptSignature,
    Submit,
)
from edgemoe.policy.routing.marginal_union import PromptForecast, StepTimes
from edgemoe.policy.routing.signatures import absence, absent_bytes, shares_of
from edgemoe.ticking import until_tick
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.expert_signatures import MOST_ENDED, EndedRequest, ExpertDemand, ExpertSignature
from edgemoe.types.experts import Tier
from edgemoe.types.step import BLOCK_TOKENS

LOOK_S = 0.25
REPEAT_LOOKS = 8  # after which residency and times are looked at, whether or not anything has come or gone
MOST_WANTED = 1 << 12  # requests whose front wants their signature
IN_PLACE, IN_RAM, AT_PEER, ON_DISK = range(4)
Key = tuple[str, int]  # request and attempt


@dataclass(slots=True, eq=False)
class ChosenExperts:
    """The expert counts of a sequence so far."""

    prompt: IntArray  # counts [L, E]
    answer: IntArray  # of its full blocks [L, E]
    blocks: int  # up to which these go


class ExpertDemandReporter:
    """Owns the expert counts of running sequences. Call `want` and `run` on the event loop."""

    def __init__(
        self, engine: Engine, experts: TieredExperts, post: Callable[[FromEngine], None], ended: bool = False
    ) -> None:
        """Reports the signatures of ended requests too if `ended`."""
        self._engine, self._experts, self._post = engine, experts, post
        geometry = experts.geometry
        self._top_k = geometry.top_k
        self._forecast = PromptForecast(geometry.top_k)
        self._unread = absence(self._forecast.chance(np.zeros((geometry.layers, geometry.experts), np.float32)))
        self._known: dict[Key, FloatArray] = {}  # of prompts that are computed, the log of `expert_union.absence`
        self._tells_ended, self._chosen = ended, dict[Key, ChosenExperts]()
        self._wanted: OrderedDict[Key, bool] = OrderedDict()
        self._times = StepTimes()
        self._said: ExpertDemand | None = None

    def register(self, message: Submit) -> None:
        """Registers a request whose front asks for its prompt's signature."""
        if message.signature:
            self._wanted[message.request.id, message.attempt] = True
            if len(self._wanted) > MOST_WANTED:
                self._wanted.popitem(last=False)

    async def run(self) -> None:
        """Posts signatures and expert demand on change until cancelled."""
        seen: set[Key] = set()
        looks = 0
        while True:
            there = self._there()
            read = {_key(seq) for seq in there if _is_read(seq)}
            looks += 1
            if read != seen or looks >= REPEAT_LOOKS or (read and self._tells_ended):
                seen, looks = read, 0
                for message in await asyncio.to_thread(self._collect_changes, there):
                    self._post(message)
            await asyncio.sleep(until_tick(LOOK_S))

    def _there(self) -> list[Sequence]:
        scheduler = self._engine.scheduler
        return [*scheduler.running, *scheduler.waiting]

    def _collect_changes(self, there: Iterable[Sequence]) -> list[FromEngine]:
        """Returns messages about changes since the last call."""
        answer: list[FromEngine] = []
        union, known = np.zeros_like(self._unread), dict[Key, FloatArray]()
        for seq in there:
            key = _key(seq)
            absent = self._known.get(key)
            if absent is None and _is_read(seq) and (counts := self._counts(seq)).any():
                absent = absence(self._forecast.chance(counts))
                if self._wanted.pop(key, False):
                    answer.append(PromptSignature(request=key[0], attempt=key[1], signature=self._table(counts)))
            union += self._unread if absent is None else absent
            if absent is not None:
                known[key] = absent
        self._known = known
        demand, ended = self._demand_of(union), self._ended(there)
        if ended or demand != self._said:
            self._said = demand
            answer.append(ExpertDemandReport(choices=demand, ended=ended))
        return answer

    def _ended(self, there: Iterable[Sequence]) -> tuple[EndedRequest, ...]:
        """Updates the expert counts of running requests. Returns counts of some that ended since the last call."""
        if not self._tells_ended:
            return ()
        before, self._chosen = self._chosen, {}
        for seq in there:
            one = before.pop(_key(seq), None)
            if _is_read(seq):
                self._chosen[_key(seq)] = self._read_on(seq, one)
        told = (one for one in before.values() if one.prompt.any() and one.answer.any())
        return tuple(EndedRequest(self._table(one.prompt), self._table(one.answer)) for one in islice(told, MOST_ENDED))

    def _read_on(self, seq: Sequence, one: ChosenExperts | None) -> ChosenExperts:
        if one is None:
            one = ChosenExperts(
                self._counts(seq), np.zeros(self._unread.shape, np.int64), blocks_for(seq.prompt_tokens)
            )
        full = max(one.blocks, seq.computed // BLOCK_TOKENS)
        if (counts := self._total(seq, one.blocks, full)).any():
            one.answer += counts
            one.blocks = full
        return one

    def signature_of(self, request: str) -> ExpertSignature | None:
        """Returns the signature of a running request's computed tokens. On the compute thread."""
        seq = next((seq for seq in self._engine.scheduler.running if seq.request.id == request), None)
        return None if seq is None else self._table(self._engine.blocks.signature(seq))

    def _table(self, counts: IntArray) -> ExpertSignature:
        return ExpertSignature(*shares_of(counts, self._top_k))

    def _counts(self, seq: Sequence) -> IntArray:
        """Returns the expert counts of the prompt's whole blocks, or of its only block if it has no whole one."""
        return self._total(seq, 0, max(1, seq.prompt_tokens // BLOCK_TOKENS))

    def _total(self, seq: Sequence, begin: int, end: int) -> IntArray:
        """Returns the summed expert counts of these blocks; zeros if the sequence released them meanwhile."""
        blocks = seq.blocks[begin:end]
        total = self._engine.blocks.total(blocks)
        return total if seq.blocks[begin:end] == blocks else np.zeros_like(total)

    def _demand_of(self, union: FloatArray) -> ExpertDemand:
        totals = self._engine.runner.totals
        self._times.update_totals(*(totals[kind, "decode"] for kind in ("steps", "seconds", "experts")))
        step_s, expert_s = self._times.times()
        return ExpertDemand(absent_bytes(union), self._far().tobytes(), self._far_s(), step_s, expert_s)

    def _far(self) -> npt.NDArray[np.uint8]:
        """Returns the nearest place of each expert [L, E]."""
        residency = self._experts.residency
        in_ram = residency.resident_mask(Tier.RAM)
        far = np.full(in_ram.shape, ON_DISK, np.uint8)
        if (remote := self._experts.remote) is not None:
            every = np.arange(in_ram.shape[1])
            for layer in range(len(far)):
                far[layer, remote.elsewhere(layer, every)] = AT_PEER
        far[in_ram] = IN_RAM if residency.devices else IN_PLACE
        if residency.devices:
            far[residency.resident_mask(Tier.VRAM)] = IN_PLACE
        return far

    def _far_s(self) -> tuple[float, float, float]:
        """Returns the measured cost of reaching an expert in RAM, at a peer and on the disk."""
        experts, remote = self._experts, self._experts.remote
        costs = experts.cpu_experts.costs
        layer = experts.geometry.layers - 1
        disk_s = costs.read_s(layer)
        peer_s = remote.stall_s / remote.experts if remote is not None and remote.experts else disk_s
        return costs.raise_s(layer), peer_s, disk_s


def _key(seq: Sequence) -> Key:
    return seq.request.id, seq.attempt


def _is_read(seq: Sequence) -> bool:
    return seq.computed >= seq.prompt_tokens


WAITING = 64  # questions; of more the front hears that there is nothing


class PrefixSignatures:
    """Owns the questions that wait. One event loop."""

    def __init__(self, engine: Engine, top_k: int, post: Callable[[FromEngine], None]) -> None:
        self._engine, self._top_k, self._post = engine, top_k, post
        self._waiting: asyncio.Queue[PrefixSignatureRequest] = asyncio.Queue(WAITING)

    def ask(self, message: PrefixSignatureRequest) -> None:
        """Queues a question, or answers with no signature if too many wait."""
        if self._waiting.full():
            self._post(PrefixSignatureReply(request=message.request))
        else:
            self._waiting.put_nowait(message)

    async def run(self) -> None:
        """Answers queued questions until cancelled, one at a time."""
        while True:
            message = await self._waiting.get()
            self._post(await asyncio.to_thread(self._reply_to, message))

    def _reply_to(self, message: PrefixSignatureRequest) -> PrefixSignatureReply:
        prompt = message.prompt[: self._engine.limits.context_tokens]
        tokens, counts = self._engine.prefixes.signature(prompt, message.salt)
        found = ExpertSignature(*shares_of(counts, self._top_k)) if tokens else None
        return PrefixSignatureReply(request=message.request, signature=found)

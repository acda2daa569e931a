"""Moves requests from prefill on one engine to decode on another: announces the last chunk, fetches KV blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.cluster.data.kv_fetch import REASONS, CopiedPrefix, KVFetcher
from edgemoe.engine.engine import Engine
from edgemoe.errors import HandOverFailed
from edgemoe.ipc.messages import FetchPrefixKV, FromEngine, LastChunkStarted, PrefixKVFetched, Submit
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.step import EntryKind, StepMeta, StepRouting

log = logging.getLogger(__name__)
AT_ONCE, WAITING = 4, 256  # fetches
MOST_AWAITED = 1 << 14  # requests that fronts wait for
Post = Callable[[FromEngine], None]
SignatureOf = Callable[[str], ExpertSignature | None]


class LastChunkNotifier:
    """Owns the requests whose fronts wait for the end of prefill. `want` and `forget` run on the event loop."""

    def __init__(self) -> None:
        self._post: Post = lambda _message: None
        self._signature_of: SignatureOf = lambda _request: None
        self._wanted: OrderedDict[str, tuple[int, int]] = OrderedDict()  # request -> attempt, last token's position

    def attach(self, post: Post, signature_of: SignatureOf) -> None:
        """Posts messages by `post` from now on, with signatures by `signature_of`."""
        self._post, self._signature_of = post, signature_of

    def register(self, message: Submit) -> None:
        """Registers a request whose front asks for the end of its prefill."""
        if message.hand_over:
            last = len(message.request.prompt) + len(message.emitted) - 1
            self._wanted[message.request.id] = message.attempt, last
            if len(self._wanted) > MOST_AWAITED:
                self._wanted.popitem(last=False)

    def forget(self, request: str, attempt: int) -> None:
        """Forgets an attempt that is cancelled."""
        if self._wanted.get(request, (0, 0))[0] == attempt:
            self._wanted.pop(request, None)

    def on_step_begun(self, meta: StepMeta, _ids: npt.NDArray[np.int16]) -> None:
        """Posts LastChunkStarted for requests whose prefill this step ends.

        Only for those most of whose prompt earlier steps computed; the others follow after the step.
        """
        if self._wanted:
            self._post_ended(meta, 0.5)

    def on_step_ended(self, routing: StepRouting) -> None:
        """Posts LastChunkStarted for the other requests whose prefill this step has ended."""
        if self._wanted:
            self._post_ended(routing.meta, 0.0)

    def _post_ended(self, meta: StepMeta, share: float) -> None:
        ends = meta.positions[np.cumsum(meta.query_lens) - 1]
        for request, tokens, end in zip(meta.requests, meta.query_lens.tolist(), ends.tolist(), strict=True):
            wanted = self._wanted.get(request)
            if wanted is not None and end >= wanted[1] and end + 1 - tokens >= share * (end + 1):
                self._wanted.pop(request, None)
                self._post(LastChunkStarted(request=request, attempt=wanted[0], signature=self._signature_of(request)))


class SharedPrefixes:
    """Implements PrefixSource: the engine's prefix cache, for the event loop."""

    def __init__(self, engine: Engine, model: str) -> None:
        """Serves the prefix cache of the model with that digest."""
        self._engine, self._prefixes = engine, engine.prefixes
        self.encoding = self._prefixes.encoding(model)
        self.entry_bytes, self.needed_windows = self._prefixes.entry_bytes, self._prefixes.needed_windows

    def has(self, key: bytes, kind: EntryKind) -> bool:
        return self._prefixes.has(key, kind)

    def read(self, key: bytes, kind: EntryKind) -> CopiedPrefix | None:
        found = self._prefixes.read(key, kind)
        return None if found is None else CopiedPrefix(*found)

    async def take_in(self, keys: Sequence[bytes], data: npt.NDArray[np.uint8], kind: EntryKind) -> bool:
        return await asyncio.wrap_future(self._engine.loop.ask(lambda: self._prefixes.take_in(keys, data, kind)))


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """A FetchPrefixKV message with its deadline."""

    message: FetchPrefixKV
    ends_s: float  # by which to answer
    scope: asyncio.Timeout | None = None  # in which it is carried out


class PrefixFetches:
    """Carries out FetchPrefixKV messages, a few at a time."""

    def __init__(self, engine: Engine, fetcher: KVFetcher, post: Post) -> None:
        self._engine, self._fetcher, self._post = engine, fetcher, post
        self.trusted: frozenset[str] = frozenset()  # boxes whose blocks serve all requests
        self._clock = asyncio.get_running_loop().time
        self._waiting: asyncio.Queue[PrefixFetch] = asyncio.Queue(WAITING)
        self._wanted: dict[tuple[str, int], PrefixFetch] = {}  # by request and attempt

    def start(self, message: FetchPrefixKV) -> None:
        """Queues a fetch, or refuses it if too many wait."""
        if self._waiting.full():
            self._answer(message, 0, "busy")
            return
        fetch = PrefixFetch(message, self._clock() + message.remaining_ms / 1e3)
        self._wanted[message.request, message.attempt] = fetch
        self._waiting.put_nowait(fetch)

    def cancel(self, request: str, attempt: int) -> None:
        """Ends a fetch without an answer, because its request was cancelled."""
        fetch = self._wanted.pop((request, attempt), None)
        if fetch is not None and fetch.scope is not None:
            fetch.scope.reschedule(self._clock())

    async def run(self) -> None:
        """Fetches prefixes until cancelled, AT_ONCE at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work())

    def metrics(self) -> dict[str, float]:
        """Returns numbers for /metrics by their final names."""
        fetcher = self._fetcher
        return {
            names.KV_FETCHED_BLOCKS: fetcher.blocks,
            names.KV_FETCHED_BYTES: fetcher.bytes,
            names.KV_FETCH_SECONDS: fetcher.seconds,
        } | {named(names.KV_FETCH_FAILURES, reason=reason): fetcher.failures[reason] for reason in REASONS}

    async def _work(self) -> None:
        while True:
            fetch = await self._waiting.get()
            name = fetch.message.request, fetch.message.attempt
            if self._wanted.get(name) is not fetch:
                continue
            blocks, why = 0, ""
            with contextlib.suppress(TimeoutError):  # it was cancelled
                async with asyncio.timeout(None) as fetch.scope:
                    blocks, why = await self._carry_out(fetch)
            if self._wanted.get(name) is fetch:
                del self._wanted[name]
                self._answer(fetch.message, blocks, why)

    async def _carry_out(self, fetch: PrefixFetch) -> tuple[int, str]:
        """Fetches the missing KV blocks. Returns the number now cached and the reason for a shortfall ("" if none)."""
        message, why = fetch.message, ""
        kept: Sequence[bytes] = ()
        try:
            prefixes, prompt = self._engine.prefixes, message.prompt[: self._engine.limits.context_tokens]
            kept = keys = prefixes.keys(prompt, message.salt)
            if message.node not in self.trusted:
                salt = message.private_salt or os.urandom(16)  # a front of an earlier release states none
                kept = prefixes.private_keys(prompt, message.salt, salt)
            await self._fetcher.fetch(message.node, keys, kept, max(0.0, fetch.ends_s - self._clock()))
        except HandOverFailed as failure:
            why = failure.reason
            log.info("a prefix did not come", extra={"peer": message.node, "reason": why, "why": str(failure)})
        except Exception:  # one transfer that is wrong costs that transfer
            why = "failed"
            log.warning("a prefix did not come", extra={"peer": message.node}, exc_info=True)
        prefixes = self._engine.prefixes
        return prefixes.with_window(kept[: prefixes.known(kept)]), why

    def _answer(self, message: FetchPrefixKV, blocks: int, why: str) -> None:
        self._post(PrefixKVFetched(request=message.request, attempt=message.attempt, blocks=blocks, why=why))

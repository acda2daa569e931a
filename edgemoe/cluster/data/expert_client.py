"""Asks peers to compute experts: implements `ExpertPeers` over the calls channel.

The compute thread reads snapshots and posts calls; everything else happens on the engine's event loop. One hop leads
from the compute thread to the loop, and one queue leads back. A call has no task of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from queue import SimpleQueue

import numpy as np

from edgemoe.cluster.data.messages import CallMessage, ExpertCall, ExpertResult, Hello
from edgemoe.cluster.data.peer_estimate import SMALL_BYTES, PeerEstimate
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Buffer
from edgemoe.errors import EdgemoeError, PeerRefused, PeerUnavailable
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.telemetry.unit_time import work_units
from edgemoe.ticking import until_tick
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.model_info import ServedModel
from edgemoe.types.peers import ExpertWork, Offer, RemoteCall

log = logging.getLogger(__name__)
HELLO_S = 1.0  # between hellos to each peer
PROBE_EVERY = 10  # hellos, one of which carries a payload that measures the rate
PROBE_BYTES = 128 << 10

Holdings = Callable[[], tuple[BoolArray, BoolArray]]  # experts [L, E] in memory, and on the disk


class ExpertClient:
    """Calls the peers of this engine. `add` and `remove` run on the loop; `offers`, `fetch_s`, `call` on any thread."""

    def __init__(self, channel: Channel[CallMessage], model: ServedModel, holdings: Holdings, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.peers: dict[str, PeerEstimate] = {}  # replaced as a whole, so that any thread may read it
        self._channel, self._model, self._holdings = channel, model, holdings
        self._loop = asyncio.get_running_loop()
        self._group: asyncio.TaskGroup | None = None
        self._numbers = itertools.count()
        self._say = RateLimitedLog(log)
        channel.on_up, channel.on_down = self._up, self._down

    # --- the compute thread's side --------------------------------------------------------------------------

    def offers(self, layer: int, experts: IntArray) -> Sequence[Offer]:
        """Returns the offers of all reachable peers for experts [n] of a layer."""
        now_s = time.monotonic()
        found = (peer.offer(layer, experts, now_s) for peer in self.peers.values() if peer.reachable)
        return [offer for offer in found if offer is not None]

    def fetch_s(self, layer: int, experts: IntArray, without: Collection[str]) -> FloatArray:
        """Returns seconds to fetch each expert [n] from a peer that is not in `without`; inf where none has it."""
        best, size_bytes = np.full(len(experts), np.inf, np.float32), self._model.geometry.expert_bytes(layer)
        for peer in self.peers.values():
            if peer.reachable and peer.node not in without:
                has = (peer.ram[layer] | peer.disk[layer])[experts]
                best[has] = np.minimum(best[has], peer.latency_s + size_bytes * peer.s_per_byte)
        return best

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        """Sends work to a peer. Puts the call into `answers` when it has a result or an error."""
        call = RemoteCall(node, work, time.monotonic())
        self._loop.call_soon_threadsafe(self._ask, call, *ExpertCall.of(work), answers)
        return call

    # --- the loop's side ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends a hello to every peer each HELLO_S, until cancelled; calls that are made later fail."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for count in itertools.count():
                    for peer in self.peers.values():
                        if self._channel.is_up(peer.node):
                            self._spawn(self._greet(peer, probe=count % PROBE_EVERY == 1))
                    await asyncio.sleep(until_tick(HELLO_S))
        finally:
            self._group = None

    def add(self, node: str, boot: str) -> None:
        """Adds a peer that may now be connected."""
        self.peers = {**self.peers, node: PeerEstimate(node, boot, self._model.geometry)}

    def remove(self, node: str) -> None:
        self.peers = {name: peer for name, peer in self.peers.items() if name != node}

    def heed(self, node: str, heard: bool) -> None:
        """Sets whether the peer's box is heard. While it is not, pending calls fail and no new ones are made."""
        peer = self.peers.get(node)
        if peer is None or peer.heard == heard:
            return
        peer.heard = heard
        if heard and self._channel.is_up(node):
            self._spawn(self._greet(peer, probe=False))
        elif not heard:
            self._channel.give_up(node, f"{node} is not heard")

    def learn(self, node: str, hello: Hello) -> Hello:
        """Takes a peer's hello and returns ours. Raises PeerRefused for another model."""
        ram, disk = hello.holdings(node, self._model)
        if (peer := self.peers.get(node)) is not None:
            peer.ram, peer.disk = ram, disk
            peer.ready = self._channel.is_up(node)
        return Hello.of(self._model, *self._holdings())

    def _up(self, node: str) -> None:
        if (peer := self.peers.get(node)) is not None:
            self._spawn(self._greet(peer, probe=False))

    def _down(self, node: str) -> None:
        if (peer := self.peers.get(node)) is not None:
            peer.ready = peer.silent = False

    async def _greet(self, peer: PeerEstimate, *, probe: bool) -> None:
        """Exchanges one hello, and measures the round trip or, with `probe`, the rate."""
        began_s = time.monotonic()
        payload = [bytes(PROBE_BYTES)] if probe else []
        try:
            hello = Hello.of(self._model, *self._holdings())
            answer = await self._channel.ask(peer.node, hello, payload, timeout_s=self.timeout_s)
            if not isinstance(answer.message, Hello):
                raise PeerRefused(f"{peer.node} answers a hello with a {type(answer.message).__name__}")
            peer.ram, peer.disk = answer.message.holdings(peer.node, self._model)
        except PeerRefused as error:
            if not peer.refused:
                self._say(logging.WARNING, "a peer cannot help", peer.node, why=str(error))
            peer.refused, peer.ready = str(error), False
        except EdgemoeError:
            peer.failed(time.monotonic() - began_s)
        else:
            size = len(hello.ram) + len(hello.disk) + sum(map(len, payload))
            peer.measure_way(size if probe else min(size, SMALL_BYTES), time.monotonic() - began_s)
            peer.ready, peer.silent, peer.refused, peer.heard_s = True, False, "", time.monotonic()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._group is not None:
            self._group.create_task(work)
        else:
            work.close()

    def _ask(
        self, call: RemoteCall, body: ExpertCall, tensors: Sequence[Buffer], answers: SimpleQueue[RemoteCall]
    ) -> None:
        peer, number = self.peers.get(call.node), next(self._numbers)
        if peer is None or self._group is None:
            why = f"{call.node} is no member any more" if peer is None else "the engine is stopping"
            call.error = PeerUnavailable(why)
            answers.put(call)
            return
        absent = peer.absent(call.work)  # counted now: afterwards they are in its memory
        peer.under_way[number] = call

        def done(outcome: Answer[CallMessage] | EdgemoeError) -> None:
            if peer.under_way.pop(number, None) is None:
                return
            try:
                self._end(peer, call, absent, outcome)
            except Exception as error:  # the compute thread must get an answer in any case
                call.error = self._unexpected(call, error)
            answers.put(call)

        try:
            self._channel.post(call.node, body, tensors, timeout_s=self.timeout_s, done=done)
        except EdgemoeError as error:
            done(error)
        except Exception as error:
            done(self._unexpected(call, error))

    def _unexpected(self, call: RemoteCall, error: Exception) -> PeerUnavailable:
        self._say(logging.ERROR, "an expert call went wrong", call.node, exc_info=True)
        return PeerUnavailable(f"the call to {call.node} went wrong: {error!r}")

    def _end(
        self, peer: PeerEstimate, call: RemoteCall, absent: int, outcome: Answer[CallMessage] | EdgemoeError
    ) -> None:
        if isinstance(outcome, Answer):
            sizes = [tensor.nbytes for tensor in outcome.tensors]
            if isinstance(outcome.message, ExpertResult) and sizes == [call.work.hidden.nbytes]:
                call.result = outcome.tensors[0]
                self._measure(peer, call, outcome.message.served_s, absent)
                return
            outcome = PeerRefused(f"{call.node} answered a call with something else")
        call.error = outcome
        self._note_failure(peer, call, outcome)

    def _measure(self, peer: PeerEstimate, call: RemoteCall, served_s: float, absent: int) -> None:
        now_s, before_s, size = time.monotonic(), peer.answered_s, call.work.hidden.nbytes
        took_s = now_s - call.asked_s
        way_s = max(0.0, took_s - served_s)
        peer.heard_s = peer.answered_s = now_s
        peer.silent = False
        peer.calls += 1
        peer.busy_s += took_s
        if before_s <= call.asked_s:
            peer.measure_way(2 * size, way_s)
        else:  # it waited for earlier calls, on the link and at the peer
            served_s = min(served_s, now_s - before_s)
            if size > SMALL_BYTES:
                peer.measure_flow(size, min(way_s / 2, now_s - before_s))
        units = float(work_units(call.work.offsets).sum())
        if absent:
            peer.measure_reads(absent * self._model.geometry.expert_bytes(call.work.layer), units, served_s)
        else:
            peer.measure_work(units, served_s)

    def _note_failure(self, peer: PeerEstimate, call: RemoteCall, error: EdgemoeError) -> None:
        took_s = time.monotonic() - call.asked_s
        peer.failed(took_s)
        late = isinstance(error, PeerUnavailable) and took_s >= 0.9 * self.timeout_s
        peer.silent = late and peer.heard_s < call.asked_s
        self._say(logging.INFO, "expert call failed", call.node, layer=call.work.layer, why=str(error))

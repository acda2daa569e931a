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

from edgemoe.cluster.data.messages import ExpertCall, ExpertCallMessage, ExpertResult, Hello
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import EdgemoeError, PeerRefused, PeerUnavailable
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.telemetry.unit_time import RECENT, UnitTime, work_units
from edgemoe.ticking import until_tick
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ServedModel
from edgemoe.types.peers import ExpertWork, PeerCosts, RemoteCall
from edgemoe.wire.protocol import Buffer

log = logging.getLogger(__name__)
HELLO_S = 1.0  # between hellos to each peer
PROBE_EVERY = 10  # hellos, one of which carries a payload that measures the rate
PROBE_BYTES = 128 << 10

SMALL_BYTES = 16 << 10  # messages up to here measure the round trip, larger ones the rate
FIRST_BYTES_PER_S = 50e6  # assumed until measured
FIRST_UNIT_S = 1e-3
READ_BYTES_PER_S = 1e9  # of a peer's disk, assumed until measured
RECOVERY = 0.6  # weight of a measurement that is much better than the mean: the peer has recovered

Holdings = Callable[[], tuple[BoolArray, BoolArray]]  # experts [L, E] in memory, and on the disk


class PeerEstimate:
    """Holds the estimates of one peer. The event loop writes them; the compute thread reads single fields."""

    def __init__(self, node: str, boot: str, geometry: ExpertGeometry) -> None:
        self.node, self.boot, self._geometry = node, boot, geometry
        self.heard = True  # by our front
        self.ready = False  # it has sent a hello for the same model on the current connection
        self.silent = False  # a call timed out, and nothing was received since it was sent
        self.heard_s = -np.inf  # when its last answer came
        self.answered_s = -np.inf  # to a call
        self.refused = ""  # why it cannot help
        self.cut = False  # its answers were wrong: nothing is asked of it any more
        self.ram: BoolArray = np.zeros((geometry.layers, geometry.experts), np.bool_)  # [L, E] in its memory
        self.disk: BoolArray = np.zeros_like(self.ram)
        self.latency_s, self.s_per_byte = 1e-3, 1 / FIRST_BYTES_PER_S
        self.computing, self.reading = (
            UnitTime(FIRST_UNIT_S),
            UnitTime(1 / READ_BYTES_PER_S),
        )  # per unit of work, per byte
        self.calls, self.failures, self.busy_s = 0, 0, 0.0
        self.under_way: dict[int, RemoteCall] = {}

    @property
    def reachable(self) -> bool:
        """Returns whether the peer may be asked."""
        return self.heard and self.ready and not self.silent and not self.cut

    def is_away_with(self, layer: int, expert: int) -> bool:
        """Returns whether the peer has the expert, cannot be reached, and would be asked once it can be."""
        away = not (self.reachable or self.cut or self.refused)
        return away and bool(self.ram[layer, expert] or self.disk[layer, expert])

    def offer(self, layer: int, wanted: IntArray, now_s: float) -> PeerCosts | None:
        """Returns the peer's offer for the `wanted` experts of the layer; None where it has none of them."""
        ram, disk = self.ram[layer][wanted], self.disk[layer][wanted]
        if not (ram | disk).any():
            return None
        read_s = self._geometry.expert_bytes(layer) * self.reading.at(now_s)
        wait_s = np.where(ram, 0.0, np.where(disk, read_s, np.inf)).astype(np.float32)
        oldest_s = min((call.asked_s for call in list(self.under_way.values())), default=now_s)
        open_s = max(self.latency_s, now_s - oldest_s)
        row_s = 2 * self._geometry.row_bytes * self.s_per_byte
        return PeerCosts(self.node, open_s, row_s, self.computing.at(now_s), wait_s)

    def absent(self, work: ExpertWork) -> int:
        """Counts the work's experts that are not in the peer's memory."""
        return int(np.count_nonzero(~self.ram[work.layer][work.experts]))

    def measure_way(self, size_bytes: int, seconds: float) -> None:
        """Adds a round trip of `size_bytes`, both ways together, without the time that the peer itself spent."""
        if size_bytes <= SMALL_BYTES:
            weight = RECENT if seconds > self.latency_s / 2 else RECOVERY
            self.latency_s += weight * (seconds - self.latency_s)
        else:
            rate = max(0.0, seconds - self.latency_s) / size_bytes
            weight = RECOVERY if 0 < rate < self.s_per_byte / 2 else RECENT  # 0: measures the round trip only
            self.s_per_byte += weight * (max(rate, 1e-11) - self.s_per_byte)

    def measure_flow(self, size_bytes: int, seconds: float) -> None:
        """Adds a transfer of `size_bytes` each way since the last answer, while the link was busy both ways."""
        self.s_per_byte += RECENT * (max(seconds / size_bytes, 1e-11) - self.s_per_byte)

    def measure_work(self, units: float, seconds: float) -> None:
        """Adds the time that the peer reports for computing `units`, with all experts in its memory."""
        self.computing.measure(seconds / units, self.answered_s)

    def measure_reads(self, size_bytes: int, units: float, seconds: float) -> None:
        """Adds a disk read of `size_bytes`: the time that the peer reports, less the expected computing."""
        read_s = seconds - units * self.computing.at(self.answered_s)
        self.reading.measure(max(read_s / size_bytes, 1e-11), self.answered_s)

    def failed(self, seconds: float) -> None:
        """Counts a call without an answer; the link counts as at least that slow."""
        self.failures += 1
        self.latency_s = max(self.latency_s, seconds)


class ExpertClient:
    """Calls the peers of this engine. `add` and `remove` run on the loop; `offers`, `fetch_s`, `call` on any thread."""

    def __init__(
        self, channel: Channel[ExpertCallMessage], model: ServedModel, holdings: Holdings, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self.peers: dict[str, PeerEstimate] = {}  # replaced as a whole, so that any thread may read it
        self._channel, self._model, self._holdings = channel, model, holdings
        self._loop = asyncio.get_running_loop()
        self._group: asyncio.TaskGroup | None = None
        self._numbers = itertools.count()
        self._say = RateLimitedLog(log)
        self.on_answer: Callable[[RemoteCall], None] = lambda _call: None
        channel.on_up, channel.on_down = self._up, self._down

    # --- the compute thread's side --------------------------------------------------------------------------

    def offers(self, layer: int, experts: IntArray) -> Sequence[PeerCosts]:
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

    def holders_away(self, layer: int, expert: int) -> Sequence[str]:
        """Returns the peers that have the expert and cannot be reached at the moment."""
        return [peer.node for peer in self.peers.values() if peer.is_away_with(layer, expert)]

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

    def cut(self, node: str) -> None:
        """Asks nothing of a peer any more; pending calls to it fail."""
        if (peer := self.peers.get(node)) is not None:
            peer.cut = True
            self._channel.give_up(node, f"{node} answers wrongly")

    async def ask_another(self, work: ExpertWork, than: str) -> memoryview | None:
        """Returns the sums of a peer other than `than` that has all the work's experts in memory; None without one."""
        others = [peer for peer in self.peers.values() if peer.reachable and peer.node != than]
        having = [peer for peer in others if not peer.absent(work)]
        if not having:
            return None
        peer = min(having, key=lambda peer: peer.latency_s)
        try:
            answer = await self._channel.ask(peer.node, *ExpertCall.of(work), timeout_s=self.timeout_s)
        except EdgemoeError:
            return None
        sizes = [tensor.nbytes for tensor in answer.tensors]
        return answer.tensors[0] if sizes == [work.hidden.nbytes] else None

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

        def done(outcome: Answer[ExpertCallMessage] | EdgemoeError) -> None:
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
        self, peer: PeerEstimate, call: RemoteCall, absent: int, outcome: Answer[ExpertCallMessage] | EdgemoeError
    ) -> None:
        if isinstance(outcome, Answer):
            sizes = [tensor.nbytes for tensor in outcome.tensors]
            if isinstance(outcome.message, ExpertResult) and sizes == [call.work.hidden.nbytes]:
                call.result = outcome.tensors[0]
                self._measure(peer, call, outcome.message.served_s, absent)
                self.on_answer(call)
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

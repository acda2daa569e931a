"""The rest of a hostile peer on the control channel: it listens, sends beats and shows an engine.

It answers questions with lies and rejects forwarded requests; an engine that kept them silently would seem to hang.
Later it sends tokens of them all the same.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

import msgspec
import zmq

from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.cluster.control.messages import ForwardedEmissions, Welcome
from edgemoe.cluster.rpc import envelope
from edgemoe.cluster.rpc.envelope import Failure
from edgemoe.cluster.rpc.keys import Secret
from edgemoe.errors import WireError
from edgemoe.ipc.messages import Emissions, Submit, decode_to_engine, encode
from edgemoe.types.request import Emission
from edgemoe.wire.protocol import Buffer
from tools.fuzzing.messages import ChannelMessages
from tools.fuzzing.peer import dial, id_of, kind_of

LATE_S = 5.0  # by then the box has read that a request was rejected
CLOSE_S, MEET_S = 10.0, 30.0


class Presence:
    """Owns a thread, which ends with `close`, and counts the box's questions in `asked` by kind."""

    def __init__(
        self, node: str, boot: str, key: Secret, server: bytes, address: str, port: int, lies: ChannelMessages
    ) -> None:
        """Listens at `port`, and connects to `address`, HOST:PORT of the box's channel; `server` is the box's public
        key.
        """
        self.asked: Counter[str] = Counter()
        self._lies = lies
        self._words: Sequence[msgspec.Struct] = ()
        self._turned_away: deque[tuple[float, Submit]] = deque()
        self._context, self._over = zmq.Context(), threading.Event()
        self._ear = self._context.socket(zmq.ROUTER)
        self._ear.set(zmq.LINGER, 0)
        self._ear.set(zmq.CURVE_SERVER, 1)
        self._ear.set(zmq.CURVE_SECRETKEY, key.secret)
        self._ear.bind(f"tcp://127.0.0.1:{port}")
        self._voice = dial(self._context, node, boot, key, server, address)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, words: Sequence[msgspec.Struct]) -> None:
        """Repeats these messages from now on."""
        self._words = words
        self._thread.start()

    def wait_met(self) -> None:
        """Waits until the box has sent its announcement and beats, as to a live peer. Raises TimeoutError."""
        ends_s = time.monotonic() + MEET_S
        while not self.asked.keys() >= {"Announce", "Beat"}:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the box has said nothing to its peer for {MEET_S:g} s but {dict(self.asked)}")
            time.sleep(0.02)

    def close(self) -> None:
        self._over.set()
        self._thread.join(CLOSE_S)
        self._ear.close(0)
        self._voice.close(0)
        self._context.term()

    def _run(self) -> None:
        beat_s = time.monotonic()
        while not self._over.is_set():
            if (now := time.monotonic()) >= beat_s:
                beat_s = now + BEAT_S / 4  # other messages are sent in between
                self._speak(now)
            if self._ear.poll(max(1, int(1000 * (beat_s - time.monotonic())))):
                self._answer(*self._ear.recv_multipart())

    def _speak(self, now: float) -> None:
        for word in self._words:
            self._voice.send_multipart(envelope.seal(word))
        while self._turned_away and now - self._turned_away[0][0] > LATE_S:
            _, late = self._turned_away.popleft()
            items = [
                Emission(request=late.request.id, attempt=late.attempt, index=index, token=7, finish=finish)
                for index, finish in enumerate(("", "", "length"), len(late.emitted))
            ]
            self._voice.send_multipart(envelope.seal(ForwardedEmissions(), [encode(Emissions(items=items))], id=1))
        while self._voice.poll(0):
            self._voice.recv_multipart()

    def _answer(self, identity: bytes, *frames: bytes) -> None:
        kind, asked = kind_of(frames), id_of(frames)
        self.asked[kind] += 1
        if not asked:
            return
        if kind == "Announce":
            answer: Sequence[Buffer] = envelope.seal(Welcome(), id=asked, answer=True)
        elif kind == "Forward":
            self._note(frames)
            answer = envelope.seal(Failure("busy", "not now"), id=asked, answer=True)
        else:
            answer = self._lies.draw(asked)
        self._ear.send_multipart([identity, *answer])

    def _note(self, frames: Sequence[bytes]) -> None:
        try:
            message = decode_to_engine(frames[1])
        except (WireError, IndexError):
            return
        if isinstance(message, Submit):
            self._turned_away.append((time.monotonic(), message))

"""Steps of a model whose layers are divided over boxes: asks the box of a stage, and serves one that asks.

docs/design/stages.md has the messages and failures.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from edgemoe.cluster.data.messages import ExpertCallMessage, OpenStage, StageOpened, StageResult, StageStep
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.errors import EdgemoeError, PeerRefused, PeerUnavailable, StageUnavailable
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.experts import ServedModel
from edgemoe.types.stages import CacheRoom, Stage, StageWork
from edgemoe.wire.protocol import Buffer

log = logging.getLogger(__name__)
RESTARTED = "has started, so that all keys and values are computed again"
GRACE_S = 2.0  # beyond a question's own time, for the event loop


class StageClient:
    """Computes a stage on the box that holds it. `check` and `compute` run on the compute thread, and wait."""

    def __init__(
        self,
        channel: Channel[ExpertCallMessage],
        stage: Stage,
        opens: OpenStage,
        timeouts_s: tuple[float, float],
        restart: Callable[[str, CacheRoom, Callable[[], None]], None],
    ) -> None:
        """Takes the times that an opening and a step may take.

        `restart` is called with this box and its places, and has all sequences computed again in these before the next
        step. Then it calls the function that it is given.
        """
        self.room = CacheRoom()  # as of the last opening
        self.steps, self.failures, self.waited_s = 0, 0, 0.0
        self.stage = stage
        self._channel, self._opens, self._timeouts_s, self._restart = channel, opens, timeouts_s, restart
        self._loop = asyncio.get_running_loop()
        self._opening = 0  # 0: there is none
        self._last = 0  # under which the keys and values there were computed
        self._restarts = False
        self._number = 0
        self._say = RateLimitedLog(log)

    @property
    def is_open(self) -> bool:
        """Returns whether the box answered when it was last asked. From any thread."""
        return self._opening > 0 and not self._restarts

    def check(self) -> None:
        """Opens the stage where it is not open. Raises StageUnavailable."""
        if self._restarts:
            raise self._unavailable(RESTARTED)
        if self._opening:
            return
        message = self._ask(self._opens, (), self._timeouts_s[0]).message
        if not isinstance(message, StageOpened):
            raise self._failed(PeerRefused("it answered with something else"))
        if message.opening == self._last:
            self._opening = self._last
            return
        if self._last:
            log.warning("a stage has started again", extra={"peer": self.stage.node, "layers": str(self.stage)})
        self._restarts, self.room, opening = True, message.room, message.opening
        self._restart(self.stage.node, self.room, lambda: self._adopt(opening))
        raise self._unavailable(RESTARTED)

    def _adopt(self, opening: int) -> None:
        self._restarts, self._opening, self._last = False, opening, opening

    def compute(self, work: StageWork) -> npt.NDArray[np.float32]:
        """Returns the residual [T, H] behind the stage. Raises StageUnavailable."""
        began_s = time.monotonic()
        self._number += 1
        answer = self._ask(*StageStep.of(self._opening, self._number, work), self._timeouts_s[1])
        sizes = [tensor.nbytes for tensor in answer.tensors]
        if not isinstance(answer.message, StageResult) or sizes != [work.hidden.nbytes]:
            raise self._failed(PeerRefused("it answered with something else"))
        self.steps += 1
        self.waited_s += time.monotonic() - began_s
        return np.frombuffer(answer.tensors[0], np.float32).reshape(work.hidden.shape).copy()

    def _ask(self, body: msgspec.Struct, tensors: Sequence[Buffer], timeout_s: float) -> Answer[ExpertCallMessage]:
        """Asks, and waits for the answer. Raises StageUnavailable."""
        outcomes: SimpleQueue[Answer[ExpertCallMessage] | EdgemoeError] = SimpleQueue()
        self._loop.call_soon_threadsafe(self._post, body, tensors, timeout_s, outcomes.put)
        try:
            outcome = outcomes.get(timeout=timeout_s + GRACE_S)
        except Empty:
            outcome = PeerUnavailable(f"it did not answer within {timeout_s:g} s")
        if isinstance(outcome, EdgemoeError):
            raise self._failed(outcome)
        return outcome

    def _post(
        self,
        body: msgspec.Struct,
        tensors: Sequence[Buffer],
        timeout_s: float,
        done: Callable[[Answer[ExpertCallMessage] | EdgemoeError], None],
    ) -> None:
        try:
            self._channel.post(self.stage.node, body, tensors, timeout_s=timeout_s, done=done)
        except EdgemoeError as error:
            done(error)
        except Exception as error:  # the compute thread must get an answer in any case
            log.exception("a stage cannot be asked")
            done(PeerUnavailable(repr(error)))

    def _failed(self, error: EdgemoeError) -> StageUnavailable:
        """Has the stage opened again before the next step. Returns the error to raise."""
        self._opening = 0
        self.failures += 1
        self._say(logging.INFO, "a stage did not answer", self.stage.node, layers=str(self.stage), why=str(error))
        return self._unavailable(f"does not answer: {error}")

    def _unavailable(self, why: str) -> StageUnavailable:
        return StageUnavailable(str(self.stage), self.stage.node, why)


class StageOwner(Protocol):
    """Computes this box's stage for another box."""

    room: CacheRoom

    def open(self, peer: str, boot: str, layers: range) -> int:
        """Returns the number of the opening for an engine. Raises PeerRefused."""

    def start(self, opening: int, number: int, work: StageWork) -> Future[npt.NDArray[np.float32]]:
        """Computes a step on the compute thread. Raises PeerRefused, as its future does."""


class StageServer:
    """Answers the questions of the box with the first stage. Used on the event loop."""

    def __init__(self, model: ServedModel) -> None:
        self._model, self._hidden = model, 0
        self._owner: StageOwner | None = None

    def join(self, owner: StageOwner, hidden: int) -> None:
        """Serves a stage from now on, with residuals of that width."""
        self._owner, self._hidden = owner, hidden

    def open(self, question: Question[ExpertCallMessage], asked: OpenStage) -> Answer[ExpertCallMessage]:
        """Opens the stage for an engine. Raises PeerRefused."""
        if asked.model != self._model.digest:
            raise PeerRefused(f"another model is served here: {self._model.digest[:12]}, not {asked.model[:12]}")
        owner = self._found()
        opening = owner.open(question.peer, question.boot, range(asked.first, asked.after))
        return Answer(StageOpened(opening, *owner.room))

    async def serve(self, question: Question[ExpertCallMessage], asked: StageStep) -> Answer[ExpertCallMessage]:
        """Computes a step. Raises PeerRefused, StoreError."""
        began_s = time.monotonic()
        work = asked.work(question.tensors, self._hidden)
        result = await asyncio.wrap_future(self._found().start(asked.opening, asked.number, work))
        return Answer(StageResult(time.monotonic() - began_s), [result.data.cast("B")])

    def _found(self) -> StageOwner:
        if self._owner is None:
            raise PeerRefused("this box holds no stage for others (cluster.stages)")
        return self._owner

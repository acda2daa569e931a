"""Fuzzes the messages to an engine: a worker with the demo model in float32, and a hostile front.

Messages are valid and invalid submits, reused names, cancels of unknown requests, reloads, peers and plans. Honest
requests must get the same tokens as before, each one must end once, and the engine must not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher

from edgemoe.config.settings import MemorySettings, ModelSettings, Settings
from edgemoe.errors import WireError
from edgemoe.front.engine_process import STOP_S, EngineProcess
from edgemoe.front.main import WORKER
from edgemoe.ipc.engine_socket import IpcServer
from edgemoe.ipc.messages import (
    FRAMING,
    MAGIC,
    TO_ENGINE,
    Cancel,
    Drain,
    Emissions,
    Stop,
    Submit,
    decode_to_engine,
)
from edgemoe.types.request import Emission, Request, Sampling, digest_of
from edgemoe.wire import protocol
from tools.fuzzing.target import GROWTH_MB, rss_mb
from tools.fuzzing.values import Values
from tools.testbed.float32_model import float32_demo

WHATS = ("submit", "cancel", "other")
KINDS: dict[str, tuple[type[Any], ...]] = {
    "submit": (Submit,),
    "cancel": (Cancel,),
    "other": tuple(kind for kind in TO_ENGINE.messages.values() if kind not in (Submit, Cancel, Drain, Stop)),
}  # all but the ones after which an engine accepts no more requests
WEIGHTS = dict(zip(WHATS, (8, 2, 1), strict=True))
MEANT = 0.85  # of the fields below, as a share
AT_ONCE = 48  # hostile requests that have not ended, at most
OTHERS_EVERY = 50  # messages
WARM = 6000  # messages before an engine's memory is measured, of all shapes that it keeps memory for
LARGEST_TIMES = 4  # times that the largest message is sent before
KV_BYTES = 16 << 20
READY_S, ASK_S, LOOK_S = 120.0, 60.0, 2e-3
TOKENS = 6  # of each of the others
VOCAB = 4096
HINTS: dict[str, Sequence[Any]] = {"id": ["r-1", "r-2", "\0warm-up"], "request": ["r-1", "r-2", "zebra"]}
SCHEMA = '{"type":"object","properties":{"a":{"enum":[1,"x"]}},"required":["a"]}'
GRAMMARS = (
    *map(LLMatcher.grammar_from_regex, ("(ab)+", "[0-9]{40}", "(a{90}){90}", r"((a?){30}){30}", "(a|aa)*b", "")),
    LLMatcher.grammar_from_json_schema(SCHEMA),
    LLMatcher.grammar_from_json_schema('{"$ref":"#/x"}'),
    *("", "{", "start: start", 'start: "a" start', 'start: ("a" | "b")*', "[" * 5000),
)
SAMPLING: dict[str, Sequence[Any]] = {
    "max_tokens": [0, 1, 2, 3, 5, 8, 30, 1 << 31],
    "temperature": [0.0, 0.0, 1e-6, 1e-300, 1.0, 2.0, 1e6],
    "top_p": [1.0, 0.0, 1e-300, 0.5, 1 - 1e-16],
    "top_k": [0, 1, 2, VOCAB, 1 << 31],
    "min_p": [0.0, 1.0, 1e-300],
    "repetition_penalty": [1.0, 0.01, 100.0],
    "logit_bias": [{}, {}, {5: -1e6}, {6: 1e6, 0: -1e6}, {VOCAB: 1.0}, dict.fromkeys(range(VOCAB), -1e6)],
    "stop_token_ids": [(), (), (5,), (0, 2), (VOCAB,), tuple(range(VOCAB))],
    "min_tokens": [0, 0, 1, 1 << 31],
    "logprobs": [None, None, 0, 20],
    "prompt_logprobs": [None, None, None, 0, 20],
    "grammar": [None] * 8,
}


def greet(number: int) -> Submit:
    """Builds an honest request."""
    prompt, warm = tuple(range(20 + number, 20 + 9 * (number + 1))), number % 2
    sampling = Sampling(temperature=float(warm), top_p=0.9 if warm else 1.0, max_tokens=TOKENS)
    request = Request(id=f"other-{number}", prompt=prompt, sampling=sampling, seed=number, user=f"u{number}")
    return Submit(request=request, remaining_ms=ASK_S * 1e3)


def frame_of(body: dict[str, Any]) -> bytes:
    """Encodes a message; b"" if it cannot be encoded."""
    try:
        return MAGIC + bytes((FRAMING, *protocol.PROTOCOL_VERSIONS)) + msgspec.msgpack.encode(body)
    except (RecursionError, OverflowError):
        return b""


class Messages:
    """Draws messages; the same seed draws the same ones."""

    def __init__(self, seed: int, what: str = "", names: str = "h-") -> None:
        self._rng = random.Random(seed)
        self._values = Values(self._rng, HINTS)
        self._weights = {what: 1} if what else WEIGHTS
        self._names, self._count = names, 0

    def draw(self) -> dict[str, Any]:
        """Draws the body of a message."""
        (what,) = self._rng.choices([*self._weights], [*self._weights.values()])
        body = self._values.message(self._rng.choice(KINDS[what]))
        if what == "submit" and isinstance(body.get("request"), dict):
            self._mean(body)
        return body

    def largest(self, count: int) -> dict[str, Any]:
        """Returns the largest of the next `count` messages, without consuming them."""
        state = self._rng.getstate(), self._count
        found = max((self.draw() for _ in range(count)), key=lambda body: len(frame_of(body)))
        self._rng.setstate(state[0])
        self._count = state[1]
        return found

    def _mean(self, body: dict[str, Any]) -> None:
        """Makes most submits valid and short."""
        rng, request = self._rng, body["request"]
        self._count += 1
        if rng.random() < 0.8:
            request["id"] = f"{self._names}{self._count}"
        if rng.random() < MEANT:
            request["prompt"] = self._prompt()
            body["emitted"] = rng.choice(([], [], [], [7], [7] * 8, [VOCAB]))
            body.setdefault("attempt", 1)
        if isinstance(sampling := request.get("sampling"), dict):
            sampling |= {name: rng.choice(values) for name, values in SAMPLING.items() if rng.random() < MEANT}
            if rng.random() < 0.1:
                sampling["grammar"] = grammar = rng.choice(GRAMMARS)
                if rng.random() < MEANT:
                    digest = digest_of(grammar)
                    sampling["grammar_trial"] = {"digest": digest, "seconds": 0.1, "bytes": 1 << 20}
        body["remaining_ms"] = rng.choice((0.0, 1.0, 50.0, 500.0, 500.0))

    def _prompt(self) -> list[int]:
        rng = self._rng
        if rng.random() < 0.05:
            return rng.choice(([], [VOCAB], [1 << 31], [9] * 4095, [9] * 5000, [0]))
        first = rng.choice((0, 1, 2)) * 40  # many begin alike
        return [(first + n) % VOCAB for n in range(rng.choice((1, 5, 16, 33, 90)))] + [rng.randrange(VOCAB)]


class Followed:
    """Checks that the engine's emissions keep its promises."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.open: dict[str, int] = {}  # submitted once and readable -> the next index
        self.over: set[str] = set()
        self.tokens: dict[str, list[int]] = {}  # of honest requests, in order of submission

    def submitted(self, frame: bytes) -> None:
        """Records a request whose emissions are checked, if it has a name of its own."""
        with contextlib.suppress(WireError):
            message = decode_to_engine(frame)
            if isinstance(message, Submit) and message.request.id.startswith("h-"):
                self.open[message.request.id] = len(message.emitted)

    def check_emission(self, one: Emission) -> None:
        name = one.request
        if name in self.tokens and one.token is not None:
            self.tokens[name].append(one.token)
        if name in self.over:
            self.wrong.append(f"{name} had ended: {one}"[:300])
        if name in self.open:
            if one.index != self.open[name]:
                self.wrong.append(f"{name}: index {one.index} for {self.open[name]}")
            self.open[name] = one.index + (one.token is not None)
        if one.finish:
            self.ends[f"{one.finish} {one.error_code}".strip()] += 1
            if self.open.pop(name, None) is not None:
                self.over.add(name)


class RawFrontEnd(IpcServer):
    """A front's end that can send any bytes."""

    async def send_frame(self, boot_id: str, frame: bytes) -> None:
        """Sends `frame` without a check."""
        await self._socket.send_multipart([boot_id.encode(), frame])


class Target:
    """A running engine, with a front's end of its wire."""

    def __init__(self, engine: EngineProcess, wire: RawFrontEnd) -> None:
        self.engine, self.wire, self.followed = engine, wire, Followed()

    async def listen(self) -> None:
        async for _, message in self.wire.messages():
            if isinstance(said := self.engine.on_message(message), Emissions):
                for one in said.items:
                    self.followed.check_emission(one)

    async def send(self, body: dict[str, Any]) -> None:
        """Sends a message, well-formed or not."""
        if not (frame := frame_of(body)):
            return
        self.followed.submitted(frame)
        await self.wire.send_frame(self.engine.boot_id, frame)

    async def ask(self) -> list[list[int]]:
        """Submits the honest requests all at once, and returns their tokens."""
        asked = [greet(number) for number in range(4)]
        tokens: dict[str, list[int]] = {one.request.id: [] for one in asked}
        self.followed.tokens = tokens
        for one in asked:
            self.wire.send(self.engine.boot_id, one)
        with contextlib.suppress(TimeoutError):  # a missing token shows in the result
            await self.until(lambda: all(len(got) == TOKENS for got in tokens.values()))
        return list(tokens.values())

    async def until(self, condition: Callable[[], bool], within_s: float = ASK_S) -> None:
        """Waits for the condition. Raises TimeoutError, and RuntimeError if the engine has died meanwhile."""
        async with asyncio.timeout(within_s):
            while not condition():
                if self.engine.process.returncode is not None:
                    raise RuntimeError(f"the engine has died: {self.engine.failed}")
                await asyncio.sleep(LOOK_S)

    async def stop(self) -> int:
        """Stops it and returns its exit status, 0 if its state is consistent."""
        self.wire.send(self.engine.boot_id, Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S * 2):
                await self.engine.process.wait()
        return -1 if self.engine.process.returncode is None else self.engine.process.returncode


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    """Starts an engine, and waits until it is ready. Its log goes to standard error."""
    store = float32_demo(Path(".cache"))
    with tempfile.TemporaryDirectory(prefix="edgemoe-fuzz-") as name:
        settings = Settings(
            model=ModelSettings(path=str(store), name="demo", store_dir=str(store.parent)),
            memory=MemorySettings(kv_bytes=KV_BYTES),
        )
        wire = RawFrontEnd(Path(name) / "run")
        made = Target(await EngineProcess.start(WORKER, settings, wire.address), wire)
        listening = asyncio.ensure_future(made.listen())
        try:
            await made.until(lambda: made.engine.ready is not None, READY_S)
            yield made
        finally:
            listening.cancel()
            made.engine.kill()
            await made.engine.process.wait()
            wire.close()


def fuzz(what: str, count: int, seed: int, warm: int = WARM) -> dict[str, Any]:
    """Sends `count` messages to an engine, after `warm` others. After few of them, growth means nothing."""
    return asyncio.run(_attack(Messages(seed, what), Messages(~seed, what, "h-before-"), count, warm))


async def _warm_up(box: Target, messages: Messages, largest: dict[str, Any], warm: int) -> None:
    """Fills all of the engine's caches, for its malloc returns little memory."""
    if isinstance(request := largest.get("request"), dict):
        largest = {**largest, "request": {**request, "id": "r-1"}}  # a name whose emissions are not checked: it repeats
    for number in range(warm):
        await box.send(largest if number < LARGEST_TIMES else messages.draw())
        await box.until(lambda: len(box.followed.open) <= AT_ONCE)
        if number % OTHERS_EVERY == 0:
            await box.ask()
    await box.until(lambda: not box.followed.open)


async def _attack(messages: Messages, others: Messages, count: int, warm: int) -> dict[str, Any]:
    """Sends `count` messages, with honest requests in between."""
    async with target() as box:
        right, followed, pids = await box.ask(), box.followed, (box.engine.process.pid,)
        others_wrong: list[list[list[int]]] = []
        await _warm_up(box, others, messages.largest(count), warm)
        began_s, early = time.monotonic(), rss_mb(pids)
        for number in range(count):
            await box.send(messages.draw())
            await box.until(lambda: len(followed.open) <= AT_ONCE)
            if number % OTHERS_EVERY == 0 and (got := await box.ask()) != right:
                others_wrong.append(got)
        await box.until(lambda: not followed.open)
        took_s, late = time.monotonic() - began_s, rss_mb(pids)
        seen: dict[str, Any] = {
            "sent": count,
            "a_second": round(count / took_s),
            "ends": dict(followed.ends.most_common()),
            "wrong": followed.wrong[:5],
            "others_wrong": others_wrong[:2],
            "answered_after": await box.ask() == right,
            "unread": box.wire.undecodable,
            "early_mb": early,
            "late_mb": late,
            "grown_mb": round(late - early, 1),
            "exit": await box.stop(),
        }
    well = (
        all(len(got) == TOKENS for got in right) and seen["answered_after"] and not seen["exit"] and not seen["unread"]
    )
    seen["right"] = bool(well and not followed.wrong and not others_wrong)
    seen["ok"] = seen["right"] and seen["grown_mb"] < GROWTH_MB
    return seen

"""An engine process without a model that speaks the real wire. Its tokens are a function of prompt and index.

By default it emits letters drawn by a hash of (prompt, seed, choice, index), up to max_tokens. A `COMMAND` in the
prompt changes that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from edgemoe.config.settings import Settings
from edgemoe.ipc.engine_socket import IpcClient
from edgemoe.ipc.messages import (
    Boot,
    Cancel,
    ChannelsOpened,
    Drain,
    Emissions,
    ExpertDemandReport,
    Failed,
    FetchPrefixKV,
    HeldExperts,
    LastChunkStarted,
    Limits,
    Loading,
    PrefixKVFetched,
    PrefixSignatureReply,
    PrefixSignatureRequest,
    PromptSignature,
    Ready,
    Reload,
    Reloaded,
    SnapshotReply,
    SnapshotRequest,
    Stats,
    Stop,
    Submit,
)
from edgemoe.policy.routing.signatures import shares_of
from edgemoe.telemetry import metrics as names
from edgemoe.types.expert_signatures import EndedRequest, ExpertDemand, ExpertSignature
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import Emission, Request, TokenLogprob
from edgemoe.types.snapshot import IN_RAM, ON_DISK, RequestProgress, ServingSnapshot

STEP_S = float(os.environ.get("SCRIPTED_STEP_S", "0.002"))
IDLE_S = 0.1  # between reports while no request runs
CONTEXT = int(os.environ.get("SCRIPTED_CONTEXT", "4096"))
# The commands in a prompt:
# * SAY{text}END: emits the text and ends
# * FAIL{code}END: ends the request with an error
# * DIE@n: kills the engine when token n is due, on the first attempt only; DIE-ALWAYS on every attempt
# * HANG@n: emits nothing from token n on; REST@n likewise, if another box should go on
# * CRAWL{nodes}END: the engines of these boxes emit a token in CRAWL_S
# * LOSE{nodes}END: the engines of these boxes never answer a fetch of blocks; MISS{nodes}END: they find none
#
# SCRIPTED_TURNS, a JSON file, makes it an agent's model. `turns` has an answer for each number of results of tools in
# the prompt. `otherwise` is the answer to a prompt without tools.
TURNS = os.environ.get("SCRIPTED_TURNS")
CRAWL_S = 0.4
COMMAND = re.compile(r"(SAY|FAIL|LOSE|MISS|CRAWL)\{(.*?)\}END|(DIE|HANG|REST)@(\d+)|(DIE-ALWAYS)", re.S)

CHOICES = ExpertDemand(b"\x80" * 16, bytes(16), (), 0.002, 1e-4)


def signature(request: Request) -> ExpertSignature:
    """Returns the signature of a prompt: the first experts or the last, by the parity of its seed."""
    chosen = [4, 4, 0, 0, 0, 0, 0, 0][:: -1 if request.seed % 2 else 1]
    return ExpertSignature(*shares_of(np.tile(chosen, (2, 1)), 2))


def played(prompt: str) -> str:
    """Returns the answer of an agent's model to the prompt."""
    play = json.loads(Path(TURNS or "").read_text())
    if "# Tools" not in prompt:
        return str(play["otherwise"])
    results = prompt.count("<|im_start|>tool\n")
    return str(play["turns"][min(results, len(play["turns"]) - 1)])


def refusal(submit: Submit) -> Emission:
    """Returns a draining engine's refusal of a request."""
    return Emission(
        request=submit.request.id,
        attempt=submit.attempt,
        index=len(submit.emitted),
        finish="error",
        error="shutting down",
        error_code="engine_unavailable",
    )


@dataclass
class Running:
    submit: Submit
    text: str
    script: list[int] | None
    index: int
    commands: dict[str, str] = field(default_factory=dict)
    due_s: float = 0.0  # of the next token of a request that crawls


class Scripted:
    def __init__(self, boot: Boot) -> None:
        settings = msgspec.convert(boot.settings, Settings)
        self.tokenizer = Tokenizer.from_file(str(Path(settings.model.path) / "tokenizer.json"))
        self.slots, self.queue = settings.engine.max_sequences, settings.engine.max_queue
        self.boot, self.name, self.node = boot, settings.model.name, settings.cluster.node
        self.running: dict[str, Running] = {}
        self.submitted = asyncio.Event()
        self.end = IpcClient(boot.address, boot.boot_id, boot.speaks)

    async def serve(self) -> None:
        if os.environ.get("SCRIPTED_FATAL"):
            self.end.post(Failed(error="CapacityError", message="no room for the experts", fatal=True))
            await self.end.close()
            sys.exit(1)
        self.end.post(Loading(phase="weights", fraction=0.5))
        info = ModelInfo(
            id=self.name,
            family="scripted",
            digest="0",
            context_tokens=CONTEXT,
            vocab=self.tokenizer.get_vocab_size(),
            layers=2,
            experts=8,
            top_k=2,
            dtype="float32",
            expert_bytes=1,
        )
        limits = Limits(context_tokens=CONTEXT, kv_tokens=1 << 20, max_sequences=self.slots, max_queue=self.queue)
        if self.node:
            none = bytes(2)
            self.end.post(ChannelsOpened(calls_port=1, bulk_port=1, model=info))
            self.end.post(HeldExperts(disk=none, ram=none, budget_experts=0))
            self.end.post(ExpertDemandReport(choices=CHOICES))
        self.end.post(Ready(boot_id=self.boot.boot_id, model=info, limits=limits))
        stepping, draining = asyncio.ensure_future(self.step_for_ever()), False
        async for message in self.end.messages():
            if isinstance(message, Stop):
                break
            if isinstance(message, Drain):
                draining = True
            elif isinstance(message, Submit) and draining:
                self.end.post(Emissions(items=[refusal(message)]))
            elif isinstance(message, Submit):
                self.running[message.request.id] = self.accept(message)
                self.submitted.set()
                if message.signature:
                    name, attempt = message.request.id, message.attempt
                    self.end.post(PromptSignature(request=name, attempt=attempt, signature=signature(message.request)))
                if message.hand_over:
                    self.end.post(LastChunkStarted(request=message.request.id, attempt=message.attempt))
            elif isinstance(message, PrefixSignatureRequest):
                self.end.post(PrefixSignatureReply(request=message.request))
            elif isinstance(message, FetchPrefixKV):
                self.pull(message)
            elif isinstance(message, Cancel):
                self.running.pop(message.request, None)
            elif isinstance(message, SnapshotRequest):
                requests = tuple(RequestProgress("decode", 0.0, 1, 1, one.index) for one in self.running.values())
                cells = bytes((ON_DISK, IN_RAM)) * 8
                self.end.post(SnapshotReply(ServingSnapshot(layers=2, experts=8, cells=cells, requests=requests)))
            elif isinstance(message, Reload):
                self.end.post(Reloaded(message="loaded again"))
        stepping.cancel()
        await self.end.close()

    def pull(self, message: FetchPrefixKV) -> None:
        """Answers a fetch: all blocks have come, or the failure that the prompt asks for."""
        commands = self.commands(self.text(message.prompt))
        if self.node not in commands.get("LOSE", ""):
            why = "missing" if self.node in commands.get("MISS", "") else ""
            self.end.post(PrefixKVFetched(request=message.request, attempt=message.attempt, blocks=1, why=why))

    def text(self, prompt: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(prompt), skip_special_tokens=False)

    @staticmethod
    def commands(text: str) -> dict[str, str]:
        return {m[1] or m[3] or m[5]: m[2] or m[4] or "" for m in COMMAND.finditer(text)}

    def accept(self, submit: Submit) -> Running:
        text = self.text(submit.request.prompt)
        commands = self.commands(text)
        said = played(text) if TURNS else commands.get("SAY")
        script = self.tokenizer.encode(said).ids if said is not None else None
        return Running(submit, text, script, len(submit.emitted), commands)

    async def step_for_ever(self) -> None:
        steps = 0
        while True:
            await self.next_step()
            there = dict(self.running)
            items = [item for one in there.values() for item in self.emit(one)]
            if items:
                self.end.post(Emissions(items=items))
            for name in there.keys() - self.running.keys():
                if there[name].submit.signature:
                    table = signature(there[name].submit.request)
                    self.end.post(ExpertDemandReport(choices=CHOICES, ended=(EndedRequest(table, table),)))
            if (steps := steps + 1) % 20 == 0 or not there:
                figures = {
                    "edgemoe_num_requests_running": float(len(self.running)),
                    names.named(names.STEPS, phase="decode"): float(steps),
                    names.named(names.STEP_SECONDS, phase="decode"): steps * STEP_S,
                }
                self.end.post(Stats(values=figures))

    async def next_step(self) -> None:
        """Sleeps for a step; while no request runs, until one comes, at most for the time between two reports."""
        self.submitted.clear()
        if self.running:
            await asyncio.sleep(STEP_S)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.submitted.wait(), IDLE_S)

    def emit(self, one: Running) -> list[Emission]:
        request, attempt, index = one.submit.request, one.submit.attempt, one.index
        fields = {"request": request.id, "attempt": attempt, "index": index}
        if "DIE-ALWAYS" in one.commands or (attempt == 1 and index == int(one.commands.get("DIE", -1))):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == int(one.commands.get("REST" if one.submit.hand_over else "HANG", -1)):
            return []
        if self.node and self.node in one.commands.get("CRAWL", ""):
            if time.monotonic() < one.due_s:
                return []
            one.due_s = time.monotonic() + CRAWL_S
        if "FAIL" in one.commands:
            del self.running[request.id]
            return [Emission(**fields, finish="error", error="scripted", error_code=one.commands["FAIL"])]
        if (one.script is not None and index >= len(one.script)) or index >= request.sampling.max_tokens:
            del self.running[request.id]
            return [Emission(**fields, finish="stop" if index < request.sampling.max_tokens else "length")]
        one.index += 1
        token = self.token(one, index)
        wanted = request.sampling.logprobs
        top = tuple((token + at, -0.5 - at) for at in range(wanted or 0))
        told = () if index or request.sampling.prompt_logprobs is None else self.told(request.prompt)
        logprob = -0.5 if wanted is not None else None
        return [Emission(**fields, token=token, logprob=logprob, top=top, prompt_logprobs=told)]

    @staticmethod
    def told(prompt: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        return tuple((-1.0 - at, ((token, -0.25),)) for at, token in enumerate(prompt[1:]))

    def token(self, one: Running, index: int) -> int:
        if one.script is not None:
            return one.script[index]
        request = one.submit.request
        seed = (request.seed, request.choice) if request.sampling.temperature else ()
        digest = hashlib.sha256(repr((request.prompt, seed, index)).encode()).digest()
        return int(self.tokenizer.token_to_id(chr(ord("a") + digest[0] % 26)))


async def main() -> None:
    await Scripted(msgspec.json.decode(sys.stdin.buffer.read(), type=Boot)).serve()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the front
    if os.getppid() != 1:  # it has died already, before the line above
        asyncio.run(main())

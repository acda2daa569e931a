"""Speculative decoding against none: kinds of text, shares of experts in memory, and batches.

    python -m tools.bench.drafts --store DIR [--rounds 2] [--tokens 96] [--json]

`tools/bench/results/drafts.md` says how to make the store. Each row's logits are replaced to choose the next token of a
given text. Contenders have tiers of their own, and take turns of a few steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgemoe.jit.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np
import torch

from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import EngineSettings
from edgemoe.demo import model_path
from edgemoe.engine.engine import Engine, ServingBudget
from edgemoe.engine.steps import LoadedModel
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.moe import FetchOptions
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.manifest import DENSE, Manifest, spec_of
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import Tier
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.types.step import Batch, StepMeta

ROOT = Path(__file__).parents[2]
CONTEXT, PROMPT_TOKENS = 512, 256
TURN_STEPS = 4  # of one contender, before the other goes on
SHARES, BATCHES = (1.0, 0.5, 0.25), (1, 4)


class Script(NamedTuple):
    """A prompt, the text of its answer, and the text that the request expects."""

    prompt: list[int]
    answer: list[int]
    expected: list[int]


class Texts:
    """Writes prompts and answers of each kind from this repository's files."""

    def __init__(self, tokens: int) -> None:
        self._model, self._tokens, self._random = TextModel(model_path()), tokens, random.Random(0)
        self._code = [path.read_text() for path in sorted((ROOT / "edgemoe").rglob("*.py"))]
        self._prose = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
        self._code = [text for text in self._code if 4000 < len(text) < 9000]
        self._prose = [text for text in self._prose if len(text) > 6000]

    def script(self, kind: str) -> Script:
        """Returns another script of a kind."""
        asked, answer, expected = getattr(self, kind)()
        prompt, said = self._encode(asked)[-PROMPT_TOKENS:], self._encode(answer)[: self._tokens]
        said += [self._random.randrange(4, 4000) for _ in range(self._tokens - len(said))]
        return Script(prompt, said, self._encode(expected)[: self._tokens])

    def code_edit(self) -> tuple[str, str, str]:
        """Makes an answer that repeats the prompt's file with other names."""
        text = self._random.choice(self._code)[600:1200]
        words = sorted(set(re.findall(r"\b[a-z_]{6,}\b", text)))
        edited = text
        for word in self._random.sample(words, 2):
            edited = re.sub(rf"\b{word}\b", word[::-1], edited)
        return text + "\n\nWith other names:\n", edited, ""

    def code_edit_predicted(self) -> tuple[str, str, str]:
        """Makes an edit of a file that is the request's prediction instead of a part of its prompt."""
        text, edited, _ = self.code_edit()
        return "Rewrite the file with other names.\n", edited, text

    def code(self) -> tuple[str, str, str]:
        """Makes the second half of a file follow the first."""
        text = self._random.choice(self._code)
        return text[: len(text) // 2], text[len(text) // 2 :], ""

    def prose(self) -> tuple[str, str, str]:
        text = self._random.choice(self._prose)
        at = self._random.randrange(1500, len(text) - 2000)
        return text[at - 1500 : at], text[at : at + 2000], ""

    def chat(self) -> tuple[str, str, str]:
        """Makes an answer that cites a sentence of the question now and then."""
        asked, answer, _ = self.prose()
        parts = [part for part in asked.split(". ") if 40 < len(part) < 200]
        said = answer[:300] + "".join(f'\n> "{part}"\n{answer[300:420]}' for part in parts[:3]) + answer[420:]
        return "User: " + asked + "\nAssistant: ", said, ""

    def json_records(self) -> tuple[str, str, str]:
        def record() -> str:
            value, pick = self._random.random, self._random.choice
            fields = {"id": int(1e6 * value()), "name": pick(self._code)[40:52], "size": round(100 * value(), 2)}
            return json.dumps(fields | {"kind": pick(["disk", "link", "peer"]), "healthy": value() > 0.3})

        lines = [record() for _ in range(40)]
        return "[" + ",\n".join(lines[:6]) + ",\n", ",\n".join(lines[6:]), ""

    def high_temperature(self) -> tuple[str, str, str]:
        """Makes random tokens follow a text."""
        return self.prose()[0], "", ""

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False) if text else []


KINDS = ("code_edit", "code_edit_predicted", "code", "prose", "chat", "json_records", "high_temperature")


class Scripted:
    """Computes real steps, and makes each row's next token that of its request's script."""

    def __init__(self, decoder: Decoder, experts: Any) -> None:
        self._decoder, self._experts = decoder, experts
        self._meta: StepMeta | None = None
        self.scripts: dict[str, list[int]] = {}

    def begin_step(self, meta: StepMeta) -> Any:
        self._meta = meta
        return self._experts.begin_step(meta)

    def decode(self, batch: Batch, kv: KVCache, experts: Any) -> torch.Tensor:
        logits = self._decoder.forward(batch, kv, self._experts)
        assert self._meta is not None
        names, positions = np.repeat(self._meta.requests, self._meta.query_lens), self._meta.positions
        for row, at in enumerate(batch.logit_rows.tolist()):
            script, place = self.scripts[str(names[at])], int(positions[at]) + 1
            logits[row, script[min(place, len(script) - 1)]] = 1e6
        return logits


class ScriptedDecoder:
    """The decoder's side of `Scripted`."""

    def __init__(self, scripted: Scripted) -> None:
        self.forward = scripted.decode


class ScriptedExperts:
    """The experts' side of `Scripted`."""

    def __init__(self, scripted: Scripted, experts: Any) -> None:
        self.begin_step, self._experts = scripted.begin_step, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class Contender:
    """An engine with tiers of its own, which is driven step by step."""

    def __init__(self, store: Path, kernels: Kernels, decoder: Decoder, share: float, batch: int, drafts: bool) -> None:
        manifest = Manifest.read(store)
        spec, self._stack = spec_of(manifest), contextlib.ExitStack()
        geometry = spec.geometry
        slots = max(geometry.top_k * 2, round(share * geometry.layers * geometry.experts))
        policy = LRU(geometry.layers, geometry.experts)
        reader = self._stack.enter_context(ExpertStore(store, manifest))
        memory, policies = TierMemory(slots * geometry.stride_bytes(0), ()), {Tier.RAM: policy, Tier.VRAM: policy}
        tiers = ExpertTiers(geometry, reader, memory, policies, kernels, fetching=FetchOptions(prefetch=False))
        self._stack.enter_context(_running(tiers))
        while share == 1.0 and not tiers.experts.residency.has_all:
            time.sleep(0.05)
        blocks = batch * CONTEXT // 16 + 8
        self._scripted = Scripted(decoder, tiers.experts)
        cache = KVCache.of(spec, blocks, 0)
        experts = ScriptedExperts(self._scripted, tiers.experts)
        model = LoadedModel(spec, ScriptedDecoder(self._scripted), experts, cache, torch.device("cpu"))
        settings = EngineSettings(max_sequences=batch, prefix_cache=False, drafts="lookup" if drafts else "off")
        self._out: list[Emission] = []
        self.engine = Engine(model, settings, ServingBudget(blocks, CONTEXT), self._out.extend)
        self.decode_s, self.processor_s, self.drafting_s, self.tokens = 0.0, 0.0, 0.0, 0
        if (speculation := self.engine.speculation) is not None:  # its own cost, which noise would hide
            for part in ("add_drafts", "observe"):
                setattr(speculation, part, self._timed(getattr(speculation, part)))

    def _timed(self, part: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            began_s = time.thread_time()
            result = part(argument)
            self.drafting_s += time.thread_time() - began_s
            return result

        return run

    def submit(self, name: str, script: Script) -> None:
        self._scripted.scripts[name] = script.prompt + script.answer
        sampling = Sampling(temperature=0.0, max_tokens=len(script.answer))
        request = Request(
            id=name, prompt=tuple(script.prompt), sampling=sampling, seed=0, expected=tuple(script.expected)
        )
        self.engine.loop.submit(request, (), 1, 1e6)

    def turn(self) -> bool:
        """Runs a few steps. Returns False where there is nothing left to do."""
        totals = self.engine.runner.totals
        for _ in range(TURN_STEPS):
            prefills, began_s, used_s = totals["steps", "prefill"], time.perf_counter(), time.process_time()
            worked = self.engine.loop.step()
            if worked and totals["steps", "prefill"] == prefills:
                self.decode_s += time.perf_counter() - began_s
                self.processor_s += time.process_time() - used_s
                self.tokens += sum(one.token is not None for one in self._out)
            self._out.clear()
            if not worked:
                return False
        return True

    def close(self) -> None:
        self.engine.close()
        self._stack.close()


@contextlib.contextmanager
def _running(tiers: ExpertTiers) -> Iterator[None]:
    """Runs the tiers' readers on a thread of their own."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(tiers.run())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
        tiers.close()


def compare(args: argparse.Namespace, kernels: Kernels, decoder: Decoder, kind: str, share: float, batch: int) -> Any:
    """Returns a line of the table: both contenders' speeds on the same texts."""
    with contextlib.ExitStack() as stack:
        contenders = [Contender(args.store, kernels, decoder, share, batch, drafts) for drafts in (False, True)]
        for one in contenders:
            stack.callback(one.close)
        texts = Texts(args.tokens)
        for number in range(args.rounds):
            scripts = [texts.script(kind) for _ in range(batch)]
            if number == 1:  # the first round warms up
                for one in contenders:
                    one.decode_s, one.processor_s, one.drafting_s, one.tokens = 0.0, 0.0, 0.0, 0
            for one in contenders:
                for at, script in enumerate(scripts):
                    one.submit(f"{number}.{at}", script)
            going = list(contenders)
            while going:
                going = [one for one in (going if number % 2 else going[::-1]) if one.turn()]
        plain, drafted = contenders
        speculation = drafted.engine.speculation
        assert speculation is not None
        return {
            "text": kind,
            "in memory": share,
            "batch": batch,
            "off tokens/s": round(plain.tokens / plain.decode_s, 1),
            "drafts tokens/s": round(drafted.tokens / drafted.decode_s, 1),
            "speed": round(plain.decode_s / plain.tokens / (drafted.decode_s / drafted.tokens), 3),
            "speed by processor time": round(
                plain.processor_s / plain.tokens / (drafted.processor_s / drafted.tokens), 3
            ),
            "drafting, % of processor time": round(100 * drafted.drafting_s / drafted.processor_s, 2),
            "accepted": speculation.accepted,
            "rejected": speculation.rejected,
        }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the lines as a table of Markdown."""
    names = list(lines[0])
    rows = [[str(line[name]) for name in names] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in [names, ["---"] * len(names), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2, help="texts of each kind, after one to warm up; default 2")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer; default 96")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the experts in memory")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="a line of JSON for each line of the table")
    args = parser.parse_args()
    args.rounds += 1
    spec = spec_of(Manifest.read(args.store))
    kernels = Kernels(args.threads, spec.dtype == "bfloat16")
    decoder = Decoder.load(spec, args.store / DENSE, kernels=kernels)
    lines = []
    for share in map(float, args.shares.split(",")):
        for batch in map(int, args.batches.split(",")):
            for kind in args.kinds.split(","):
                lines.append(compare(args, kernels, decoder, kind, share, batch))
                if args.json:
                    print(json.dumps(lines[-1]), flush=True)
    if not args.json:
        print(table(lines))
    kernels.close()


if __name__ == "__main__":
    main()

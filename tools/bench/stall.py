"""Stall per token behind emulated links, by cache policy and forecast, with and without prefetch.

    python -m tools.bench.stall --out stall.json [--scoutgate EXPORT] [--links 2,8,25] [--rounds 10] [--model mid]
    python -m tools.bench.stall --report stall.json [--plot stall.png]

Contenders of a link run in turns on the same prompts; differences are paired by round. results/stall.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from edgemoe.jit.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from edgemoe import demo
from edgemoe.cli.plan.measure import RandomStore, random_decoder
from edgemoe.config.budgets import DeviceBudget
from edgemoe.engine.driver import SequenceDriver
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.moe import FetchOptions
from edgemoe.experts.predict.controller import PredictionController, PredictorFiles
from edgemoe.experts.predict.scoutgate_forecaster import ScoutGateForecaster
from edgemoe.experts.predict.two_tier import TwoTierPolicy
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.manifest import DENSE, Manifest
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from edgemoe.telemetry.metrics import LEARNED_ETA, named
from edgemoe.telemetry.recorder import Recorder
from edgemoe.types.experts import ExpertReader, ServedModel, Tier
from edgemoe.types.step import StepRouting
from tools.bench.make_model import make_config
from tools.bench.stats import interval
from tools.demo_model import corpus

PROMPT, TEMPERATURE, SEED = 16, 0.7, 11


class Contender(NamedTuple):
    """A policy, and the sources of its prefetches."""

    policy: str
    gate: bool = False  # the next layer's own gate
    plans: bool = False  # the controller's plans
    scoutgate: bool = False

    @property
    def prefetch(self) -> bool:
        return self.gate or self.plans


ETAS = [named(LEARNED_ETA, horizon=horizon) for horizon in ("0", "1", "gate")]
CONTENDERS = {
    "lru": Contender("lru"),
    "lru + prefetch": Contender("lru", gate=True),
    "two-tier": Contender("two-tier"),
    "two-tier + prefetch": Contender("two-tier", gate=True, plans=True),
    "two-tier + ScoutGate": Contender("two-tier", gate=True, plans=True, scoutgate=True),
    "learned": Contender("learned"),
    "learned + prefetch": Contender("learned", gate=True, plans=True),
    "recall": Contender("learned", plans=True),
    "recall + ScoutGate": Contender("learned", plans=True, scoutgate=True),
    "learned fusion": Contender("learned", gate=True, plans=True, scoutgate=True),
}
PAIRS = (
    ("lru + prefetch", "lru"),
    ("two-tier + prefetch", "two-tier"),
    ("learned + prefetch", "learned"),
    ("learned", "lru"),
)


MOVES = ("moved", "prefetched", "promoted", "withdrawn", "wasted")


class Model(NamedTuple):
    """Weights, and a text to read or to continue."""

    spec: ModelSpec
    decoder: Decoder
    kernels: Kernels
    store: ExpertReader
    text: list[int]
    reads: bool  # reads the text's tokens, instead of generating
    path: Path | None


@contextlib.contextmanager
def open_model(name: str, threads: int) -> Iterator[Model]:
    tokenizer = Tokenizer.from_file(str(demo.model_path() / "tokenizer.json"))
    documents = [
        text for texts in corpus.gather(SEED, max_chars=80_000, generated=60).documents.values() for text in texts
    ]
    np.random.default_rng(SEED).shuffle(documents)
    text = [token for document in documents for token in tokenizer.encode(document[:2000]).ids]
    with tempfile.TemporaryDirectory() as scratch:
        if name == "demo":
            directory = _in_float32(Path(scratch))
            manifest = Manifest.load(directory)
            spec = spec_from_config(manifest.spec_config)
            kernels = Kernels(threads, False)
            with ExpertStore(directory, manifest) as store:
                yield Model(
                    spec, Decoder.load(spec, directory / DENSE, kernels=kernels), kernels, store, text, False, directory
                )
        else:
            shape = {"layers": 24, "hidden": 384, "heads": 6, "kv_heads": 2, "head_dim": 64, "experts": 64}
            shape |= {"expert_width": 128, "top_k": 8, "vocab": 4096, "context": 4096}
            config = make_config(Namespace(family="qwen3_moe", dtype="float32", tied=False, **shape))
            spec = spec_from_config(config)
            kernels = Kernels(threads, False)
            yield Model(spec, random_decoder(spec, kernels), kernels, RandomStore(spec), text, True, None)
        kernels.close()


def _in_float32(scratch: Path) -> Path:
    """Makes a store of the demo model in float32, whose greedy tokens do not depend on the order of sums."""
    source, target = demo.model_path(), scratch / "model"
    target.mkdir()
    save_file({k: v.float() for k, v in load_file(source / "model.safetensors").items()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "dtype": "float32"}))
    pack(target, scratch / "store")
    return scratch / "store"


class SlowStore:
    """A store that reads at the stated rate of a disk, one expert after the other."""

    def __init__(self, store: ExpertReader, bytes_per_s: float, size_bytes: float) -> None:
        self._store, self._read_s, self._free_s = store, size_bytes / bytes_per_s, 0.0

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._store.expert_bytes(layer, expert)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        self._free_s = end_s = max(self._free_s, time.monotonic()) + self._read_s
        await self._store.read(layer, expert, into)
        await asyncio.sleep(end_s - time.monotonic())


class Runner:
    """One contender's tiers and predictors."""

    def __init__(
        self,
        model: Model,
        contender: Contender,
        link: float,
        args: Namespace,
        state: Path | None,
        *,
        hints: bool = False,
    ) -> None:
        """Builds the tiers. With `hints`, steps report the gates' look-ahead."""
        self.model, self.contender = model, contender
        self.recorder: Recorder | None = None  # of all steps, prompts too
        spec = model.spec
        geometry = spec.geometry
        self.scoutgate = None
        if contender.scoutgate and args.scoutgate and model.path:
            self.scoutgate = ScoutGateForecaster(ServedModel("", geometry), "", model.decoder.embedding)
            self.scoutgate.load(args.scoutgate)
        self.controller = None
        if contender.policy == "learned":
            self.controller = PredictionController(
                geometry.layers, geometry.experts, geometry.top_k, kept=PredictorFiles(state), forecaster=self.scoutgate
            )
            self.controller.wait_idle(120)
        self.rules = TwoTierPolicy(geometry, forecaster=self.scoutgate) if contender.policy == "two-tier" else None
        self.foreseeing = self.controller or self.rules
        policy = self.foreseeing.policy if self.foreseeing else LRU(geometry.layers, geometry.experts)
        self.policy = policy
        total, store = geometry.all_bytes, model.store
        if args.ram < 1:
            store = SlowStore(store, 1e9 * args.disk, args.expert_bytes)
        device = DeviceBudget("emulated", int(total * args.share), link, args.expert_bytes)
        policies = {Tier.VRAM: policy, Tier.RAM: policy}
        self.tiers = ExpertTiers(
            geometry,
            store,
            TierMemory(int(total * args.ram), [device]),
            policies,
            model.kernels,
            fetching=FetchOptions(prefetch=contender.prefetch, keep_hints=contender.gate and hints, cpu_helps=False),
        )
        if not contender.gate:
            self.tiers.experts.lookahead = range(0)
        if self.foreseeing and contender.plans:
            self.foreseeing.attach(self.tiers.residency, self.tiers.loader, spec.geometry)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self.tiers.run())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        while self.tiers.residency.ram.free:
            time.sleep(0.02)

    def _serve(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        self._loop.close()
        self.tiers.close()
        for each in (self.controller, self.scoutgate):
            if each is not None:
                each.close()

    def run(self, number: int, tokens: int) -> dict[str, Any]:
        """Runs one prompt and `tokens` more; returns stall and time per token in milliseconds, and the tokens."""
        model = self.model
        start = number * (PROMPT + tokens) % (len(model.text) - PROMPT - tokens)
        text = model.text[start : start + PROMPT + tokens]
        random = torch.Generator().manual_seed(number)
        said: list[int] = []
        stall_s, began_s, routings = 0.0, 0.0, []
        sequence = SequenceDriver(model.spec, 1, PROMPT + tokens, name=f"{number}.")
        logits, _ = self._step(sequence, text[:PROMPT])
        served = list(self.tiers.residency.served)
        vram = self.tiers.residency.devices[0]
        read, before = self.tiers.residency.ram.usage.moved, vram.usage
        began_s = time.perf_counter()
        for i in range(tokens):
            noise = -torch.log(-torch.log(torch.rand(logits.shape[-1], generator=random)))
            token = int(logits[-1].argmax()) if model.reads else int((logits[-1] / TEMPERATURE + noise).argmax())
            said.append(token)
            fed = text[PROMPT + i] if model.reads else token
            logits, routing = self._step(sequence, [fed])
            stall_s += routing.stall_s
            routings.append(routing)
        took_s = time.perf_counter() - began_s
        hits, *misses = (after - before for after, before in zip(self.tiers.residency.served, served, strict=True))
        return {
            "stall_ms": 1e3 * stall_s / tokens,
            "ms": 1e3 * took_s / tokens,
            "miss": sum(misses) / (hits + sum(misses)),
            "missed": sum(misses),
            "step_ms": 1e3 * sum(routing.step_s for routing in routings) / tokens,
            "read": (self.tiers.residency.ram.usage.moved - read) / tokens,
            **{name: (getattr(vram.usage, name) - getattr(before, name)) / tokens for name in MOVES},
            "tokens": said,
            "routings": routings,
        }

    @torch.inference_mode()
    def _step(self, sequence: SequenceDriver, tokens: list[int]) -> tuple[torch.Tensor, StepRouting]:
        meta, batch = sequence.step([tokens])
        chosen = self.tiers.experts.begin_step(meta)
        for each in (self.scoutgate, self.foreseeing):
            if each is not None:
                each.on_step_begun(meta, chosen)
        logits = self.model.decoder.forward(batch, sequence.cache, self.tiers.experts)
        routing = self.tiers.experts.end_step()
        if self.foreseeing is not None:
            self.foreseeing.observe(routing)
        if self.recorder is not None:
            self.recorder.add(routing)
        if self.scoutgate is not None:
            self.scoutgate.learn(routing)
        return logits, routing

    def teach(self, routings: list[StepRouting]) -> None:
        """Trains the policy on the routings of another contender's steps."""
        for routing in routings:
            for layer, ids in enumerate(routing.ids):
                self.policy.touch(layer, np.unique(ids[-1:]).astype(np.int64))
            if self.controller is not None:
                self.controller.on_step_begun(routing.meta, routing.ids)
                self.controller.observe(replace(routing, step_s=1.0))
                self.controller.wait_idle(10)


def measure(model: Model, args: Namespace, state: Path, link: float, lesson: list[StepRouting]) -> dict[str, Any]:
    """Measures all contenders at one link speed, in turns."""
    states = {
        name: state.with_name(f"{name} at {link:g}") for name in args.contenders
    }  # each learns on in its own file
    for own in states.values():
        shutil.copyfile(state, own)
    runners = {name: Runner(model, CONTENDERS[name], link, args, states[name]) for name in args.contenders}
    rounds: list[dict[str, dict[str, Any]]] = []
    names = list(runners)
    try:
        for runner in runners.values():
            if runner.controller is None:
                runner.teach(lesson)
        gc.collect()
        gc.freeze()
        for number in range(args.unscored + args.rounds):
            turn = number % len(names)
            results = {name: runners[name].run(1000 + number, args.tokens) for name in names[turn:] + names[:turn]}
            for result in results.values():
                del result["routings"]
            tokens = {tuple(result.pop("tokens")) for result in results.values()}
            if number >= args.unscored:
                rounds.append({**results, "different": len(tokens) - 1})  # type: ignore[dict-item]
        etas = {
            name: [round(runner.controller.metrics()[eta], 2) for eta in ETAS] + [runner.controller.predictive.glances]
            for name, runner in runners.items()
            if runner.controller
        }
    finally:
        for runner in runners.values():
            runner.close()
    return {"link": link, "rounds": rounds, "etas": etas}


def learn(model: Model, args: Namespace, state: Path) -> list[StepRouting]:
    """Returns the steps of --warm tokens, which all contenders learn first, and saves the state of `learned` after
    them.
    """
    quick = Runner(model, Contender("lru"), 1e15, Namespace(**{**vars(args), "share": 1.0, "ram": 1.0}), None)
    lesson = [r for number in range(-(-args.warm // args.tokens)) for r in quick.run(number, args.tokens)["routings"]]
    quick.close()
    teacher = Runner(model, Contender("learned"), 1e15, args, state)
    teacher.teach(lesson)
    teacher.close()
    return lesson


def report(out: dict[str, Any]) -> str:
    lines = [f"model {out['model']}, {out['tokens']} tokens a round, compute on {out['threads']} thread(s)"]
    for part in out["links"]:
        rounds = part["rounds"]
        different = sum(r["different"] for r in rounds)
        lines += [f"\n{part['link'] / 1e9:.0f} GB/s, {len(rounds)} rounds, {different} with different tokens", ""]
        lines += [
            "| | stall ms/token | ms/token | misses | moved, read a token | ahead: arrived, demanded, given up "
            "| dropped unused | unused |",
            "|" + "---|" * 8,
        ]
        for name in out["contenders"]:
            of = {key: [r[name][key] for r in rounds] for key in rounds[0][name]}
            mean, half = interval(of["stall_ms"])
            ms, miss, read, moved, prefetched, promoted, withdrawn, wasted = (
                float(np.mean(of[key])) for key in ("ms", "miss", "read", *MOVES)
            )
            begun = prefetched + promoted + withdrawn
            lines.append(
                f"| {name} | {mean:.2f} ± {half:.2f} | {ms:.2f} | {miss:.3f} | {moved:.2f}, {read:.2f} "
                f"| {prefetched:.2f}, {promoted:.2f}, {withdrawn:.2f} | {wasted:.2f} "
                f"| {(withdrawn + wasted) / begun if begun else 0:.0%} |"
            )
        if "lru" in rounds[0]:
            lru_ms = float(np.mean([r["lru"]["ms"] for r in rounds]))
            for name in out["contenders"][1:]:
                stall, whole = (
                    float(np.mean([r[name][key] - r["lru"][key] for r in rounds])) for key in ("stall_ms", "ms")
                )
                lines.append(
                    f"{name} - lru: stall {stall:+.2f}, token {whole:+.2f} ms: {abs(whole - stall) / lru_ms:.1%} apart"
                )
        pairs = [*PAIRS, *((out["contenders"][-1], name) for name in out["contenders"][:-1])]
        for one, other in pairs:
            if one in rounds[0] and other in rounds[0]:
                mean, half = interval([r[one]["stall_ms"] - r[other]["stall_ms"] for r in rounds])
                base = float(np.mean([r[other]["stall_ms"] for r in rounds]))
                lines.append(f"{one} - {other}: {mean:+.2f} ± {half:.2f} ms ({mean / base:+.1%})")
        lines.append(f"etas {part['etas']}")
    return "\n".join(lines)


def plot(out: dict[str, Any], to: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(out["links"]), 3.6), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(out["links"]), squeeze=False)[0], out["links"], strict=True):
        names = out["contenders"]
        stats = [interval([r[name]["stall_ms"] for r in part["rounds"]]) for name in names]
        axes.barh(names, [mean for mean, _ in stats], xerr=[half for _, half in stats])
        axes.invert_yaxis()
        axes.set(title=f"{part['link'] / 1e9:.0f} GB/s", xlabel="stall, ms per token")
    figure.savefig(to, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "mid"), default="demo")
    parser.add_argument("--links", default="2,8,25", help="GB/s")
    parser.add_argument("--expert-bytes", type=float, default=9.44e6)
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that the device holds")
    parser.add_argument("--ram", type=float, default=1.0, help="of the experts that RAM holds")
    parser.add_argument("--disk", type=float, default=1.3, help="GB/s, where RAM does not hold all")
    parser.add_argument("--tokens", type=int, default=100, help="a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--unscored", type=int, default=2, help="rounds before them")
    parser.add_argument("--warm", type=int, default=3000, help="tokens learned from beforehand")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scoutgate", type=Path)
    parser.add_argument("--contenders", type=lambda s: s.split(","), default=list(CONTENDERS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.report:
        out = json.loads(args.report.read_text())
    else:
        torch.set_num_threads(args.threads)
        torch.manual_seed(SEED)
        with open_model(args.model, args.threads) as model, tempfile.TemporaryDirectory() as scratch:
            if model.path is None or not args.scoutgate:
                args.contenders = [name for name in args.contenders if not CONTENDERS[name].scoutgate]
            state = Path(scratch) / "state"
            lesson = learn(model, args, state)
            settings = {k: vars(args)[k] for k in ("model", "expert_bytes", "share", "tokens", "threads", "contenders")}
            out = {**settings, "links": []}
            for link in args.links.split(","):
                out["links"].append(measure(model, args, state, 1e9 * float(link), lesson))
                if args.out:
                    args.out.write_text(json.dumps(out))
    print(report(out))
    if args.plot:
        plot(out, args.plot)


if __name__ == "__main__":
    main()

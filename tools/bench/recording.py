"""The cost of recording: one engine that decodes while it records.

    python -m tools.bench.recording [--blocks 100] [--model STORE]

Every 1,024 steps, or five seconds, a thread writes a block. Steps beside it are compared with the ones just before. The
overhead is their excess and the hand-over, as a share of all steps' time, with a 95 % interval over blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from edgemoe.jit.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np
from rich.console import Console
from rich.progress import Progress

from edgemoe import demo
from edgemoe.config.settings import (
    DeviceSettings,
    EngineSettings,
    MemorySettings,
    ModelSettings,
    RecordSettings,
    Settings,
)
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry.recorder import BlockBuffer, Recorder
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.types.step import StepRouting
from edgemoe.worker import assemble as worker
from tools.bench.stats import interval

COMPLETION_TOKENS = 700  # no divisor of a block, so that prompts begin at varying places in blocks
BEFORE = 3  # steps before the writer, for each step beside it
MOST = 32  # steps beside the writer; steps after its end count as undisturbed
Stretch = tuple[float, float]  # from, to (s)


class Timed(Recorder):
    """Records the times of hand-overs, and of the writer's work."""

    made: Timed

    def __init__(self, *args: Any) -> None:
        self.handed: list[Stretch] = []
        self.decoding: list[bool] = []
        self.worked: list[Stretch] = []
        self.written: list[int] = []  # steps
        Timed.made = self
        super().__init__(*args)

    def add(self, step: StepRouting) -> None:
        began_s = time.perf_counter()
        super().add(step)
        self.handed.append((began_s, time.perf_counter()))
        self.decoding.append(bool(step.meta.decode.all()))

    def _put(self, filled: BlockBuffer) -> None:
        began_s = time.perf_counter()
        super()._put(filled)
        self.written.append(len(filled.requests))
        self.worked.append((began_s, time.perf_counter()))


def decode(assembly: worker.Assembly, emitted: list[Emission], recorder: Timed, blocks: int) -> None:
    """Runs completions one after the other until `blocks` have been written."""
    rng = random.Random(0)
    sampling = Sampling(max_tokens=COMPLETION_TOKENS, temperature=0.0)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("blocks", total=blocks)
        for number in itertools.count():
            prompt = tuple(rng.randrange(3, assembly.model.vocab) for _ in range(16))
            emitted.clear()
            assembly.engine.loop.submit(Request(id=str(number), prompt=prompt, sampling=sampling, seed=0), (), 0, 600.0)
            while not (emitted and emitted[-1].finish):
                assembly.engine.loop.step()
                progress.update(task, completed=len(recorder.worked))
                if len(recorder.worked) > blocks:
                    return


def overheads(recorder: Timed) -> list[float]:
    """Returns each block's share of time that recording took, without steps in which a prompt began."""
    over = np.array([end for _, end in recorder.handed])  # a step ends where the next begins
    steps_s = np.diff(over, prepend=over[0])
    handing_s = np.array([end - began for began, end in recorder.handed])
    prompts = np.flatnonzero(~np.array(recorder.decoding))
    found, past = [], 1
    for (began_s, end_s), written in zip(recorder.worked, recorder.written, strict=False):
        start, (first, last) = past, (int(n) for n in np.searchsorted(over, (began_s, end_s)))
        past = min(last + 1, len(over))
        count = past - first
        low = first - BEFORE * count
        if not 0 < count <= MOST or low < start or np.any((prompts >= low - 1) & (prompts < past)):
            continue
        usual_s = float(steps_s[low:first].mean())
        extra_s = float(steps_s[first:past].sum()) - count * usual_s
        found.append((extra_s + float(handing_s[max(0, first - written) : first].sum())) / (usual_s * written))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100, help="that are written")
    parser.add_argument("--model", type=Path, help="a packed store that fits in memory (default: the demo model)")
    options = parser.parse_args()
    store = options.model or ensure_store(demo.model_path(), Path(".cache/stores"))
    experts_bytes = sum(expert.bytes for layer in Manifest.load(store).layers for expert in layer.experts)
    emitted: list[Emission] = []
    with tempfile.TemporaryDirectory(prefix="edgemoe-recording-") as folder:
        settings = Settings(
            model=ModelSettings(path=str(store)),
            memory=MemorySettings(kv_bytes=64 << 20, ram_bytes=experts_bytes * 9 // 8, headroom_bytes=64 << 20),
            engine=EngineSettings(threads=1, prefix_cache=False),
            device=(DeviceSettings(kind="cpu"),),
            record=RecordSettings(dir=folder),
        )
        vars(worker)["Recorder"] = Timed
        assembly = worker.assemble(settings, emitted.extend, lambda *_: None)
        threading.Thread(target=asyncio.run, args=(assembly.tiers.run(),), daemon=True).start()
        recorder = Timed.made
        decode(assembly, emitted, recorder, options.blocks)
        assembly.close()
    shares = overheads(recorder)
    step_ms = 1e3 * statistics.median(np.diff([end for _, end in recorder.handed]))
    handing_us = 1e6 * statistics.median(end - began for began, end in recorder.handed)
    working_us = (
        1e6 * statistics.median(end - began for began, end in recorder.worked) / statistics.median(recorder.written)
    )
    share, half = (100 * value for value in interval(shares))
    print(f"a step {step_ms:.2f} ms; handing it over {handing_us:.1f} us, writing it {working_us:.0f} us elsewhere")
    middle = 100 * statistics.median(shares)
    print(f"overhead of {len(shares)} blocks: {share:+.2f} % ± {half:.2f}, median {middle:+.2f} %")


if __name__ == "__main__":
    main()

"""Measures how long steps wait for rows of a table that is larger than the memory for them.

    python -m tools.bench.row_tables --work DIR [--cache 16777216] [--rounds 3]

Makes a Gemma 4 of random weights in DIR, with experts and per-layer embeddings, packs it, and runs the engine over it.
Tokens are drawn evenly from the whole vocabulary, so that nearly every row comes from disk; texts repeat their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.config.settings import EngineSettings, MemorySettings, ModelSettings, Settings
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec
from edgemoe.store.manifest import MANIFEST
from edgemoe.store.packer import pack
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.worker.assemble import Assembly, assemble
from tools.bench.make_model import begin_checkpoint, write_shard

LAYERS, PERIOD = 18, 6
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 131072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "global_head_dim": 128,
    "num_experts": 32,
    "top_k_experts": 4,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 131072,
    "sliding_window": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "dtype": "bfloat16",
}
PROMPT_TOKENS, PROMPTS, ANSWER_TOKENS, STD = 2048, 4, 128, 0.02


def make_store(work: Path) -> Path:
    """Returns the packed model, made if it is not there."""
    store, source = work / "store", work / "checkpoint"
    if not (store / MANIFEST).is_file():
        shutil.rmtree(source, ignore_errors=True)
        spec, random = spec_from_config(CONFIG), np.random.default_rng(0)
        for name, group in begin_checkpoint(source, spec, CONFIG, "stacked").items():
            write_shard(source / name, spec, group, STD, random)
        pack(source, store)
        shutil.rmtree(source)
    return store


class EngineRun:
    """An engine in this process, which answers requests of random tokens."""

    def __init__(self, assembly: Assembly, spec: ModelSpec) -> None:
        self.assembly, self._spec, self._random, self._number = assembly, spec, np.random.default_rng(1), 0
        self._open = 0
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def on_emissions(self, emissions: Sequence[Emission]) -> None:
        """Counts ended requests; called on the compute thread."""
        ended = sum(bool(each.finish) for each in emissions)
        self._loop.call_soon_threadsafe(self._note_ended, ended)

    def _note_ended(self, count: int) -> None:
        self._open -= count
        if not self._open:
            self._ended.set()

    async def answer(self, requests: int, prompt_tokens: int, most: int) -> None:
        """Returns when all of these requests, sent at once, have ended."""
        self._open, self._ended = requests, asyncio.Event()
        for _ in range(requests):
            self._number += 1
            tokens = tuple(self._random.integers(1, self._spec.vocab, prompt_tokens).tolist())
            sampling = Sampling(temperature=1.0, max_tokens=most)
            request = Request(id=f"r{self._number}", prompt=tokens, sampling=sampling, seed=self._number)
            self.assembly.engine.loop.submit(request, (), 1, 3600.0, 0.0)
        await self._ended.wait()

    async def measure(self, what: str, requests: int, prompt_tokens: int, most: int) -> None:
        """Prints steps, waits for rows, and the places of rows, of such requests."""
        table, totals = self.assembly.table, self.assembly.engine.runner.totals
        assert table is not None
        before, found, wait_s, read = dict(totals), dict(table.found), table.wait_s, table.read_bytes
        began_s = time.perf_counter()
        await self.answer(requests, prompt_tokens, most)
        took_s = time.perf_counter() - began_s
        steps, step_s = (
            sum(totals[kind, phase] - before[kind, phase] for phase in ("prefill", "decode"))
            for kind in ("steps", "seconds")
        )
        rows = {where: table.found[where] - found[where] for where in found}
        waited_s = table.wait_s - wait_s
        print(
            f"{what}: {steps:.0f} steps of {1e3 * step_s / steps:.1f} ms, {took_s:.1f} s in all; waiting for rows "
            f"{1e3 * waited_s / steps:.3f} ms a step, {waited_s / step_s:.2%}; rows {rows}, "
            f"{(table.read_bytes - read) / 1e6:.0f} MB read",
            flush=True,
        )


async def run(args: argparse.Namespace) -> None:
    """Prints the waits for rows of prompts and of decode steps, round by round."""
    settings = Settings(
        model=ModelSettings(path=str(make_store(args.work)), store_dir=str(args.work / "stores")),
        memory=MemorySettings(row_cache_bytes=args.cache, kv_bytes=512 << 20),
        engine=EngineSettings(prefix_cache=False),
    )
    running: list[EngineRun] = []
    assembly = await asyncio.to_thread(
        assemble, settings, lambda emissions: running[0].on_emissions(emissions), lambda *_: None
    )
    run = EngineRun(assembly, spec_from_config(CONFIG))
    running.append(run)
    table = assembly.table
    assert table is not None
    print(f"a table of {table.table_bytes / 1e6:.0f} MB, {table.slots} of {table.rows} rows in memory", flush=True)
    ended = asyncio.Event()
    loading = asyncio.ensure_future(assembly.tiers.run())
    loop = asyncio.get_running_loop()

    def on_ended(_: BaseException | None) -> None:
        loop.call_soon_threadsafe(ended.set)

    assembly.engine.start(assembly.budgets.threads, on_ended)
    await run.answer(2, 300, 20)  # the experts come into memory
    for _ in range(args.rounds):
        await run.measure(f"{PROMPTS} prompts of {PROMPT_TOKENS}", PROMPTS, PROMPT_TOKENS, 1)
        for batch in (1, 8, 16):
            await run.measure(f"decoding {batch}", batch, 8, ANSWER_TOKENS)
    assembly.engine.loop.stop()
    await ended.wait()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assembly.close()


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, 4 GB")
    parser.add_argument("--cache", type=int, default=16 << 20, help="bytes for rows in memory")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

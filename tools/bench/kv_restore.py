"""Times how long a long prefix takes to come back from the prefix cache on disk.

python -m tools.bench.kv_restore [--tokens 100000] [--token-bytes 16384] [--folder DIR] [--warm] [--touched]

Writes the blocks of a prompt with random keys and values. Restores them into an empty cache, as an engine does after a
restart. Without --warm the files are dropped from the page cache before. With --touched the cache's
memory has been committed before, as it has in an engine that has served for a while.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.prefix_transfer import PrefixTransfer
from edgemoe.families.spec import KVLayout
from edgemoe.ipc.messages import Submit
from edgemoe.model.kv import BlockPool
from edgemoe.types.request import Request, Sampling
from edgemoe.types.step import BLOCK_TOKENS, EntryKind
from edgemoe.worker.disk_prefixes import DiskPrefixes
from edgemoe.worker.prefix_files import PrefixFiles

LAYERS, EXPERTS = 4, 8  # of the counts that lie beside each block


class BetweenSteps:
    """The engine's loop, with nothing to compute."""

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        """Returns the result of the work, which is done at once."""
        done: Future[Any] = Future()
        done.set_result(work())
        return done


def main() -> None:
    """Prints seconds, rate and processor seconds of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--token-bytes", type=int, default=16_384)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--touched", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        asyncio.run(restore(folder, args))
    finally:
        shutil.rmtree(folder)


def prefixes_of(blocks: int, block_bytes: int, *, touched: bool = False) -> PrefixTransfer:
    """Returns an empty prefix cache, its memory committed if `touched`."""
    kv = BlockPool(blocks, block_bytes)
    if touched:
        kv.data.fill_(1)
    return PrefixTransfer(BlockManager(blocks, LAYERS, EXPERTS), None, None, kv, KVLayout((), block_bytes))


async def restore(folder: Path, args: argparse.Namespace) -> None:
    """Saves the blocks once, and restores them into a new cache each round."""
    blocks = args.tokens // BLOCK_TOKENS
    tokens = tuple(np.random.default_rng(0).integers(0, 1000, blocks * BLOCK_TOKENS + 1).tolist())
    prefixes = prefixes_of(blocks, args.token_bytes * BLOCK_TOKENS)
    sizes = prefixes.entry_bytes
    files = PrefixFiles(folder, "bench", 64 << 30, sizes)
    files.open()
    data = np.random.default_rng(1).integers(0, 256, sizes[EntryKind.BLOCK], dtype=np.uint8)
    files.save([(key, EntryKind.BLOCK) for key in prefixes.keys(tokens, b"")], lambda _: data)
    for number in range(args.rounds):
        if not args.warm:
            drop(folder)
        fresh = prefixes_of(blocks, args.token_bytes * BLOCK_TOKENS, touched=args.touched)
        engine: Any = SimpleNamespace(prefixes=fresh, loop=BetweenSteps())
        restored = asyncio.Event()
        disk = DiskPrefixes(engine, files, lambda _, restored=restored: restored.set())  # type: ignore[misc]
        running = asyncio.ensure_future(disk.run())
        await asyncio.sleep(0)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        sampling = Sampling(temperature=0.0, max_tokens=1)
        disk.accept(Submit(request=Request(id="r", prompt=tokens, sampling=sampling, seed=1, salt=b"")))
        await restored.wait()
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        running.cancel()
        await asyncio.wait([running])
        whole = disk.figures.restored_tokens * args.token_bytes
        print(
            f"round {number}: {disk.figures.restored_tokens:,} tokens, {whole / 1e9:.2f} GB in {took_s:.2f} s,"
            f" {whole / took_s / 1e9:.2f} GB/s; {cpu_s:.2f} s of processors, {whole / cpu_s / 1e9:.2f} GB for each"
        )


def drop(folder: Path) -> None:
    """Drops the files from the page cache."""
    for path in folder.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()

"""Predictions of `edgemoe plan` compared with measurements of `edgemoe serve`, on models of random weights.

    python -m tools.bench.plan_accuracy --work /tmp/plan [--json rows.json]

Plan and daemon are measured in turn, by the requests of `edgemoe bench`, and medians of the rounds compared. Random
weights choose experts evenly, so plans use `--routing even`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgemoe.cli.bench import measure
from edgemoe.cli.client import Client
from edgemoe.errors import EdgemoeError

PROMPT, TOKENS, ROUNDS = 128, 32, 5
DEMO = Path(__file__).parents[2] / "edgemoe/demo/model"
EMULATED = ("device.0.kind=emulated", "device.0.link_bytes_per_s=1GB/s")


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration: options of make_model and pack, and settings of plan and serve."""

    name: str
    sizes: tuple[int, int, int, int]  # layers, hidden, experts, width
    packing: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


SMALL, MIDDLE, WIDE = (8, 512, 32, 512), (12, 768, 32, 512), (6, 1024, 16, 1024)
CASES = (
    Case("small, bfloat16", SMALL),
    Case("small, int4", SMALL, ("--experts", "int4")),
    Case("middle, bfloat16", MIDDLE),
    Case("middle, int8", MIDDLE, ("--experts", "int8")),
    Case("wide, int4 and dense int8", WIDE, ("--experts", "int4", "--dense", "int8")),
    Case("middle, bfloat16, half in RAM", MIDDLE, (), ("memory.ram_bytes=450MiB",)),
    Case("wide, bfloat16, a quarter in RAM", WIDE, (), ("memory.ram_bytes=150MiB",)),
    Case("middle, int4, half in RAM", MIDDLE, ("--experts", "int4"), ("memory.ram_bytes=130MiB",)),
    Case("wide, bfloat16, a link of 1 GB/s", WIDE, (), (*EMULATED, "device.0.expert_bytes=300MiB")),
)


def command(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, text=True).stdout


def store_of(case: Case, work: Path) -> Path:
    """Makes the checkpoint and packs it, unless that has been done."""
    label = "-".join(map(str, case.sizes))
    checkpoint, store = work / label, work / f"{label}-{'-'.join(case.packing).replace('--', '') or 'keep'}"
    if not checkpoint.exists():
        named = zip(("--layers", "--hidden", "--experts", "--expert-width"), map(str, case.sizes), strict=True)
        words = [word for pair in named for word in pair]
        more = ("--top-k", "4", "--heads", "8", "--vocab", "8000", "--tokenizer-from", str(DEMO))
        command("tools.bench.make_model", "--out", str(checkpoint), *words, *more)
    if not store.exists():
        command("edgemoe", "pack", str(checkpoint), str(store), *case.packing)
    return store


def sets(case: Case, work: Path) -> list[str]:
    everywhere = (*case.settings, "memory.kv_bytes=64MiB", f"model.store_dir={work}/stores")
    return [word for each in everywhere for word in ("--set", each)]


def planned(case: Case, store: Path, work: Path) -> dict[str, float]:
    asked = ("--prompt", str(PROMPT), "--context", str(PROMPT + TOKENS), "--routing", "even", "--json")
    told: dict[str, Any] = json.loads(command("edgemoe", "plan", str(store), *asked, *sets(case, work)))
    found = told["encodings"][0]
    return {"ttft_s": found["first_token_s"], "tpot_s": 1 / found["tokens_per_s"]}


def served(socket: Path) -> dict[str, float]:
    row = asyncio.run(measure(socket, 1, PROMPT, TOKENS, 8000))
    return {"ttft_s": row.first_token_s, "tpot_s": row.per_output_token_s}


@contextmanager
def daemon(case: Case, store: Path, work: Path) -> Iterator[Path]:
    """Runs a daemon, and yields its socket."""
    socket = work / "socket"
    words = [sys.executable, "-m", "edgemoe", "serve", "--model", str(store), "--socket", str(socket)]
    with (work / "log").open("wb") as log:
        process = subprocess.Popen([*words, *sets(case, work)], stdout=log, stderr=log)
    try:
        with Client(socket) as client:
            while not client.is_ready():
                if process.poll() is not None:
                    raise EdgemoeError(f"the daemon has ended; see {work / 'log'}")
                time.sleep(0.2)
        yield socket
    finally:
        process.terminate()
        process.wait(60)


def compare(case: Case, work: Path) -> dict[str, Any]:
    store = store_of(case, work)
    with daemon(case, store, work) as socket:
        served(socket)
        rounds = [(planned(case, store, work), served(socket)) for _ in range(ROUNDS)]
    row: dict[str, Any] = {"case": case.name, "load": os.getloadavg()[0], "rounds": rounds}
    for key in ("ttft_s", "tpot_s"):
        plan, seen = (statistics.median(each[key] for each in side) for side in zip(*rounds, strict=True))
        row |= {f"{key}_plan": plan, f"{key}_served": seen, f"{key}_error": plan / seen - 1}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and stores")
    parser.add_argument("--json", type=Path, help="where the rows go")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in CASES:
        rows.append(row := compare(case, args.work))
        cells = (f"{1000 * row[key]:.1f}" for key in ("tpot_s_plan", "tpot_s_served", "ttft_s_plan", "ttft_s_served"))
        print("|", " | ".join([case.name, *cells, f"{row['tpot_s_error']:+.0%}", f"{row['ttft_s_error']:+.0%}"]), "|")
        sys.stdout.flush()
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    for key in ("tpot_s_error", "ttft_s_error"):
        errors = [abs(row[key]) for row in rows]
        print(f"{key}: median {statistics.median(errors):.0%}, most {max(errors):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

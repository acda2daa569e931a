"""Measures decoding with everything resident, in several encodings and beside other programs, in interleaved rounds.

    python -m tools.bench.decode --json [--experts bf16,int8,int4] [--dense bf16,int8] [--batches 1,8,16]

`bound_ms` is the time to read a step's bytes once; `speed` is relative to the first contender. `--llama q4_0` adds
llama.cpp, `--llama-bench PATH` a program derived from it, `--implementations` transformers. `--log` keeps every time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from edgemoe.jit.env import WORKER_ENV

ENVIRONMENT = dict(os.environ)  # transformers' process inherits it unchanged
os.environ.update(WORKER_ENV)  # before anything loads torch

import torch  # noqa: E402

from edgemoe.cli.plan.measure import ResidentModel, random_decoder, resident_tiers, with_encodings  # noqa: E402
from edgemoe.families.config import spec_from_config  # noqa: E402
from edgemoe.families.spec import ModelSpec, dense_shapes  # noqa: E402
from edgemoe.jit.compile_target import TARGET  # noqa: E402
from edgemoe.kernels.cpu.runtime import Kernels  # noqa: E402
from edgemoe.store.layout import ENCODING_NAMES, KEEP  # noqa: E402
from tools.bench.llama_bench import LlamaBench  # noqa: E402
from tools.bench.make_model import make_config  # noqa: E402
from tools.bench.oracle import Oracle, spawn  # noqa: E402

CONTEXT = 64  # tokens in the cache before timing starts
PAUSE_S = 0.03  # between contenders: the last one's threads stop spinning
Rival: TypeAlias = "Other | OtherBench"
Pair = tuple[str, str]  # encodings of experts and of dense weights, as asked for


def contenders(args: argparse.Namespace, spec: ModelSpec) -> dict[Pair, ResidentModel]:
    """Builds one contender for each pair of encodings; contenders share experts or dense weights of equal encoding."""
    kernels = Kernels(args.threads, spec.dtype == "bfloat16")

    def model(experts: str, dense: str) -> ModelSpec:
        names = (spec.dtype if each == KEEP else ENCODING_NAMES[each] for each in (experts, dense))
        return with_encodings(spec, *names)

    tiers = {name: resident_tiers(model(name, KEEP), kernels) for name in args.experts.split(",")}
    decoders = {name: random_decoder(model(KEEP, name), kernels) for name in args.dense.split(",")}
    return {
        (experts, dense): ResidentModel(model(experts, dense), kernels, decoder, tier)
        for dense, decoder in decoders.items()
        for experts, tier in tiers.items()
    }


class Other:
    """Another program that decodes."""

    most_sequences = 1 << 10

    def __init__(self, oracle: Oracle, name: str) -> None:
        self._oracle, self._name = oracle, name

    def begin(self, prompt: torch.Tensor) -> None:
        self._oracle.ask(do="begin", implementation=self._name, tokens=prompt.tolist())

    def decode(self, steps: torch.Tensor) -> float:
        return float(self._oracle.ask(do="decode", implementation=self._name, steps=steps.tolist()))

    def prompt(self, prompt: torch.Tensor) -> float:
        return float(self._oracle.ask(do="prompt", implementation=self._name, tokens=prompt.tolist()))


class OtherBench:
    """A `llama-bench` program on the weights of one type."""

    most_sequences = 1

    def __init__(self, program: LlamaBench) -> None:
        self._program = program

    def begin(self, prompt: torch.Tensor) -> None:
        """Does nothing: each measurement is a process of its own."""

    def decode(self, steps: torch.Tensor) -> float:
        return self._program.decode(len(steps))

    def prompt(self, prompt: torch.Tensor) -> float:
        return self._program.prompt(prompt.shape[1])


def others(args: argparse.Namespace, config: dict[str, Any], stack: ExitStack) -> dict[str, Rival]:
    """Starts transformers, llama.cpp and programs derived from it if the options say so."""
    found: dict[str, Rival] = {}
    programs = (("oracle", args.implementations, sys.executable), ("llama", args.llama, args.llama_python))
    for program, names, python in programs:
        if names:
            oracle = spawn(f"tools.bench.{program}", config, args.threads, ENVIRONMENT, python)
            stack.callback(oracle.close)
            found |= {name: Other(oracle, name) for name in names.split(",")}
            if program == "llama" and args.llama_bench:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                for name in names.split(","):
                    path = scratch / f"{name}.gguf"
                    oracle.ask(do="write", implementation=name, path=str(path))
                    found[f"llama-bench {name}"] = OtherBench(LlamaBench(args.llama_bench, path, args.threads))
    return found


def measure(
    args: argparse.Namespace, ours: Mapping[Pair, ResidentModel], rivals: Mapping[str, Rival], batch: int
) -> dict[str, Any]:
    """Measures the time of a step of each contender with `batch` sequences."""
    prompt = torch.randint(0, args.vocab, (batch, CONTEXT))
    taken: dict[Pair, list[tuple[float, float, float]]] = {pair: [] for pair in ours}
    theirs: dict[str, list[float]] = {name: [] for name in rivals}
    for each in ours.values():
        each.begin(batch, CONTEXT + (args.rounds + 1) * args.steps)
        each.feed(prompt)
    for other in rivals.values():
        other.begin(prompt)
    for round_ in range(-1, args.rounds):  # the first one is not counted
        steps = torch.randint(0, args.vocab, (args.steps, batch, 1))
        for pair, each in ours.items():
            time.sleep(PAUSE_S)
            seconds, step_bytes = each.decode(steps)
            taken[pair] += [(seconds, each.stream(int(step_bytes)), step_bytes)] if round_ >= 0 else []
        for name, other in rivals.items():
            if batch > other.most_sequences:
                continue
            time.sleep(PAUSE_S)
            seconds = other.decode(steps)
            theirs[name] += [seconds] if round_ >= 0 else []
    keep_log(args, batch=batch, ours={"/".join(pair): times for pair, times in taken.items()}, others=theirs)
    return report(batch, ours, taken, {name: median(values) * 1e3 for name, values in theirs.items() if values})


def keep_log(args: argparse.Namespace, **measured: Any) -> None:
    """Appends every time measured to the log, as a line of JSON with the load of the machine."""
    if args.log:
        with Path(args.log).open("a") as log:
            print(json.dumps({"time": time.time(), "load": os.getloadavg(), **measured}), file=log)


def report(
    batch: int,
    ours: Mapping[Pair, ResidentModel],
    taken: Mapping[Pair, list[tuple[float, float, float]]],
    theirs: Mapping[str, float],
) -> dict[str, Any]:
    """Reports medians over rounds; ratios are computed within each round."""
    first, found = next(iter(taken.values())), []
    for (experts, dense), rounds in taken.items():
        ms, bound, size = (median(values) for values in zip(*rounds, strict=True))
        found.append(
            {
                "experts": experts,
                "dense": dense,
                "step_mb": round(size / 1e6, 1),
                "bound_ms": round(bound * 1e3, 2),
                "stream_gb_per_s": round(size / bound / 1e9, 1),
                "ms": round(ms * 1e3, 2),
                "of_bound": round(median(a[0] / a[1] for a in rounds), 2),
                "gb_per_s": round(size / ms / 1e9, 1),
                "tokens_per_s": round(batch / ms, 1),
                "speed": round(median(a[0] / b[0] for a, b in zip(first, rounds, strict=True)), 2),
                "bound_speed": round(median(a[2] / b[2] for a, b in zip(first, rounds, strict=True)), 2),
                "overhead_us_per_layer": round((ms - bound) * 1e6 / ours[experts, dense].spec.layers, 1),
            }
        )
    return {"batch": batch, "edgemoe": found, "others_ms": {name: round(value, 2) for name, value in theirs.items()}}


def prompt_operations(spec: ModelSpec) -> int:
    """Returns the operations of a token's products, less attention's own and the head's."""
    geometry = spec.geometry
    expert = sum(math.prod(shape) for shape in (geometry.gate_up_shape, geometry.down_shape))
    layers = [shape for name, shape in dense_shapes(spec).items() if len(shape) == 2 and "layers." in name]
    return 2 * (geometry.layers * spec.router.top_k * expert + sum(math.prod(shape) for shape in layers))


def measure_prompts(
    args: argparse.Namespace, ours: Mapping[Pair, ResidentModel], rivals: Mapping[str, Rival]
) -> dict[str, Any]:
    """Measures the milliseconds of a prompt for each contender alone, and its speed relative to the first."""
    taken: dict[Pair, list[float]] = {pair: [] for pair in ours}
    theirs: dict[str, list[float]] = {name: [] for name in rivals if name not in args.implementations.split(",")}
    for round_ in range(-1, args.rounds):
        prompt = torch.randint(0, args.vocab, (1, args.prompt_tokens))
        for pair, each in ours.items():
            time.sleep(PAUSE_S)
            each.begin(1, args.prompt_tokens)
            seconds = timed(partial(each.feed, prompt))
            taken[pair] += [seconds] if round_ >= 0 else []
        for name in theirs:
            time.sleep(PAUSE_S)
            seconds = rivals[name].prompt(prompt)
            theirs[name] += [seconds] if round_ >= 0 else []
    keep_log(
        args, prompt=args.prompt_tokens, ours={"/".join(pair): each for pair, each in taken.items()}, others=theirs
    )
    first = next(iter(taken.values()))
    found = [
        {
            "experts": experts,
            "dense": dense,
            "ms": round(median(values) * 1e3, 1),
            "tera_operations_per_s_and_core": round(
                args.prompt_tokens
                * prompt_operations(ours[experts, dense].spec)
                / median(values)
                / args.threads
                / 1e12,
                3,
            ),
            "speed": round(median(a / b for a, b in zip(first, values, strict=True)), 2),
        }
        for (experts, dense), values in taken.items()
    ]
    others_ms = {name: round(median(values) * 1e3, 1) for name, values in theirs.items()}
    return {"tokens": args.prompt_tokens, "edgemoe": found, "others_ms": others_ms}


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "layers": 16,
        "hidden": 1024,
        "heads": 16,
        "kv-heads": 4,
        "head-dim": 64,
        "expert-count": 64,
        "expert-width": 512,
        "top-k": 8,
        "vocab": 32000,
        "context": 40960,
        "rounds": 7,
        "steps": 8,
        "prompt-tokens": 0,
        "threads": len(os.sched_getaffinity(0)),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--family", choices=["qwen3_moe", "mixtral"], default="qwen3_moe")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--experts", default=KEEP, help=f"encodings, of {', '.join(ENCODING_NAMES)}; default {KEEP}")
    parser.add_argument("--dense", default=KEEP, help="the same for dense weights")
    parser.add_argument("--batches", default="1,8,16", help="numbers of sequences decoded at once")
    parser.add_argument("--implementations", default="eager,grouped_mm,batched_mm", help="of transformers' experts")
    parser.add_argument("--llama", default="", help="types of llama.cpp's weights, such as bf16,q8_0,q4_0")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter with llama-cpp-python and gguf")
    parser.add_argument("--llama-bench", default="", help="path of a llama-bench program, with its options")
    parser.add_argument("--log", default="", help="a file that every time measured is appended to")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = make_config(argparse.Namespace(**{**vars(args), "experts": args.expert_count}))
    result: dict[str, Any] = {
        "machine": f"{TARGET.name}, load {os.getloadavg()[0]:.1f}, {args.threads} threads, torch {torch.__version__}",
        "decode": [],
    }
    with ExitStack() as stack:
        rivals = others(args, config, stack)
        ours = contenders(args, spec_from_config(config))
        for batch in map(int, args.batches.split(",")):
            result["decode"].append(measure(args, ours, rivals, batch))
            if not args.json:
                print(json.dumps(result["decode"][-1], indent=2), flush=True)
        if args.prompt_tokens:
            result["prompt"] = measure_prompts(args, ours, rivals)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

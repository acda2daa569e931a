"""The first answers of a fresh install: the gap closed by a predictor that has seen nothing, and its first weights.

    python -m tools.research.cache.first_answers measure TRACES [--kinds NAME,...] [--tokens 150] [--weights FILE]
    python -m tools.research.cache.first_answers train TRACES --kinds NAME,... --out FILE

An install gets the first half of a request as its prompt and decodes the rest. Further requests follow, up to
`--tokens` decoded tokens. results/first_answers.md describes the runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.experts.predict.next_use import link_predictor
from edgemoe.experts.predict.online_mlp import FEATURES, FLAT, HIDDEN
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.replay.bound import ByteBelady
from edgemoe.replay.replay_policies import MAKERS as SERVED
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.replay.trace import Ids, Trace, TraceStep, load
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import CachePolicy, ExpertGeometry
from edgemoe.types.step import StepMeta
from tools.research.cache.cache_gap import KINDS, MODELS, SHARES, YARDSTICKS
from tools.research.cache.replay import MAKERS

MOST_PROMPT, FEWEST_DECODED = 400, 10  # tokens
INSTALLS = 6  # of a kind that are measured
EPOCHS, BATCH, RATE = 6, 1024, 3e-3  # first_weights.json is of the same training with other draws
TRAINED_TOKENS = 200, 1500  # of the installs whose examples are learned


class Answer(NamedTuple):
    """A request's routing [T, L, k], of which the first tokens are its prompt."""

    ids: Ids
    prompt: int


def installs(traces: Path, kind: str, tokens: int, seed: int) -> tuple[list[list[Answer]], int]:
    """Returns the answers of each install of a kind, and the number of experts."""
    folder, name = KINDS[kind]
    files = {each: traces / folder / f"{each}.ids.csv.gz" for each in MODELS[folder]}
    requests, experts = load([files[name]]).requests, load([*files.values()]).experts
    found: list[list[Answer]] = [[]]
    for i in np.random.default_rng(seed).permutation(len(requests)).tolist():
        answer = Answer(requests[i], min(len(requests[i]) // 2, MOST_PROMPT))
        if len(answer.ids) - answer.prompt >= FEWEST_DECODED:
            found[-1].append(answer)
            if sum(len(ids) - prompt for ids, prompt in found[-1]) >= tokens:
                found.append([])
    return found[:-1], experts


def steps_of(install: list[Answer], tokens: int) -> Iterator[ReplayedStep]:
    """Yields each prompt in one step, and its decoded tokens, `tokens` in all."""
    for name, (ids, prompt) in enumerate(install):
        none, lengths = np.zeros(prompt, np.int64), np.array([prompt])
        meta = StepMeta((str(name),), lengths, np.zeros(1, np.bool_), none, none)
        yield ReplayedStep(meta, ids[:prompt].swapaxes(0, 1))
        for token in ids[prompt : prompt + tokens]:
            yield ReplayedStep.of(TraceStep((name,), token[None]))
        tokens -= len(ids[prompt : prompt + tokens])


def decoded(install: list[Answer], experts: int, tokens: int) -> Trace:
    """Returns the decoded tokens alone, for a policy that knows the future."""
    ids = np.concatenate([ids[prompt:] for ids, prompt in install])[:tokens]
    return Trace([ids], experts)


def missed(install: list[Answer], experts: int, tokens: int, policy: CachePolicy) -> npt.NDArray[np.float64]:
    """Returns the misses at each share of the experts."""
    layers, top_k = install[0].ids.shape[1:]
    geometry = ExpertGeometry(layers, experts, top_k, 1, 1, "float32")
    replay = Replay(policy, geometry)
    replay.bounds = [ByteBelady(geometry, round(share * geometry.count) * geometry.largest_bytes) for share in SHARES]
    for step in steps_of(install, tokens):
        replay.step(step)
    return np.array([bound.counts.misses for bound in replay.bounds], np.float64)


def started(trace: Trace, weights: FloatArray | None) -> LearnedPolicy:
    """Returns the policy with these first weights, or its own."""
    policy = LearnedPolicy(trace.layers, trace.experts, trace.top_k)
    if weights is not None:
        policy.predictor.learner.restore(weights)
    return policy


def measure(args: argparse.Namespace, weights: FloatArray | None) -> None:
    """Prints the closed share of each kind."""
    found = []
    for kind in args.kinds:
        those, experts = installs(args.traces, kind, args.tokens, args.seed)
        sums = {name: np.zeros(len(SHARES)) for name in (*YARDSTICKS, "learned")}
        for install in those[:INSTALLS]:
            trace = decoded(install, experts, args.tokens)
            for name in YARDSTICKS:
                sums[name] += missed(install, experts, args.tokens, (SERVED | MAKERS)[name](trace, 1))
            sums["learned"] += missed(install, experts, args.tokens, started(trace, weights))
        best = np.min([sums[name] for name in YARDSTICKS[:-1]], axis=0)
        found.append((best - sums["learned"]) / (best - sums["belady"]))
        print(f"{kind:22s} {found[-1][0]:.3f} / {found[-1][1]:.3f}", flush=True)
    print(f"mean of {len(found)} kinds: {np.mean(found):.3f}")


def examples(args: argparse.Namespace, kind: str, tokens: int) -> tuple[FloatArray, FloatArray]:
    """Returns features [N, F] and targets [N] that the learner of each install noted."""
    those, experts = installs(args.traces, kind, tokens, args.seed)
    inputs, targets = [], []
    for install in those:
        policy = started(decoded(install, experts, tokens), None)
        missed(install, experts, tokens, policy)
        noted = policy.predictor.learner.examples()
        inputs.append(noted[0])
        targets.append(noted[1])
    return np.concatenate(inputs), np.concatenate(targets)


def train(args: argparse.Namespace) -> None:
    """Trains the network on the examples of all kinds alike, and writes it."""
    import torch

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    sets = [
        tuple(map(torch.from_numpy, examples(args, kind, tokens))) for kind in args.kinds for tokens in TRAINED_TOKENS
    ]
    inner = torch.randn(HIDDEN, FEATURES) * FEATURES**-0.5
    parts = [inner, torch.zeros(HIDDEN), torch.randn(HIDDEN) * 0.05, torch.zeros(FEATURES)]
    for part in parts:
        part.requires_grad_()
    optimizer = torch.optim.Adam(parts, lr=RATE)
    count = EPOCHS * max(len(targets) for _, targets in sets) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count)
    for _ in range(count):
        loss = torch.zeros(())
        for inputs, targets in sets:
            rows = torch.randint(len(targets), (BATCH,))
            x = inputs[rows]
            out = x @ parts[3] + torch.relu(x @ parts[0].T + parts[1]) @ parts[2]
            loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(out, targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    weights = np.concatenate([part.detach().numpy().ravel() for part in parts])
    rounded = [round(float(each), 4) for each in weights]
    args.out.write_text(json.dumps({"kinds": args.kinds, "weights": rounded}) + "\n")
    print(f"{len(sets)} sets, last loss {loss.item() / len(sets):.4f} nats: {args.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("measure", "train"))
    parser.add_argument("traces", type=Path)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*KINDS], help=", ".join(KINDS))
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--weights", type=Path, help="measure with these first weights")
    parser.add_argument("--out", type=Path, help="where to write first weights")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="of compiled code")
    args = parser.parse_args()
    link_predictor(args.cache)
    if args.mode == "train":
        train(args)
        return
    weights = np.array(json.loads(args.weights.read_text())["weights"], np.float32) if args.weights else None
    assert weights is None or weights.shape == (FLAT,)
    measure(args, weights)


if __name__ == "__main__":
    main()

"""Processor time per token of all forecasters, for one sequence with room for a quarter of the experts.

    python -m tools.research.cache.foresight_cost [--tokens 300]

Parts, each by its own thread's time: the predictor, planning and fusion, gates' hints, ScoutGate. Routes are simulated:
a token keeps a third of the last one's experts, hints are three quarters right; ScoutGate is untrained.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from edgemoe.jit.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import numpy as np
import torch

from edgemoe.experts.compute.moe import PrefetchRequester
from edgemoe.experts.predict.controller import LearnedRanks
from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.experts.predict.scoutgate_forecaster import ScoutGateForecaster
from edgemoe.experts.predict.scoutgate_model import ScoutGate, ScoutGateShape, write_export
from edgemoe.model.dense_weights import DenseMatrix
from edgemoe.policy.cache_ranks import LRU
from edgemoe.replay.box import BoxSpec, ReplayBox
from edgemoe.types.arrays import FloatArray
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import ExpertGeometry, ServedModel
from edgemoe.types.step import StepMeta, StepRouting
from tools.research.cache.controller_cost import SHAPES, fill

UNSCORED = 100  # tokens
KEPT = 0.33  # share of a token's experts that the next one needs
RIGHT = 0.75  # share of a hint's first k experts that the gate then chooses
VOCAB, HIDDEN = 8192, 2048
BOX = BoxSpec(0.35e-3, 9_440_000, 8e9, 3e9, 1.0, prefetch=True, between_s=2e-3)


class Spent:
    """Sums processor time of the calling thread by names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts = False

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a call so that its time is counted."""

        def measured(*args: Any) -> Any:
            began_s = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds[name] += (time.thread_time() - began_s) * self.counts

        return measured


def meta(token: int) -> StepMeta:
    """Builds a step in which one sequence decodes its next token."""
    return StepMeta(("a",), np.ones(1, np.int64), np.ones(1, np.bool_), np.array([token % VOCAB]), np.array([token]))


def routes(shape: tuple[int, int, int], tokens: int) -> tuple[np.ndarray, FloatArray]:
    """Draws choices [tokens, L, k], and hints of each a layer early [tokens, L, E]."""
    layers, experts, top_k = shape
    random = np.random.default_rng(0)
    favour, ids = 1 / np.arange(1, experts + 1), np.zeros((tokens, layers, top_k), np.int16)
    said = np.zeros((tokens, layers, experts), np.float32)
    for token in range(tokens):
        liking = np.log(random.random((layers, experts))) / favour
        if token:
            stays = random.random((layers, top_k)) < KEPT
            liking[np.nonzero(stays)[0], ids[token - 1][stays]] = 1
        ids[token] = np.argsort(liking, axis=1)[:, -top_k:]
        scores = random.random((layers, experts))
        sure = random.random((layers, top_k)) < RIGHT
        np.put_along_axis(scores, ids[token].astype(np.int64), np.where(sure, 3.0, 0.5), axis=1)
        said[token] = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return ids, said


def serve(shape: tuple[int, int, int], tokens: int) -> dict[str, float]:
    """Measures seconds per token of the predictor, of planning and fusion, and of hints."""
    layers, experts, top_k = shape
    geometry = ExpertGeometry(layers, experts, top_k, 1, 1, "float32", layer_bytes=(BOX.expert_bytes,) * layers)
    spent, policy = Spent(), LearnedPolicy(layers, experts, top_k)
    foresight, predictor = policy.predictive, policy.predictor
    ranks = LearnedRanks(foresight, LRU(layers, experts))
    fill(predictor)
    for name, where in (("begin", "follow"), ("update_ranks", "follow"), ("work", "beside")):
        setattr(predictor, name, spent.timed(where, getattr(predictor, name)))
    work = spent.timed("work", foresight.work)
    ids, said = routes(shape, tokens)
    with closing(ReplayBox(geometry, geometry.all_bytes // 4, BOX, ranks, prefetch=True)) as box:
        foresight.attach(box.residency, box.loader, geometry)
        requester = PrefetchRequester(box.residency, box.loader, top_k)
        demand, hear = spent.timed("hints", requester.demand), spent.timed("hints", requester.on_hint)
        for token in range(tokens):
            spent.counts, step = token >= UNSCORED, meta(token)
            choices = np.full((layers, 1, top_k), -1, np.int16)
            foresight.begin_step(("a",), choices, np.zeros(1, np.int64))
            box.begin(step)
            for layer in range(layers):
                chosen = ids[token, layer][None]
                choices[layer] = chosen
                if layer + 1 < layers:
                    hear(layer + 1, said[token, layer + 1][None])
                demand(layer, chosen)
                box.run(layer, torch.from_numpy(chosen.astype(np.int64)))
                work()
            box.end()
            foresight.end_step(np.inf)
            work()
            box.rest()
    seconds = {name: each / (tokens - UNSCORED) for name, each in spent.seconds.items()}
    seconds["planning"] = seconds.pop("work") - seconds["beside"]
    return seconds


def scoutgate(shape: tuple[int, int, int], tokens: int, variant: str) -> float:
    """Measures seconds per token of ScoutGate's thread."""
    layers, experts, top_k = shape
    sizes = ExpertGeometry(layers, experts, top_k, HIDDEN, HIDDEN, "bfloat16")
    model = {"id": "a model", "digest": "digest", "tokenizer": "tokenizer"}
    gate = ScoutGate(ScoutGateShape((experts,) * layers, top_k, HIDDEN, variant=variant))
    spent_s: list[float] = []

    def clock() -> float:
        spent_s.append(time.thread_time())
        return 0.0

    ids, _ = routes(shape, 20)
    with tempfile.TemporaryDirectory() as folder:
        one = (torch.ones(2 * layers), torch.zeros(2 * layers))
        write_export(Path(folder), gate, one, model, {})
        embedding = DenseMatrix(torch.randn(VOCAB, HIDDEN).to(torch.bfloat16), ENCODINGS["bfloat16"], HIDDEN)
        forecaster = ScoutGateForecaster(ServedModel("digest", sizes), "tokenizer", embedding, clock)
        with closing(forecaster):
            forecaster.load(Path(folder))
            for token in range(tokens):
                step = meta(token)
                forecaster.on_step_begun(step)
                assert forecaster.wait_idle(60)
                chosen = ids[token % 20][:, None]
                forecaster.learn(StepRouting(step, chosen, np.ones(chosen.shape, np.float32), {}, 1.0, 0.0))
                assert forecaster.wait_idle(60)
    return (spent_s[-1] - spent_s[UNSCORED]) / (len(spent_s) - 1 - UNSCORED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300)
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    heads = ("compute thread", "beside it", "planning and fusion", "hints", "ScoutGate, `source`", "`context`", "all")
    print(f"us of processor time a token\n| layers x experts | {' | '.join(heads)} |\n|" + "---|" * (len(heads) + 1))
    for shape in SHAPES:
        each = serve(shape, tokens)
        gates = [scoutgate(shape, tokens, variant) for variant in ("source", "context")]
        parts = [each["follow"], each["beside"], each["planning"], each["hints"], *gates]
        cells = [f"{1e6 * part:.0f}" for part in (*parts, sum(parts) - gates[0])]
        print(f"| {shape[0]} x {shape[1]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""The process that fits expert clusters; `python -m` starts it with its niceness as argument. Imports SciPy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import numpy as np

from edgemoe.cluster.control.planning.planning_questions import ClusterAnswer, ClusterQuestion
from edgemoe.guard import refuse_pickle
from edgemoe.helper.child_process import serve
from edgemoe.policy.routing.eldr_fitting import RecordedTraffic, fit_clusters
from edgemoe.policy.routing.signatures import ModelSizes, counts_of
from edgemoe.types.arrays import FloatArray
from edgemoe.types.expert_signatures import ExpertSignature


def fit(asked: ClusterQuestion) -> ClusterAnswer:
    """Returns one cluster of requests for each engine, sized by its slots. All tables have the model's sizes."""
    sizes, requests = ModelSizes(asked.layers, asked.experts), asked.requests
    traffic = RecordedTraffic(
        _counts((one.prompt for one in requests), sizes),
        _counts((one.answer for one in requests), sizes),
        np.array([one.answer.tokens for one in requests], np.int64),
    )
    slots, before = np.array(asked.slots, np.int64), np.array(asked.before, np.int64)
    clusters, fitted = fit_clusters(traffic, slots, np.random.default_rng(0), before if len(before) else None)
    return ClusterAnswer(
        number=asked.number,
        weights=clusters.weights.tobytes(),
        centroids=clusters.centroids.tobytes(),
        decode=clusters.decode.tobytes(),
        similarity=clusters.fit.similarity,
        spread=clusters.fit.spread,
        nearest=tuple(clusters.fit.nearest.tolist()),
        chosen=fitted.name,
        rho=fitted.rho[fitted.name],
    )


def _counts(tables: Iterable[ExpertSignature], sizes: ModelSizes) -> FloatArray:
    found = [counts_of(table.tokens, table.chosen, sizes) for table in tables]
    return np.stack([counts for counts in found if counts is not None])


if __name__ == "__main__":
    os.nice(int(sys.argv[1]))
    refuse_pickle()
    serve(sys.stdin.buffer, sys.stdout.buffer, ClusterQuestion, fit)

"""The gain of marginal union for pull, by the knowledge of a request before its prompt is computed.

Kinds: prompt (all its experts, an upper bound), user (another request of its user, in one domain), half (so for every
second request), nothing. After prefill the engine knows the signature, as a daemon does. Engines and requests are as in
`routing_both`; changes are in percent of pull alone, paired over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.policy.routing.marginal_union import DecodeTimes, PromptForecast, UnionTerm
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.types.arrays import FloatArray
from tools.research.routing.routing_both import KV_TOKENS, PULLED, RATES, Run, changes, outcome, run_of, served
from tools.research.simulate.decode_pool import DecodeCosts
from tools.research.simulate.decode_traffic import MODELS, Source, sources_of, step_costs
from tools.research.simulate.serving.serving_workload import Load, at_rate, azure

KNOWN = ("prompt", "user", "half", "nothing")


def before(sources: Sequence[Source], known: str, rng: np.random.Generator) -> list[FloatArray]:
    """Returns the counts [L, E] in each request's offer."""
    answer = []
    for number, source in enumerate(sources):
        if known == "prompt":
            answer.append(source.prefill)
        elif known == "nothing" or (known == "half" and number % 2):
            answer.append(np.zeros_like(source.prefill))
        else:
            others = [each for each in sources if each.domain == source.domain and each is not source]
            answer.append(others[int(rng.integers(len(others)))].prefill)
    return answer


def row(run: Run, costs: DecodeCosts, rate: float, kv_tokens: int, known: str) -> dict[str, float]:
    """Returns figures of requests pulled with that knowledge."""
    (offered, output), sources, _ = run
    forecast = PromptForecast(sources[0].routes.shape[2])
    counts = before(sources, known, np.random.default_rng(len(offered)))
    load = Load([replace(one, chance=forecast.chance(each)) for one, each in zip(offered, counts, strict=True)], output)
    policy = PullRouting(PullLimits(), UnionTerm(DecodeTimes(costs.step_s, costs.expert_s)))
    seen = [forecast.chance(each.prefill) for each in sources]
    return served(at_rate(load, rate), sources, costs, policy, kv_tokens, PULLED, seen)


def study(data: Path, seeds: range, models: Sequence[str] = tuple(MODELS)) -> dict[str, Any]:
    """Returns a table for each model, KV and rate."""
    trace, answer = azure(data), dict[str, Any]()
    for model in models:
        sources = sources_of(data, model)
        costs = step_costs(data, model, sources)
        runs = [run_of(trace, sources, sources[0].routes.shape[2], seed) for seed in seeds]
        for kv, tokens in KV_TOKENS.items():
            full = outcome(runs[0], costs, 1e9, tokens, "round robin")["ended_per_s"]
            for share in RATES:
                rate = share * full
                found = {"pull": [outcome(run, costs, rate, tokens, "pull") for run in runs]}
                found |= {known: [row(run, costs, rate, tokens, known) for run in runs] for known in KNOWN}
                answer[f"{model}, {kv} KV, {share:g} of {full:.1f}/s"] = changes(found)
    return answer

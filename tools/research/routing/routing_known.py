"""What marginal union is worth to pull by what is known of a request before its prompt is computed.

    prompt    which experts its whole prompt chooses, which nobody knows then: the most that there is to gain
    user      those of another request of its user, who stays with one domain
    half      so of every second request, of the others nothing
    nothing   no signature: each expert is as likely as any other

Once its prompt is computed its engine knows its signature, as a daemon does. No clusters are fitted. Engines, lengths,
arrivals and routes are those of `routing_both`; changes are in percent against pull alone, paired over seeds.
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
from tools.research.simulate.serving.workload import Load, at_rate, azure

KNOWN = ("prompt", "user", "half", "nothing")


def before(sources: Sequence[Source], known: str, rng: np.random.Generator) -> list[FloatArray]:
    """Returns the counts [L, E] that each request is offered with."""
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
    """Returns what requests meet that are pulled by so much."""
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

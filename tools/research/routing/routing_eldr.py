"""ELDR's studies on real routes: decode workers under every routing policy, and the gain by each of ELDR's parts.

Clusters are fitted to other sources than the requests'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.research.routing.routing_design import design
from tools.research.simulate.decode_pool import DecodeCosts
from tools.research.simulate.decode_study import BASELINES, OURS, compared, figures, fitted, outcome, permuted
from tools.research.simulate.decode_traffic import MODELS, Source, Traffic, scene_of, sources_of, step_costs

FEW = ("round robin", "JSQ", "domain", "ELDR", "union, no clusters", "union")


def pool_study(
    sources: Sequence[Source], costs: DecodeCosts, traffic: Traffic, seeds: range, names: Sequence[str] = FEW
) -> list[dict[str, Any]]:
    """Returns the policies' rows for one kind of traffic, and two rows with other requests' signatures."""
    runs = []
    for seed in seeds:
        known = fitted(scene_of(sources, costs, replace(traffic, seed=seed)))
        run = {name: figures(known.scene, outcome(name, known)) for name in names}
        for name in ("ELDR", "union"):
            run[f"{name}, placebo"] = figures(known.scene, outcome(name, known, permuted(known.scene)))
        runs.append(run)
    return compared(runs)


def study(data: Path, seeds: range) -> dict[str, Any]:
    """Returns every table, by model and traffic."""
    answer: dict[str, Any] = {}
    for model, routed in MODELS.items():
        sources = sources_of(data, model)
        costs = step_costs(data, model, sources)
        large = max(routed.domains, key=lambda domain: sum(each.domain == domain for each in sources))
        skew = {domain: 0.75 if domain == large else 0.25 / (len(routed.domains) - 1) for domain in routed.domains}
        late = routed.domains[-1]
        base, every = Traffic(), (*BASELINES, *OURS)
        tables = {
            "8 workers, batch 8": pool_study(sources, costs, replace(base, batch=8), seeds, every),
            "8 workers, batch 12": pool_study(sources, costs, replace(base, batch=12), seeds, every),
            "16 workers": pool_study(sources, costs, replace(base, workers=16, requests=2000), seeds),
            "24 workers": pool_study(sources, costs, replace(base, workers=24, requests=3000), seeds),
            f"three quarters {large}": pool_study(sources, costs, replace(base, shares=skew), seeds),
            f"{late} comes halfway": pool_study(sources, costs, replace(base, late=late), seeds),
            "a quarter is the prompt": pool_study(sources_of(data, model, cut=0.25), costs, base, seeds),
        }
        answer[model] = tables | {"design": design(sources, costs, late, seeds)}
    return answer

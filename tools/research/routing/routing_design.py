"""The gain by each of ELDR's parts: its Figures 1 to 4, 7 and 8, 14 to 17, and Table 1, on our data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgemoe.policy.routing.eldr import BandChooser, drifted
from edgemoe.policy.routing.eldr_fitting import (
    RecordedTraffic,
    RequestClusters,
    balanced,
    choose_weights,
    described,
    fit_clusters,
    middles,
)
from edgemoe.policy.routing.marginal_union import DecodeTimes, PromptForecast, UnionChooser, engine_step
from edgemoe.policy.routing.offers import PushRouting, RoutingTarget, WaitingRequest
from edgemoe.policy.routing.signatures import ExpertClusters, absence, rarity, signatures
from edgemoe.types.arrays import FloatArray, IntArray
from tools.research.simulate.decode_pool import DecodeCosts, distinct_experts
from tools.research.simulate.decode_router import place
from tools.research.simulate.decode_study import Figures, Fitted, compared, figures, fitted, outcome
from tools.research.simulate.decode_traffic import Scene, Source, Traffic, recorded, scene_of

BANDS = (0.0, 0.05, 0.1, 0.2, 1.0)
PULLS = (0.2, 0.4)
RECENT = 64  # requests in which drift is sought


@dataclass(frozen=True, slots=True, eq=False)
class PulledUnion:
    """Marginal union with a bonus for the cluster of a request: the default leaves this out."""

    clusters: ExpertClusters
    times: DecodeTimes
    pull: float

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        assert offered.chance is not None
        assert offered.signature is not None
        steps = [engine_step(view, offered.chance, self.times) for view in open_]
        costs = np.array([step.cost_s(offered.chance) for step in steps])
        mean_s = np.mean([step.now_s for step in steps])
        near = self.clusters.similarity(offered.signature)[[int(view.place) for view in open_]]
        return open_[int(np.argmin(costs - self.pull * near * mean_s))]


def design(sources: Sequence[Source], costs: DecodeCosts, late: str, seeds: range) -> dict[str, Any]:
    """Returns the tables of one model. `late` is the new domain in the study of drift."""
    scenes = [scene_of(sources, costs, Traffic(seed=seed)) for seed in seeds]
    known = [fitted(scene) for scene in scenes]
    return {
        "domains": domains(sources, costs),
        "rho": rho(scenes),
        "parts": compared([parts(each) for each in known]),
        "drift": [drift(scene_of(sources, costs, Traffic(late=late, seed=seed)), sources, late) for seed in seeds],
        "overhead": [overhead(26, 64, 6), overhead(48, 128, 8)],
    }


def domains(sources: Sequence[Source], costs: DecodeCosts, batch: int = 10) -> dict[str, Any]:
    """Returns the similarity of a domain's requests, and the saving of a batch of one domain over a mixed one."""
    rng = np.random.default_rng(0)
    names = np.array([each.domain for each in sources])
    unit = signatures(np.stack([each.decode for each in sources]), np.ones(sources[0].decode.shape, np.float32))
    near = unit @ unit.T
    same = names[:, None] == names
    other = ~np.eye(len(names), dtype=np.bool_)
    lengths = np.array([len(each.routes) for each in sources], np.float64)

    def loaded(who: IntArray) -> float:
        """Returns mean distinct experts of batches of different sources, drawn in proportion to their tokens."""
        found = []
        for _ in range(400):
            batch_of = rng.choice(who, batch, replace=False, p=lengths[who] / lengths[who].sum()).tolist()
            ids = np.stack([sources[n].routes[rng.integers(len(sources[n].routes))] for n in batch_of])
            found.append(distinct_experts(ids, costs.experts))
        return float(np.mean(found))

    mixed = loaded(np.arange(len(sources)))
    members = {name: np.flatnonzero(names == name) for name in sorted(set(names.tolist()))}
    fewer = {name: round(100 * (loaded(who) / mixed - 1), 1) for name, who in members.items() if len(who) > batch}
    both = [np.corrcoef(each.prefill.ravel(), each.decode.ravel())[0, 1] for each in sources]
    return {
        "similarity within": round(float(near[same & other].mean()), 3),
        "similarity across": round(float(near[~same].mean()), 3),
        "prefill to decode": round(float(np.mean(both)), 3),
        "fewer experts": fewer,
    }


def rho(scenes: Sequence[Scene]) -> dict[str, Any]:
    """Returns rho of each kind of weights on other sources than it was fitted to, and how often each was chosen."""
    found = []
    for scene in scenes:
        seen = recorded(scene.recorded)
        found.append(choose_weights(seen.prefill, seen.decode, np.random.default_rng(scene.traffic.seed)))
    mean = {name: round(float(np.mean([each.rho[name] for each in found])), 3) for name in found[0].rho}
    return mean | {"chosen": [each.name for each in found]}


def parts(known: Fitted) -> dict[str, Figures]:
    """Returns figures of ELDR and marginal union with one part changed."""
    scene, workers = known.scene, [place(w) for w in range(known.scene.traffic.workers)]
    rest: Callable[[int], FloatArray] = lambda n: scene.sources[n].ending  # noqa: E731
    seen = recorded(scene.recorded)

    def changed(clusters: ExpertClusters, band: float = 0.1) -> Figures:
        policy = PushRouting(BandChooser(clusters, workers, band))
        return figures(scene, outcome("ELDR", replace(known, clusters=clusters), policy=policy))

    answer = {name: figures(scene, outcome(name, known)) for name in ("round robin", "JSQ", "ELDR", "union")}
    for band in BANDS:
        answer[f"ELDR, band {band:g}"] = changed(known.clusters, band)
    for name, weights in (("counts", np.ones_like(known.clusters.weights)), ("rarity", rarity(seen.prefill))):
        answer[f"ELDR, {name}, all layers"] = changed(_clusters(seen, weights, known, plain=False))
    answer["ELDR, plain K-means"] = changed(_clusters(seen, known.clusters.weights, known, plain=True))
    answer["ELDR, 7/8 of the prompt cached, no signatures kept"] = figures(scene, outcome("ELDR", known, rest))
    answer["union, 7/8 of the prompt cached, no signatures kept"] = figures(scene, outcome("union", known, rest))
    answer["union, no clusters"] = figures(scene, outcome("union, no clusters", known))
    for pull in PULLS:
        policy = PushRouting(PulledUnion(known.clusters, known.times, pull))
        answer[f"union, pull {pull:g}"] = figures(scene, outcome("union", known, policy=policy))
    return answer


def _clusters(seen: RecordedTraffic, weights: FloatArray, known: Fitted, plain: bool) -> ExpertClusters:
    """Returns clusters by other weights, or of any size."""
    traffic = known.scene.traffic
    points = signatures(seen.prefill, weights)
    rng = np.random.default_rng(traffic.seed)
    if not plain:
        return described(seen, weights, points, balanced(points, np.full(traffic.workers, traffic.slots), rng))
    centroids = points[rng.choice(len(points), traffic.workers, replace=False)]
    for _ in range(30):
        member: IntArray = (points @ centroids.T).argmax(axis=1)
        centroids = middles(points, member, traffic.workers)
    return described(seen, weights, points, RequestClusters(member, centroids))


def drift(scene: Scene, sources: Sequence[Source], late: str) -> dict[str, Any]:
    """Returns the delay until a new domain is noticed, false alarms before, and the effect of a new fit."""
    known = fitted(scene)
    count = len(scene.sources)
    prefill = np.stack([each.prefill for each in scene.sources])
    checks = range(RECENT, count + 1, RECENT // 4)
    alarms = [at for at in checks if drifted(known.clusters, prefill[at - RECENT : at])]
    asked = {id(each) for each in scene.sources}
    whole = [*scene.recorded, *(each for each in sources if each.domain == late and id(each) not in asked)]
    traffic = recorded(whole)
    near = signatures(traffic.prefill, known.clusters.weights) @ known.clusters.centroids.T
    before: IntArray = near.argmax(axis=1)
    capacity = np.full(scene.traffic.workers, scene.traffic.slots)
    moved = {}
    for name, old in (("matched", before), ("by chance", None)):
        again, _ = fit_clusters(traffic, capacity, np.random.default_rng(scene.traffic.seed + 50), old)
        after = (signatures(traffic.prefill, again.weights) @ again.centroids.T).argmax(axis=1)
        moved[name] = round(float((after != before).mean()), 3)
        if old is not None:
            fresh = replace(known, clusters=again)
    late_part = {}
    for name, which in (("JSQ", known), ("ELDR", known), ("ELDR, fitted anew", fresh), ("union", known)):
        met = outcome(name.split(",")[0], which)
        late_part[name] = float(np.median(met.tpot_s[count // 2 : count * 9 // 10]) * 1e3)
    met = outcome("union", fresh)
    late_part["union, fitted anew"] = float(np.median(met.tpot_s[count // 2 : count * 9 // 10]) * 1e3)
    change = {name: round(100 * (value / late_part["JSQ"] - 1), 1) for name, value in late_part.items()}
    return {
        "noticed after": next((at - count // 2 for at in alarms if at > count // 2), None),
        "false alarms": sum(at <= count // 2 for at in alarms),
        "moved": moved,
        "second half, p50/jsq": change,
    }


def overhead(layers: int, experts: int, top_k: int) -> dict[str, Any]:
    """Returns processor seconds for fitting 1,000 requests, and the time of a decision."""
    rng = np.random.default_rng(0)
    kinds = rng.gamma(0.3, 1.0, (6, layers, experts))
    rates = (kinds / kinds.sum(axis=2, keepdims=True))[rng.integers(0, 6, 1000)]
    seen = RecordedTraffic(
        rng.poisson(rates * top_k * 200).astype(np.float32),
        rng.poisson(rates * top_k * 100).astype(np.float32),
        np.full(1000, 100),
    )
    began = time.process_time()
    clusters, _ = fit_clusters(seen, np.full(16, 16), rng)
    answer: dict[str, Any] = {"shape": f"{layers} x {experts}", "fit_s": round(time.process_time() - began, 2)}
    forecast = PromptForecast(top_k, clusters)
    counts = seen.prefill[0]
    blocks = rng.integers(0, 16, (64, layers, experts)).astype(np.uint8)
    union = absence(forecast.chance(counts)) * 12
    views = [RoutingTarget(place(w), 16, 16, 100, 100, running=12, union=union) for w in range(64)]
    offered = WaitingRequest("r", 1000, 0.0, expected_tokens=100.0, signature=counts, chance=forecast.chance(counts))
    band = BandChooser(clusters, [place(w) for w in range(16)])
    choose = UnionChooser(DecodeTimes(0.01, 1e-5))
    for name, call in (
        ("sum of 64 blocks", lambda: blocks.sum(axis=0, dtype=np.int64)),
        ("forecast", lambda: forecast.chance(counts)),
        ("ELDR, 16 workers", lambda: band(offered, views[:16], 0.0)),
        ("union, 16 workers", lambda: choose(offered, views[:16], 0.0)),
        ("union, 64 workers", lambda: choose(offered, views, 0.0)),
    ):
        call()
        times = []
        for _ in range(51):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        answer[f"{name}, us"] = round(1e6 * float(np.median(times)))
    return answer

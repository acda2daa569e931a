"""Requests with real routes, for decode workers, and other sequences to fit clusters to.

A source is one recorded sequence and makes one request. Its first part stands for the prompt, and the rest is decoded,
for no trace marks the answer. A third of the sources is for fitting; the others repeat in new random orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.eldr_fitting import RecordedTraffic
from edgemoe.replay.trace import Ids, load
from edgemoe.types.arrays import FloatArray, IntArray
from tools.research.simulate.costs import measured
from tools.research.simulate.decode_pool import DecodeCosts, DecodeRequests, distinct_experts, places_of

FIT_SHARE = 1 / 3
LEAST_TOKENS = 32  # of a source


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """A model with recorded routes, and the size of its experts."""

    domains: tuple[str, ...]
    folder: str
    experts: int
    expert_numbers: float  # of 16 bits


MODELS = {
    "deepseek-v2-lite": RoutedModel(("intent", "law", "translation"), "deepseek-v2-lite-esft", 64, 2048 * 1408 * 3),
    "gpt-oss-20b": RoutedModel(  # its experts are published in MXFP4
        ("code_cs", "humanities_other", "law", "math", "medical"),
        "gpt-oss-20b-fingerprint",
        32,
        2880**2 * 3 * 4.25 / 16,
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One recorded sequence, cut in two."""

    domain: str
    prefill: FloatArray  # [L, E] counts
    tokens: int  # of the prompt
    routes: Ids  # [T, L, k] of the tokens to decode
    decode: FloatArray  # [L, E] counts
    ending: (
        FloatArray  # [L, E] counts of the prompt's last eighth: a prefix cache without signatures may leave only these
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Parameters of the traffic. `shares` are the domains' among arrivals; if empty, their sources'."""

    workers: int = 8
    batch: float = 10.0  # mean running requests of a worker
    slots: int = 16
    requests: int = 1000
    shares: dict[str, float] = field(default_factory=dict)
    late: str = ""  # a domain that appears only in the second half
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Requests, earlier recordings, and the costs of a step."""

    traffic: Traffic
    top_k: int
    costs: DecodeCosts
    recorded: list[Source]
    sources: list[Source]  # [N] of each request
    requests: DecodeRequests

    @property
    def lengths(self) -> IntArray:
        return np.array([len(each.routes) for each in self.sources])

    @property
    def domains(self) -> npt.NDArray[np.str_]:
        return np.array([each.domain for each in self.sources])


def counted(ids: Ids, experts: int) -> FloatArray:
    """Returns the number of times that each expert was chosen [L, E], from routes [T, L, k]."""
    layers = ids.shape[1]
    found = np.bincount(places_of(ids, experts).ravel(), minlength=layers * experts)
    return found.reshape(layers, experts).astype(np.float32)


def sources_of(data: Path, name: str, cut: float = 0.5) -> list[Source]:
    """Returns a model's sources, the first `cut` of each as its prompt; DATA holds the tables at any depth."""
    model = MODELS[name]
    answer = []
    for domain in model.domains:
        found = next((path for path in data.rglob(f"{domain}.ids.csv.gz") if path.parent.name == model.folder), None)
        if found is None:
            raise SystemExit(f"{data} has no {model.folder}/{domain}.ids.csv.gz")
        for ids in load([found], experts=model.experts).requests:
            whole = np.asarray(ids)
            if len(whole) < LEAST_TOKENS:
                continue
            at = max(8, int(len(whole) * cut))
            both = [counted(part, model.experts) for part in (whole[:at], whole[at:], whole[at - at // 8 : at])]
            answer.append(Source(domain, both[0], at, whole[at:], both[1], both[2]))
    return answer


def recorded(sources: Sequence[Source]) -> RecordedTraffic:
    """Returns the recorded sequences for fitting clusters."""
    return RecordedTraffic(
        np.stack([each.prefill for each in sources]),
        np.stack([each.decode for each in sources]),
        np.array([len(each.routes) for each in sources]),
    )


def step_costs(data: Path, name: str, sources: Sequence[Source]) -> DecodeCosts:
    """Returns the costs of the model's step, by LLMServingSim's profile."""
    layers, top_k = sources[0].routes.shape[1:]
    costs = measured(data, int(MODELS[name].expert_numbers))
    token_s = costs.dense_token_s + costs.token_s * top_k
    return DecodeCosts(
        layers * (costs.dense_s + costs.launch_s), layers * token_s, costs.expert_s, MODELS[name].experts
    )


def scene_of(sources: Sequence[Source], costs: DecodeCosts, traffic: Traffic) -> Scene:
    """Returns requests that keep about `traffic.batch` running at each worker under any routing."""
    rng = np.random.default_rng(traffic.seed)
    order = rng.permutation(len(sources))
    fit = int(len(sources) * FIT_SHARE)
    asked = _order(sources, order[fit:], traffic, rng)
    requests = [sources[n] for n in asked.tolist()]
    lengths = np.array([len(each.routes) for each in requests])
    step_s = _mean_step_s(requests, lengths, costs, traffic, rng)
    per_s = traffic.workers * traffic.batch / (step_s * lengths.mean())
    at_s = np.cumsum(rng.exponential(1 / per_s, len(requests)))
    recorded_ = [sources[n] for n in order[:fit].tolist() if sources[n].domain != traffic.late]
    return Scene(
        traffic,
        requests[0].routes.shape[2],
        costs,
        recorded_,
        requests,
        DecodeRequests(at_s, asked, [each.routes for each in requests]),
    )


def _order(sources: Sequence[Source], asked: IntArray, traffic: Traffic, rng: np.random.Generator) -> IntArray:
    """Returns each request's source [N]: the least recently used of its domain, or all in turn."""
    if not traffic.shares and not traffic.late:
        rounds = -(-traffic.requests // len(asked))
        return np.concatenate([rng.permutation(asked) for _ in range(rounds)])[: traffic.requests]
    of = {domain: [n for n in asked.tolist() if sources[n].domain == domain] for domain in {s.domain for s in sources}}
    shares = traffic.shares or {domain: len(of[domain]) / len(asked) for domain in of}
    answer: list[int] = []
    for number in range(traffic.requests):
        early = number < traffic.requests // 2
        weight = {d: share for d, share in sorted(shares.items()) if of[d] and not (early and d == traffic.late)}
        domain = list(weight)[int(rng.choice(len(weight), p=np.array(list(weight.values())) / sum(weight.values())))]
        first = int(rng.integers(0, max(1, len(of[domain]) // 2)))
        of[domain].append(of[domain].pop(first))
        answer.append(of[domain][-1])
    return np.array(answer)


def _mean_step_s(
    requests: Sequence[Source], lengths: IntArray, costs: DecodeCosts, traffic: Traffic, rng: np.random.Generator
) -> float:
    size = round(traffic.batch)
    found = []
    for _ in range(100):
        who = rng.choice(len(requests), size, p=lengths / lengths.sum())
        ids = np.stack([requests[n].routes[rng.integers(lengths[n])] for n in who.tolist()])
        found.append(distinct_experts(ids, costs.experts))
    return costs.step_s + traffic.batch * costs.token_s + costs.expert_s * float(np.mean(found))

"""Part `terms`: the gain by marginal union and residency under the default rule, if boxes lack half of the experts.

Every box has the whole model on a slow disk and memory for half of its experts; boxes compute nothing for each other.
Each user has one kind of prompt. Requests come all at once, or at nearly the highest rate. Three clusters take turns:
both terms, no residency, neither (`tools.research.routing.blind`).
"""

from __future__ import annotations

import time

import numpy as np

from edgemoe.telemetry import metrics as names
from tools.bench.arrivals import Arrival, Shape, poisson
from tools.research.placement.prism.models import Model, Prompts, prompts_of
from tools.research.routing.live.boxes import STATS_S, VOCAB, Kind, counted, figures, grown, send, side_by_side
from tools.research.routing.live.sitting import Sitting
from tools.testbed.daemons import Cluster
from tools.testbed.limits import Limits

SHARE = 0.5  # of the experts that a box has memory for
DISK_BYTES_PER_S = 400_000_000
USERS = 12  # two of each kind
PROMPT_TOKENS, TOKENS = 24, 32
REQUESTS = {"demo": 96, "constructed": 36}  # of a round
PROMPTS = 40  # prompts of each kind
AT_ONCE, LOAD = "at once", 0.95  # of the rate of answers to requests that come at once
LOADS = (AT_ONCE, LOAD)
MODULES = {
    "both": "edgemoe",
    "union": "tools.research.routing.blind.blind_residency",
    "neither": "tools.research.routing.blind.union",
}
FAMILIES = (names.STEPS, names.STEP_TOKENS, names.STEP_SECONDS, names.ACTIVE_EXPERTS)
MOVED = (names.OFFERED, names.GRANTED, names.OFFERS_FORECAST, names.TIER_MISSES, names.STALL_SECONDS)


def measure_terms(sitting: Sitting, model: Model) -> None:
    """Measures rounds of the same requests on three clusters in turn."""
    key = {"part": "terms", "model": model}
    todo = [(load, *one) for load in LOADS for one in sitting.rounds_of(tuple(MODULES), at=load, **key)]
    if not todo:
        return
    limits = Limits(disk_bytes_per_s=DISK_BYTES_PER_S, disk_of=model.store)
    kinds = {name: Kind(share=SHARE, module=module, limits=limits) for name, module in MODULES.items()}
    prompts = prompts_of(model, sitting.data / "prompts", PROMPTS, PROMPT_TOKENS)
    with side_by_side(sitting.work, model.store, kinds) as made:
        per_s = min(answered_per_s(sitting, model, cluster, prompts) for cluster in made.values())
        for load, number, variant in todo:
            requests, users = asked(sitting, model, prompts, LOAD * per_s, number)
            found = measured(made[variant], requests, users, due=load != AT_ONCE)
            sitting.note(found | {"per_s": LOAD * per_s}, variant=variant, round=number, at=load, **key)


def answered_per_s(sitting: Sitting, model: Model, made: Cluster, prompts: Prompts) -> float:
    """Warms a cluster up; returns its rate of answers to requests that come at once."""
    for number in range(-2, 0):
        requests, users = asked(sitting, model, prompts, 1.0, number)
        began_s = time.monotonic()
        send(made, requests, users, due=False)
    return len(requests) / (time.monotonic() - began_s)


def asked(
    sitting: Sitting, model: Model, prompts: Prompts, rate: float, number: int
) -> tuple[list[Arrival], list[str]]:
    """Draws a round's requests and their users, with new gaps, users and prompts for each round."""
    rng = np.random.default_rng((7, number + 2))
    count = sitting.many(REQUESTS[model.name])
    gaps = poisson(rate, count, Shape(VOCAB[1]), 11 + number, 1, TOKENS, fixed=True)
    drawn = rng.integers(USERS, size=count).tolist()
    kinds = list(prompts)
    texts = [prompts[kinds[user % len(kinds)]][rng.integers(PROMPTS)] for user in drawn]
    requests = [Arrival(one.at_s, tuple(text), TOKENS) for one, text in zip(gaps, texts, strict=True)]
    return requests, [f"u{user}" for user in drawn]


def measured(made: Cluster, requests: list[Arrival], users: list[str], due: bool) -> dict[str, float]:
    """Returns the clients' figures of a round, and the loads of its decode steps."""
    before, moved = counted(made, FAMILIES, phase="decode"), counted(made, MOVED)
    read = counted(made, (names.BYTES_MOVED,), **{"from": "nvme"})
    began_s = time.monotonic()
    found = figures(send(made, requests, users, due))
    took_s = time.monotonic() - began_s
    time.sleep(STATS_S)
    steps, tokens, seconds, experts = grown(before, counted(made, FAMILIES, phase="decode")).values()
    more = grown(moved, counted(made, MOVED))
    bytes_read = grown(read, counted(made, (names.BYTES_MOVED,), **{"from": "nvme"}))[names.BYTES_MOVED]
    return found | {
        "took_s": round(took_s, 2),
        "batch": round(tokens / steps, 2),
        "step_ms": round(1e3 * seconds / steps, 3),
        "experts_a_step": round(experts / steps, 2),
        "experts_a_token": round(experts / tokens, 2),
        "read_mb": round(bytes_read / 1e6, 1),
        "misses": more[names.TIER_MISSES],
        "stall_s": round(more[names.STALL_SECONDS], 3),
        "offered": more[names.OFFERED],
        "granted": more[names.GRANTED],
        "with a signature": more[names.OFFERS_FORECAST],
    }

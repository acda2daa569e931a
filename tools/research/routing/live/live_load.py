"""Parts `load` and `apart`: requests of the Azure chat trace, the same for all clusters, which take turns.

Lengths are divided by 8. Each round has its own prompts, so that no prefix cache has them. The rate is a share of the
rate of answers to requests that come all at once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence

from edgemoe.telemetry import metrics as names
from tools.bench.arrivals import Arrival, Shape, from_trace
from tools.research.placement.prism.models import Model
from tools.research.routing.live.beside import LiveCosts, calibrated, counting, simulated
from tools.research.routing.live.boxes import (
    SLOTS,
    STATS_S,
    Asked,
    Kind,
    ask,
    counted,
    figures,
    grown,
    prompt_of,
    send,
    side_by_side,
    times,
)
from tools.research.routing.live.sitting import Sitting
from tools.testbed.daemons import Cluster

TRACE, SCALE = "azure-llm-2023/conv.csv.gz", 1 / 8
REQUESTS = {"demo": 200, "constructed": 48}  # of a round
APART = {"demo": 100, "constructed": 24}
WARM, AT_ONCE = 40, 50  # requests before the first round; requests for the measurement of the rate
SHARES = (0.25, 0.5)  # of that rate, with and without separate prefill
LOADED, LOAD = ("pull", "least"), 0.5
KINDS = {"mixed": Kind(), "apart": Kind(apart=True)}
HANDED = (names.HANDED_OVER, names.KV_FETCH_FAILURES)


def measure_load(sitting: Sitting, model: Model) -> None:
    """Measures one distribution at half of the highest rate, under three rules and in the simulator."""
    key = {"part": "load", "model": model}
    todo = list(sitting.rounds_of(LOADED, **key))
    if not todo:
        return
    with side_by_side(sitting.work, model.store, {rule: Kind(rule) for rule in LOADED}) as made:
        costs, most = warmed(sitting, model, made)
        for number, rule in todo:
            requests = arrivals(sitting, LOAD * most, REQUESTS[model.name], number)
            found = figures(send(made[rule], requests, users(requests)))
            sitting.note(found | {"per_s": LOAD * most}, variant=rule, round=number, **key)
        requests = arrivals(sitting, LOAD * most, REQUESTS[model.name], 0)
        foretold = {rule: times(*simulated(costs, rule, list(made[rule]), SLOTS, requests)) for rule in LOADED}
    for rule, found in foretold.items():
        sitting.note(found | {"per_s": LOAD * most}, variant=f"{rule}, simulated", **key)


def measure_apart(sitting: Sitting, model: Model) -> None:
    """Measures the same requests with one box that prefills and two that decode, and with three that do both."""
    key = {"part": "apart", "model": model}
    todo = [(share, *one) for share in SHARES for one in sitting.rounds_of(tuple(KINDS), share=share, **key)]
    if not todo:
        return
    with side_by_side(sitting.work, model.store, KINDS) as made:
        _, most = warmed(sitting, model, made)
        for share, number, variant in todo:
            requests = arrivals(sitting, share * most, APART[model.name], number)
            before = counted(made[variant], HANDED)
            found = figures(send(made[variant], requests, users(requests)))
            time.sleep(STATS_S)
            found |= grown(before, counted(made[variant], HANDED)) | {"per_s": share * most}
            sitting.note(found, variant=variant, round=number, share=share, **key)


def warmed(sitting: Sitting, model: Model, made: Mapping[str, Cluster]) -> tuple[LiveCosts, float]:
    """Warms clusters up; returns the first one's step costs and its highest rate, from the log if measured before."""
    for cluster in made.values():
        requests = arrivals(sitting, 1.0, WARM, -1)
        send(cluster, requests, users(requests), due=False)
    key = {"part": "costs", "model": model}
    if (known := sitting.record(**key)) is None:
        costs, most = measured(next(iter(made.values())), arrivals(sitting, 1.0, AT_ONCE, -2))
        sitting.note(costs._asdict() | {"most_per_s": most}, **key)
        return costs, most
    return LiveCosts(*(known[name] for name in LiveCosts._fields)), known["most_per_s"]


def measured(made: Cluster, requests: Sequence[Arrival]) -> tuple[LiveCosts, float]:
    """Measures step costs beside clients, and answers per second of requests that come at once."""
    daemons, drawn = list(made), itertools.count()

    def some(at_once: int, prompt: int, tokens: int) -> list[float]:
        asked: list[Asked] = [(d, prompt_of((9, next(drawn)), prompt), tokens, "") for d in daemons * at_once]
        return [answer.times_s[0] for answer in ask(asked) if answer.times_s]

    costs = calibrated(daemons, some)
    with counting(daemons, "decode") as steps:
        began_s = time.monotonic()
        send(made, requests, users(requests), due=False)
        took_s = time.monotonic() - began_s
    return costs.scaled(steps[0]), len(requests) / took_s


def arrivals(sitting: Sitting, rate: float, requests: int, number: int) -> list[Arrival]:
    """Returns requests with the same lengths and gaps in every round, and other prompts."""
    shape = Shape(4096, SCALE, max_prompt_tokens=512, max_output_tokens=128)
    return from_trace(sitting.data / TRACE, rate, sitting.many(requests), shape, seed=5 + number)


def users(requests: Sequence[Arrival]) -> list[str]:
    return [f"u{n % 20}" for n in range(len(requests))]

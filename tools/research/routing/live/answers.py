"""Parts `same` and `affinity`: correct answers under every rule, and prefix hits of users' prompts."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np

from edgemoe.config.settings import Route
from edgemoe.store.manifest import Manifest
from edgemoe.telemetry import metrics as names
from tools.research.placement.prism.models import Model
from tools.research.routing.live.boxes import (
    NODES,
    READY_S,
    STATS_S,
    Kind,
    ask,
    cluster,
    counted,
    grown,
    prompt_of,
    settings,
)
from tools.research.routing.live.sitting import Sitting
from tools.testbed.bed import Bed
from tools.testbed.daemons import Cluster, Daemon

RULES = get_args(Route)
SAME, SAME_TOKENS = {"demo": 8, "constructed": 3}, {"demo": 48, "constructed": 24}  # requests at each box, twice
USERS, TURNS, BEGINNING = 6, 6, 384  # tokens at the beginning of all of a user's prompts


def references(model: Model, work: Path) -> dict[int, str]:
    """Returns the answers of one box alone to each prompt; kept in `work`."""
    prompts = [prompt_of((1, n), 40) for n in range(SAME[model.name] * len(NODES))]
    sizes = f"{len(prompts)}-{SAME_TOKENS[model.name]}"
    kept = work / f"answers-{model.name}-{sizes}-{Manifest.load(model.store).digest[:12]}.json"
    if not kept.exists():
        with Bed(["alone"]) as bed, tempfile.TemporaryDirectory(dir=work) as scratch:
            alone = settings(model.store, Kind("pull")) | {"cluster.node": ""}
            daemon = Daemon(bed["alone"], Path(scratch), alone)
            try:
                daemon.start()
                daemon.wait_ready(READY_S)  # kernels are compiled once
                texts = [daemon.complete(prompt, SAME_TOKENS[model.name]).text for prompt in prompts]
            finally:
                daemon.close()
        kept.write_text(json.dumps(texts))
    return dict(enumerate(json.loads(kept.read_text())))


def measure_same(sitting: Sitting, model: Model) -> None:
    """Sends requests to all boxes at once, twice, under every rule and with separate prefill and decode."""
    wanted = references(model, sitting.work)
    kinds = {rule: Kind(rule) for rule in RULES} | {"pull, apart": Kind(apart=True)}
    for variant, kind in kinds.items():
        key = {"part": "same", "model": model, "variant": variant}
        if sitting.record(**key) is None:
            with cluster(sitting.work, model.store, kind) as made:
                sitting.note(same(made, model, wanted), **key)


def same(made: Cluster, model: Model, wanted: dict[int, str]) -> dict[str, Any]:
    """Returns the number of correct answers, and the requests' engines with reasons."""
    right, began_s = 0, time.monotonic()
    for _ in range(2):
        asked = [
            (made[NODES[n % 3]], prompt_of((1, n), 40), SAME_TOKENS[model.name], f"user {n % USERS}") for n in wanted
        ]
        right += sum(answer.text == wanted[n] for n, answer in enumerate(ask(asked)))
    took_s = time.monotonic() - began_s
    time.sleep(STATS_S)
    told = counted(made, (names.OFFERED, names.GRANTED, names.OFFERS_FORECAST, names.HANDED_OVER))
    return {
        "right": right,
        "of": 2 * len(wanted),
        "took_s": round(took_s, 1),
        "offered": told[names.OFFERED],
        "granted": told[names.GRANTED],
        "with a signature": told[names.OFFERS_FORECAST],
        "handed over": told[names.HANDED_OVER],
        "routes": {key: count for key, count in _routes(made).items() if count},
    }


def _routes(made: Cluster) -> dict[str, float]:
    routes: dict[str, float] = {}
    for daemon in made:
        for name, count in daemon.metrics().items():
            if name.startswith(names.ROUTED):
                key = name.removeprefix(names.ROUTED)
                routes[key] = routes.get(key, 0.0) + count
    return routes


def measure_affinity(sitting: Sitting, model: Model) -> None:
    """Sends prompts of users with long common beginnings, to another box each time, under every rule."""
    for rule in RULES:
        key = {"part": "affinity", "model": model, "variant": rule}
        if sitting.record(**key) is None:
            with cluster(sitting.work, model.store, Kind(rule)) as made:
                sitting.note(affinity(made), **key)


def affinity(made: Cluster) -> dict[str, Any]:
    """Returns the share of prompt tokens found in prefix caches."""
    families = (names.PREFIX_HIT_TOKENS, names.PREFIX_MISS_TOKENS)
    before, firsts = counted(made, families), list[float]()
    for turn in range(TURNS):
        asked = [
            (
                made[NODES[(user + turn) % 3]],
                prompt_of((2, user), BEGINNING) + prompt_of((3, user, turn), 16),
                16,
                f"u{user}",
            )
            for user in range(USERS)
        ]
        firsts += [answer.times_s[0] for answer in ask(asked) if turn and answer.times_s]
        time.sleep(STATS_S)
    hit, miss = grown(before, counted(made, families)).values()
    return {
        "hit_tokens": hit,
        "share": round(hit / max(1.0, hit + miss), 3),
        "most": round((TURNS - 1) / TURNS * BEGINNING / (BEGINNING + 16), 3),
        "ttft_mean_s": round(float(np.mean(firsts)), 4),
    }

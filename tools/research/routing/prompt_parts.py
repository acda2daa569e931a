"""Agreement of a prompt's cluster with the cluster of its first part, or of its user's last prompt.

    python -m tools.research.routing.prompt_parts DATA --json    # seconds

A third of the recorded sequences fits eight clusters. Of the others the first half stands for the prompt, the second is
decoded. Before prefill only the cached part is known, or a similar prompt; before the last chunk half of it or more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgemoe.policy.routing.eldr import BAND
from edgemoe.policy.routing.eldr_fitting import RecordedTraffic, fit_clusters
from edgemoe.policy.routing.signatures import signatures
from edgemoe.replay.trace import Ids, load
from edgemoe.types.step import BLOCK_TOKENS
from tools.research.simulate.decode_traffic import MODELS, RoutedModel, counted

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)  # of a prompt
LAST = "the domain's last prompt"
WORKERS, SLOTS, DRAWN = 8, 16, 10
LEAST_TOKENS = 128  # of a sequence
Sequences = list[tuple[str, Ids]]  # domain, routes [T, L, k]


def sequences_of(data: Path, model: RoutedModel) -> Sequences:
    """Returns the sequences that are long enough to be cut."""
    found = [(domain, next(data.rglob(f"{model.folder}/{domain}.ids.csv.gz"))) for domain in model.domains]
    read = [(domain, np.asarray(ids)) for domain, path in found for ids in load([path], experts=model.experts).requests]
    return [(domain, ids) for domain, ids in read if len(ids) >= LEAST_TOKENS]


def study(sequences: Sequences, experts: int, drawn: int = DRAWN) -> dict[str, dict[str, float]]:
    """Returns, by kind of knowledge, how often the nearest cluster is in the prompt's band, and its similarity to
    decoding.
    """
    met: dict[str, list[tuple[bool, float]]] = {}
    for seed in range(drawn):
        rng = np.random.default_rng(seed)
        order: list[int] = rng.permutation(len(sequences)).tolist()
        some, others = order[: len(order) // 3], order[len(order) // 3 :]
        halves = [np.array_split(sequences[n][1], 2) for n in some]
        prefill, decode = (np.stack([counted(half[part], experts) for half in halves]) for part in (0, 1))
        traffic = RecordedTraffic(prefill, decode, np.array([len(half[1]) for half in halves]))
        clusters, _ = fit_clusters(traffic, np.full(WORKERS, SLOTS), rng)
        plain, last = np.ones_like(clusters.weights), dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]()
        for domain, ids in (sequences[n] for n in others):
            prompt, rest = np.array_split(ids, 2)
            whole, (wanted,) = counted(prompt, experts), signatures(counted(rest, experts)[None], plain)
            blocks = {share: max(1, int(share * len(prompt)) // BLOCK_TOKENS) for share in SHARES}
            known = {f"{share:g}": counted(prompt[: BLOCK_TOKENS * n], experts) for share, n in blocks.items()}
            near = clusters.similarity(whole)
            for name, counts in (known | ({LAST: last[domain]} if domain in last else {})).items():
                there = near[clusters.similarity(counts).argmax()] >= near.max() - BAND
                met.setdefault(name, []).append((bool(there), float(signatures(counts[None], plain)[0] @ wanted)))
            last[domain] = whole
    means = {name: np.mean(each, axis=0).tolist() for name, each in met.items()}
    return {name: {"in band": round(band, 3), "like decoding": round(like, 3)} for name, (band, like) in means.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args(argv)
    found = {}
    for name, model in MODELS.items():
        sequences = sequences_of(args.data, model)
        found[name] = {"sequences": len(sequences), **study(sequences, model.experts)}
        if not args.json:
            print(name, *(f"  {key}: {value}" for key, value in found[name].items()), sep="\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

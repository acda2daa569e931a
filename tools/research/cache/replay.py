"""`edgemoe replay` with more policies: `tools.research.cache.compared_caches`, the next-use network, libcachesim's.

    python -m tools.research.cache.replay law.ids.csv.gz --policies lru,lfru,belady,learned --score-from 0.5
    python -m tools.research.cache.replay FILE --policies learned,nextuse --next-use EXPORT

`gap_closed` starts from the best of LRU, LFU and LFRU.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

from edgemoe.errors import ConfigError, EdgemoeError
from edgemoe.replay.replay_command import BOUND, Row, add_arguments, machine_of, replay_all, row_of, show
from edgemoe.replay.replay_policies import MAKERS as SERVED
from edgemoe.replay.replay_policies import PolicyMaker
from edgemoe.replay.trace import Trace
from tools.research.cache import libcachesim
from tools.research.cache.compared_caches import CyclicEWMA, RandomPolicy

BASELINES = ("lru", "lfu", "lfru")
MAKERS: dict[str, PolicyMaker] = {
    "random": lambda trace, batch: RandomPolicy(trace.layers, trace.experts),
    "ewma": lambda trace, batch: CyclicEWMA(trace.layers, trace.experts, trace.top_k),
}


def nextuse(directory: Path) -> PolicyMaker:
    """Returns the maker of `learned` with the exported network in `directory`. Raises ConfigError if there is no
    export.
    """
    import torch  # takes seconds

    from tools.research.cache.next_use.model import read_export
    from tools.research.cache.next_use.network import NetworkPolicy

    torch.set_num_threads(1)  # its products are small
    try:
        network = read_export(directory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return lambda trace, batch: NetworkPolicy(network, trace.layers, trace.experts, trace.top_k)


def replay_more(options: argparse.Namespace) -> tuple[list[Row], Trace]:
    """Returns a row for each capacity and policy, in the order of the options. Raises ConfigError, StoreError."""
    if "nextuse" in options.policies and not options.next_use:
        raise ConfigError("the policy nextuse needs a trained network: name its export with --next-use")
    makers = {**MAKERS, **({"nextuse": nextuse(options.next_use)} if options.next_use else {})}
    ours = copy.copy(options)
    known = [name for name in options.policies if name in makers or name in SERVED]
    ours.policies = list(dict.fromkeys([*known, *BASELINES, BOUND]))
    rows, trace = replay_all(ours, makers, BASELINES)
    found = {(row["capacity"], row["policy"]): row for row in rows}
    for name in options.policies:
        if name not in known:
            found |= _library_rows(name, trace, found, options)
    return [found[share, name] for share in options.capacity for name in options.policies], trace


def _library_rows(
    name: str, trace: Trace, found: dict[tuple[float, str], Row], options: argparse.Namespace
) -> dict[tuple[float, str], Row]:
    """Returns the rows of one of libcachesim's policies, by capacity and name."""
    machine = machine_of(options, trace)
    if machine.layer_bytes:
        raise ConfigError(f"libcachesim's policies know one size of experts; replay {name!r} with one")
    slots = [max(1, round(share * trace.layers * trace.experts)) for share in options.capacity]
    metrics = libcachesim.replay(trace, name, slots, options.batch, options.score_from, machine.expert_bytes)
    rows = {}
    for share, each in zip(options.capacity, metrics, strict=True):
        best = min(found[share, baseline]["bytes_missed"] for baseline in BASELINES)
        rows[share, name] = row_of(share, name, each, (best, found[share, BOUND]["bytes_missed"]), options)
    return rows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.research.cache.replay", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__
    )
    add_arguments(parser)
    parser.set_defaults(policies=[*BASELINES, BOUND, "ewma", "learned"])
    parser.add_argument("--next-use", type=Path, metavar="DIR", help="export of a trained network, for nextuse")
    options = parser.parse_args(argv)
    show(*replay_more(options), options)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except EdgemoeError as error:
        sys.exit(str(error))

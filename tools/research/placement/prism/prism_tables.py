"""Tables of a log, with the figures of [Prism] beside ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tools.research.placement.prism.models import SETTINGS, STAND_INS, Model
from tools.research.placement.prism.moving import moving_table
from tools.research.placement.prism.plans import METHODS, NODES
from tools.research.placement.prism.prism_runs import Record
from tools.research.placement.prism.profile import Profile, frequencies, geometry_of, overlap, skew

# total average of [Prism, Table II], % against EPLB: DeepSeek-V2-Lite, Mixtral by BIG-bench; the same by MultiData
PAPER = {
    "uniform": ("+126.6", "+135.2", "+105.3", "+16.7"),
    "redundance": ("+36.8", "+124.5", "+18.6", "+5.8"),
    "smartmoe": ("+102.8", "+6.5", "+99.4", "+26.6"),
    "eplb": ("0", "0", "0", "0"),
    "published": ("-30.6", "-3.2", "-11.0", "-2.0"),
}


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def head(*cells: object) -> Iterator[str]:
    yield ""
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def skew_tables(model: Model, profile: Profile) -> Iterator[str]:
    """Yields lines on the skew of each task and layer [Prism, Fig. 2 and 3]."""
    experts = geometry_of(model.store).experts
    found = {task: frequencies(profile.seen[task], experts) for task in model.tasks}
    yield from head(
        f"{model.name}: task",
        "stands for",
        "hottest quarter's calls: mean",
        "least layer",
        "most",
        "alike others",
    )
    for setting in SETTINGS:
        for task in model.tasks_of(setting):
            shares = skew(found[task])
            alike = np.mean([overlap(found[task], found[other]) for other in model.tasks_of(setting) if other != task])
            cells = (shares.mean(), shares.min(), shares.max(), alike)
            yield row(task, STAND_INS.get(task, ""), *(f"{each:.3f}" for each in cells))


def tables(records: Sequence[Record]) -> Iterator[str]:
    """Yields all tables that the log has records for."""
    for part, table in (
        ("methods", methods_tables),
        ("migration", migration_table),
        ("long", migration_table),
        ("redirection", redirection_table),
        ("share", share_table),
        ("moving", moving_table),
    ):
        if some := [record for record in records if record["part"] == part]:
            yield f"\n**{part}**"
            yield from table(some)


def mean_s(record: Record, node: str = "") -> float:
    """Returns the mean latency of a box's requests, or of all."""
    return float(np.mean([took for name in NODES if node in ("", name) for _, took in record["latency"][name]]))


def local(record: Record, since_s: float = 0.0, until_s: float = np.inf) -> float:
    """Returns the share of experts that boxes computed locally."""
    samples = [np.zeros(len(record["samples"][0])), *map(np.array, record["samples"])]
    inside = [each for each in samples if since_s <= each[0] <= until_s]
    total, remote = (float((inside[-1] - inside[0])[which::2].sum()) for which in (1, 2))
    return 1 - remote / max(total, 1.0)


def held_back(record: Record) -> str:
    """Returns the share of periods in which each box was throttled."""
    boxes = record["boxes"]
    return " / ".join(f"{boxes[node]['nr_throttled'] / max(1, boxes[node]['nr_periods']):.2f}" for node in NODES)


def asked_and_wrong(records: Sequence[Record]) -> str:
    wrong, complete, of = (sum(record[key] for record in records) for key in ("wrong", "complete", "of"))
    return f"{wrong} of {of}" + (f", {of - complete} failed" if of != complete else "")


def methods_tables(records: Sequence[Record]) -> Iterator[str]:
    """Yields a table for each model and setting: seconds of a request, the seeds' mean and half their range."""
    for model, setting in itertools.product(dict.fromkeys(r["model"] for r in records), SETTINGS):
        mine = [record for record in records if record["model"] == model and record["settings"] == [setting]]
        by = {method: [record for record in mine if record["method"] == method] for method in METHODS}
        base = {record["seed"]: mean_s(record) for record in by["eplb"]}
        if mine:
            yield from head(
                f"{model}, {setting}",
                "server 1",
                "2",
                "3",
                "all",
                "against EPLB",
                "paper",
                "local",
                "foretold",
                "held back",
                "wrong",
            )
        for method, runs in by.items():
            if not runs:
                continue
            boxes = (f"{np.mean([mean_s(record, node) for record in runs]):.3f}" for node in NODES)
            means = [mean_s(record) for record in runs]
            against = [100 * (mean_s(r) / base[r["seed"]] - 1) for r in runs if r["seed"] in base]
            change = f"{np.mean(against):+.1f} ± {np.ptp(against) / 2:.1f} %" if against else ""
            paper = PAPER.get(method, ("",) * 4)[2 * SETTINGS.index(setting) + (model == "demo")]
            yield row(
                method,
                *boxes,
                f"{np.mean(means):.3f} ± {np.ptp(means) / 2:.3f}",
                change,
                paper,
                f"{np.mean([local(record) for record in runs]):.3f}",
                f"{np.mean([1 - record['foretold'][0]['remote_share'] for record in runs]):.3f}",
                held_back(runs[0]),
                asked_and_wrong(runs),
            )


def migration_table(records: Sequence[Record]) -> Iterator[str]:
    """Yields seconds of a request before and after the change, and the local compute ratio at the end of both."""
    yield from head(
        "method",
        "migrates",
        "before",
        "after",
        "all",
        "local, end of before",
        "end of after",
        "plans",
        "held back",
        "wrong",
    )
    for record in records:
        changes_s = record["begins_s"][1]
        whole = [pair for node in NODES for pair in record["latency"][node]]
        parts = [np.mean([took for at, took in whole if (at >= changes_s) == after]) for after in (False, True)]
        ends_s = record["samples"][-1][0]
        yield row(
            f"{record['model']}, {record['method']}",
            migrates(record),
            *(f"{part:.3f}" for part in parts),
            f"{mean_s(record):.3f}",
            f"{local(record, 0.7 * changes_s, changes_s):.3f}",
            f"{local(record, changes_s + 0.7 * (ends_s - changes_s)):.3f}",
            len(record["plans"]),
            held_back(record),
            asked_and_wrong([record]),
        )


def migrates(record: Record) -> str:
    return f"every {record['migrate_s']:g} s" if record["migrate_s"] else "no"


def redirection_table(records: Sequence[Record]) -> Iterator[str]:
    """Yields the table of redirection [Prism, Table I]."""
    yield from head("method", "server 1", "2", "3", "all", "read, MB", "passed on", "held back", "wrong")
    for record in records:
        boxes = record["boxes"]
        yield row(
            record["method"],
            *(f"{mean_s(record, node):.3f}" for node in NODES),
            f"{mean_s(record):.3f}",
            f"{sum(boxes[node]['read_mb'] for node in NODES):.0f}",
            f"{sum(boxes[node]['forwarded'] for node in NODES):.0f}",
            held_back(record),
            asked_and_wrong([record]),
        )
    yield "\n[Prism, Table I], seconds: alone 9.14, 4.77, 3.18, 5.19; redirected 8.60, 4.77, 3.10, 5.03; experts at"
    yield "random, computed where they are, 4.96, 4.34, 3.40, 4.11."


def share_table(records: Sequence[Record]) -> Iterator[str]:
    """Yields the table of remote experts [Prism, Fig. 5]."""
    yield from head("model", "remote experts", "a layer, ms", "a request, s", "wrong")
    for record in records:
        cells = record["layer_ms"], record["request_s"], record["wrong"]
        yield row(record["model"], f"{record['remote']:.3f}", *cells)

"""Tables of a log: means over rounds, and changes within rounds, with 95 % intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tools.bench.stats import interval
from tools.research.placement.prism.prism_tables import head, row
from tools.research.routing.live.sitting import Record

TIMES = ("ttft_mean_s", "ttft_p99_s", "tpot_p50_s", "tpot_mean_s", "tpot_p99_s")
HEADS = ("TTFT mean, ms", "p99", "TPOT median, ms", "mean", "p99")


def tables(records: Sequence[Record]) -> Iterator[str]:
    """Yields all tables that the log has records for."""
    for part, table in (
        ("same", same_table),
        ("affinity", affinity_table),
        ("costs", costs_table),
        ("load", load_table),
        ("apart", apart_table),
        ("terms", terms_table),
    ):
        if some := [record for record in records if record["part"] == part]:
            yield f"\n**{part}**"
            yield from table(some)


def variants(records: Sequence[Record], **key: object) -> dict[str, list[Record]]:
    """Returns each variant's matching records, by round."""
    mine = [record for record in records if key.items() <= record.items()]
    found: dict[str, list[Record]] = {}
    for record in sorted(mine, key=lambda record: record.get("round", 0)):
        found.setdefault(record["variant"], []).append(record)
    return found


def each_of(records: Sequence[Record], name: str) -> list[object]:
    return list(dict.fromkeys(record[name] for record in records))


def milliseconds(records: Sequence[Record], name: str) -> str:
    """Formats each round's figure in milliseconds."""
    return ", ".join(f"{1e3 * record[name]:.3g}" for record in records)


def change(ours: Sequence[Record], base: Sequence[Record], name: str) -> str:
    """Returns the difference of a figure in per cent, round by round."""
    before = {record["round"]: record[name] for record in base}
    found = [100 * (record[name] / before[record["round"]] - 1) for record in ours if before.get(record["round"])]
    if len(found) < 2:
        return "".join(f"{one:+.1f} %" for one in found)
    mean, half = interval(found)
    return f"{mean:+.1f} ± {half:.1f} %"


def complete(records: Sequence[Record]) -> str:
    whole, of = (sum(record[name] for record in records) for name in ("complete", "of"))
    return f"{whole} of {of}"


def same_table(records: Sequence[Record]) -> Iterator[str]:
    yield from head("model", "rule", "right", "offered", "granted", "with a signature", "handed over", "where and why")
    for record in records:
        cells = (f"{record[name]:.0f}" for name in ("offered", "granted", "with a signature", "handed over"))
        where = ", ".join(f"{key} {count:.0f}" for key, count in record["routes"].items())
        yield row(record["model"], record["variant"], f"{record['right']} of {record['of']}", *cells, where)


def affinity_table(records: Sequence[Record]) -> Iterator[str]:
    yield from head("rule", "hits, tokens", "share", "all there is", "TTFT, ms")
    for record in records:
        cells = record["share"], record["most"], f"{1e3 * record['ttft_mean_s']:.1f}"
        yield row(record["variant"], f"{record['hit_tokens']:.0f}", *cells)


def costs_table(records: Sequence[Record]) -> Iterator[str]:
    yield from head(
        "model", "a step, ms", "a token of prompt", "a sequence", "before the first token", "answered a second"
    )
    for record in records:
        cells = (f"{1e3 * record[name]:.3g}" for name in ("fixed_s", "prefill_s", "decode_s", "front_s"))
        yield row(record["model"], *cells, f"{record['most_per_s']:.1f}")


def load_table(records: Sequence[Record]) -> Iterator[str]:
    """Yields each round's figures; the simulator has one."""
    yield from head("model", "rule", "a second", *HEADS, "complete")
    for model in each_of(records, "model"):
        for variant, rows in variants(records, model=model).items():
            cells = (milliseconds(rows, name) for name in TIMES)
            yield row(model, variant, f"{rows[0]['per_s']:.1f}", *cells, complete(rows) if "of" in rows[0] else "")


def apart_table(records: Sequence[Record]) -> Iterator[str]:
    """Yields each round's figures, and the difference of apart from mixed."""
    yield from head("model", "load", "boxes", *HEADS, "handed over", "failed", "complete")
    for model in each_of(records, "model"):
        for share in each_of(records, "share"):
            found = variants(records, model=model, share=share)
            for variant, rows in found.items():
                handed, failed = (
                    sum(one[name] for one in rows)
                    for name in ("edgemoe_handed_over_requests_total", "edgemoe_kv_pull_failures_total")
                )
                cells = (milliseconds(rows, name) for name in TIMES)
                yield row(model, share, variant, *cells, f"{handed:.0f}", f"{failed:.0f}", complete(rows))
            if len(found) == 2:
                cells = (change(found["apart"], found["mixed"], name) for name in TIMES)
                yield row(model, share, "apart against mixed", *cells, "", "", "")


def terms_table(records: Sequence[Record]) -> Iterator[str]:
    """Yields means of the rounds, and the difference of each from a leader that ignores experts."""
    figures = {
        "experts_a_step": "experts a step",
        "experts_a_token": "a token",
        "batch": "batch",
        "took_s": "all, s",
        "misses": "misses",
        "read_mb": "read, MB",
        "step_ms": "step, ms",
        "ttft_mean_s": "TTFT mean, s",
        "tpot_p50_s": "TPOT median, s",
        "tpot_mean_s": "mean",
        "tpot_p99_s": "p99",
    }
    yield from head("model", "come", "knows of experts", *figures.values(), "offered, of", "with a signature")
    for model, load in itertools.product(each_of(records, "model"), each_of(records, "at")):
        found = variants(records, model=model, at=load)
        for variant, rows in found.items():
            cells = (f"{np.mean([one[name] for one in rows]):.4g}" for name in figures)
            offered, signed, of = (sum(one[name] for one in rows) for name in ("offered", "with a signature", "of"))
            yield row(model, load, variant, *cells, f"{offered:.0f} of {of}", f"{signed:.0f}")
        for variant in [each for each in found if each != "neither"] if "neither" in found else ():
            cells = (change(found[variant], found["neither"], name) for name in figures)
            yield row(model, load, f"{variant} against neither", *cells, "", "")

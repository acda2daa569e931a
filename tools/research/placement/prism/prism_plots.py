"""Plots of a log: latency by method, local compute ratio over time, migration, a layer by remote experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tools.research.placement.prism.models import SETTINGS
from tools.research.placement.prism.plans import METHODS, NODES
from tools.research.placement.prism.prism_runs import Record
from tools.research.placement.prism.prism_tables import mean_s, migrates

WINDOW = 5  # samples per ratio


def over_time(record: Record) -> tuple[Any, Any]:
    """Returns times, and the share of experts that boxes computed locally in the seconds before each."""
    samples = np.array(record["samples"])
    before, after = samples[:-WINDOW], samples[WINDOW:]
    grown = after - before
    return after[:, 0], 1 - grown[:, 2::2].sum(axis=1) / np.maximum(1, grown[:, 1::2].sum(axis=1))


def latency(records: Sequence[Record]) -> Figure:
    """Plots mean seconds of a request by method, with whiskers over the seeds."""
    models = list(dict.fromkeys(record["model"] for record in records))
    figure = Figure(figsize=(11, 3.2 * len(models)), layout="constrained")
    for line, model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        for axes, setting in zip(line, SETTINGS, strict=True):
            mine = [r for r in records if r["model"] == model and r["settings"] == [setting]]
            for method in (each for each in METHODS if any(r["method"] == each for r in mine)):
                means = [mean_s(record) for record in mine if record["method"] == method]
                low, high = np.mean(means) - min(means), max(means) - np.mean(means)
                axes.barh(method, np.mean(means), xerr=[[low], [high]], color="tab:blue", capsize=2)
            axes.set(title=f"{model}, {setting}", xlabel="mean seconds of a request")
            axes.grid(alpha=0.3, axis="x")
            axes.invert_yaxis()
    return figure


def ratio(records: Sequence[Record]) -> Figure:
    """Plots the local compute ratio over time by method, for the first seed [Prism, Fig. 6]."""
    models = list(dict.fromkeys(record["model"] for record in records))
    figure = Figure(figsize=(11, 3.2 * len(models)), layout="constrained")
    for line, model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        for axes, setting in zip(line, SETTINGS, strict=True):
            for record in records:
                if (record["model"], record["settings"], record["seed"]) == (model, [setting], 0):
                    axes.plot(*over_time(record), label=record["method"])
            axes.set(title=f"{model}, {setting}", xlabel="seconds", ylabel="computed at home", ylim=(0, 1))
            axes.grid(alpha=0.3)
    names = figure.axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(METHODS), fontsize=8)
    return figure


def migration(records: Sequence[Record]) -> Figure:
    """Plots local compute ratio and latency over time, with and without migration [Prism, Fig. 7]."""
    figure = Figure(figsize=(11, 4.0), layout="constrained")
    shares, seconds = figure.subplots(1, 2)
    for number, record in enumerate(records):
        name = f"{record['method']}, {migrates(record)}"
        shares.plot(*over_time(record), color=f"C{number}", label=name)
        pairs = sorted(tuple(pair) for node in NODES for pair in record["latency"][node])
        at_s, took_s = (np.array(each) for each in zip(*pairs, strict=True))
        many = max(1, len(pairs) // 30)
        bins = [(at_s[n : n + many].mean(), took_s[n : n + many].mean()) for n in range(0, len(pairs), many)]
        seconds.plot(*zip(*bins, strict=True), color=f"C{number}", label=name)
        for moment in (plan[0] for plan in record["plans"] if plan[0] > 0):
            shares.axvline(moment, color=f"C{number}", linestyle=":", linewidth=0.8)
    for axes, label in ((shares, "computed at home"), (seconds, "mean seconds of a request")):
        axes.axvline(records[0]["begins_s"][1], color="black", linewidth=0.8)
        axes.set(xlabel="seconds; the line is the change of what is asked", ylabel=label)
        axes.grid(alpha=0.3)
    shares.legend(fontsize=8)
    return figure


def remote(records: Sequence[Record]) -> Figure:
    """Plots a layer's milliseconds by the share of remote experts [Prism, Fig. 5]."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    for model in dict.fromkeys(record["model"] for record in records):
        points = sorted((r["remote"], r["layer_ms"]) for r in records if r["model"] == model)
        axes.plot(*zip(*points, strict=True), marker="o", label=model)
    axes.set(xlabel="share of experts computed elsewhere", ylabel="a layer of one token, ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


DRAWN: dict[str, tuple[str, Callable[[Sequence[Record]], Figure]]] = {
    "latency": ("methods", latency),
    "local": ("methods", ratio),
    "migration": ("migration", migration),
    "long": ("long", migration),
    "share": ("share", remote),
}


def draw(records: Sequence[Record], folder: Path) -> None:
    """Writes a PNG for each plot that the log has records for."""
    for name, (part, figure) in DRAWN.items():
        if some := [record for record in records if record["part"] == part]:
            figure(some).savefig(folder / f"prism_{name}.png", dpi=80)

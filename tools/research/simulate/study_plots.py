"""Plots of a study: mean seconds of a prompt, and local experts, against the varied setting [Prism, Fig. 8]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

AXES = {"scale": "GPUs", "bandwidth": "links, Mbit/s", "policies": "placement"}


def draw(study: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the plot as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    seconds, local = figure.subplots(1, 2)
    for line in dict.fromkeys(row["line"] for row in rows):
        points = [row for row in rows if row["line"] == line]
        places = [str(row["place"]) for row in points]
        spread = [row["spread_s"] / 2 for row in points]
        seconds.errorbar(places, [row["mean_s"] for row in points], yerr=spread, marker="o", capsize=3, label=line)
        local.plot(places, [row["local"] for row in points], marker="o", label=line)
    seconds.set_ylabel("mean seconds of a prompt")
    local.set_ylabel("share of experts computed at home")
    for axes in (seconds, local):
        axes.set_xlabel(AXES[study])
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", rotation=30 if study == "policies" else 0)
        axes.grid(alpha=0.3)
    seconds.legend()
    figure.savefig(path, dpi=100)

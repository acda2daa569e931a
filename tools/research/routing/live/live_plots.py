"""Plots of a log: live against simulated, and separate prefill against mixed boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tools.research.routing.live.live_load import LOADED
from tools.research.routing.live.live_tables import each_of, variants
from tools.research.routing.live.sitting import Record

SHOWN = {"ttft_mean_s": "mean TTFT, ms", "ttft_p99_s": "p99 TTFT, ms", "tpot_p50_s": "median TPOT, ms"}


def beside(records: Sequence[Record]) -> Figure:
    """Plots each round's figure by rule, and a bar for the simulator's."""
    models = each_of(records, "model")
    figure = Figure(figsize=(11, 3.0 * len(models)), layout="constrained")
    for line, model in zip(figure.subplots(len(models), len(SHOWN), squeeze=False), models, strict=True):
        found = variants(records, model=model)
        for axes, (name, label) in zip(line, SHOWN.items(), strict=True):
            for place, rule in enumerate(LOADED):
                live = [1e3 * record[name] for record in found.get(rule, ())]
                axes.plot([place] * len(live), live, "o", color="tab:blue", alpha=0.6)
                for record in found.get(f"{rule}, simulated", ()):
                    axes.plot([place - 0.3, place + 0.3], [1e3 * record[name]] * 2, color="black")
            axes.set(title=f"{model}", ylabel=label, ylim=(0, None), xlim=(-0.5, len(LOADED) - 0.5))
            axes.set_xticks(range(len(LOADED)), LOADED)
            axes.grid(alpha=0.3, axis="y")
    figure.suptitle("dots: rounds on daemons; bars: simulated", fontsize=9)
    return figure


def apart(records: Sequence[Record]) -> Figure:
    """Plots each round's two figures, joined."""
    settings = [(model, share) for model in each_of(records, "model") for share in each_of(records, "share")]
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
        for place, (model, share) in enumerate(settings):
            found = variants(records, model=model, share=share)
            for mixed, split in zip(found.get("mixed", ()), found.get("apart", ()), strict=False):
                pair = [1e3 * mixed[name], 1e3 * split[name]]
                axes.plot([3 * place, 3 * place + 1], pair, "o-", color=f"C{place}", alpha=0.6)
        places = [3 * place + at for place in range(len(settings)) for at in range(2)]
        axes.set_xticks(places, ["mixed", "apart"] * len(settings), rotation=60, fontsize=8)
        axes.set(ylabel=label, yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, axis="y")
    told = ", ".join(f"{model} at {share:.0%}" for model, share in settings)
    figure.suptitle(f"from left to right: {told} of what is answered at once", fontsize=9)
    return figure


DRAWN: dict[str, Callable[[Sequence[Record]], Figure]] = {"load": beside, "apart": apart}


def draw(records: Sequence[Record], folder: Path) -> None:
    """Writes a PNG for each plot that the log has records for."""
    for part, figure in DRAWN.items():
        if some := [record for record in records if record["part"] == part]:
            figure(some).savefig(folder / f"routing_{'live' if part == 'load' else part}.png", dpi=80)

"""The next-use network as a server and `edgemoe replay` read it: a second export, beside ScoutGate's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load

from edgemoe.experts.predict.next_use_model import NextUseNet, NextUseShape
from edgemoe.experts.predict.scoutgate.export import get, put

WEIGHTS, RECORD = "nextuse.safetensors", "nextuse.json"


def write(directory: Path, network: NextUseNet, model: dict[str, str], metrics: dict[str, Any]) -> None:
    """Writes an export; the JSON last, so that a half-written one is refused."""
    record = {"shape": network.shape.as_dict(), "model": model, "metrics": metrics}
    put(directory / WEIGHTS, directory / RECORD, network.state_dict(), record)


def read(directory: Path) -> NextUseNet:
    """Raises ValueError, saying what is wrong, where the directory holds no whole export of this format."""
    record, data = get(directory / WEIGHTS, directory / RECORD, "next-use network")
    try:
        network = NextUseNet(NextUseShape.from_dict(record["shape"]))
        network.load_state_dict(load(data))
        if not all(t.isfinite().all() for t in network.state_dict().values()):
            raise ValueError("it holds numbers that are not finite")
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds a next-use network that cannot be used: {error}") from error
    return network.eval().requires_grad_(False)

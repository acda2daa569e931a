"""Builds the cache policy that the settings name, and the forecasters of needed experts."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol

from edgemoe.config.settings import Settings
from edgemoe.errors import ConfigError
from edgemoe.experts.predict.controller import PredictionController, PredictorFiles
from edgemoe.experts.predict.next_use import Ids
from edgemoe.experts.predict.prefetch_planner import PrefetchRequests
from edgemoe.experts.predict.scoutgate_forecaster import ScoutGateForecaster, TokenEmbedding
from edgemoe.experts.predict.two_tier import TwoTierPolicy
from edgemoe.experts.tiers.residency import Residency
from edgemoe.store.manifest import Manifest
from edgemoe.types.experts import ExpertGeometry, LivePolicy, ServedModel
from edgemoe.types.step import StepMeta, StepRouting

log = logging.getLogger(__name__)
STATE = "%s.cache.safetensors"  # state learned by the cache, beside the store of that name
SCORES, COSTS = ".scoutgate.json", ".costs.json"  # scores of ScoutGate's forecasts, costs of loads, beside that


class PredictivePolicy(Protocol):
    """A cache policy that observes each step and plans fetches for the tiers' idle time."""

    @property
    def policy(self) -> LivePolicy: ...
    def attach(self, residency: Residency, loader: PrefetchRequests, geometry: ExpertGeometry) -> None: ...
    def on_step_begun(self, meta: StepMeta, ids: Ids) -> None: ...
    def observe(self, routing: StepRouting) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def close(self) -> None: ...


def predictive_policy(
    name: str,
    settings: Settings,
    geometry: ExpertGeometry,
    directory: Path,
    scoutgate: ScoutGateForecaster | None,
    kernels: Path | None,
) -> PredictivePolicy | None:
    """Returns the predictive policy of that name, with its saved state; None for another name.

    `kernels` keeps compiled code.
    """
    if name == "two-tier":
        return TwoTierPolicy(geometry, forecaster=scoutgate)
    if name != "learned":
        return None
    return PredictionController(
        geometry.layers,
        geometry.experts,
        geometry.top_k,
        kept=PredictorFiles(_state_file(settings, directory), kernels),
        forecaster=scoutgate,
    )


def scoutgate_for(
    settings: Settings, manifest: Manifest, served: ServedModel, embedding: TokenEmbedding
) -> ScoutGateForecaster | None:
    """Returns the forecaster, idle with a warning where its export cannot be used; None if none is configured."""
    if not settings.cache.scoutgate:
        return None
    tokenizer = next((file.xxh3_128 for file in manifest.files if file.file == "tokenizer.json"), "")
    state = _state_file(settings, Path(settings.model.path)).with_suffix(SCORES)
    scoutgate = ScoutGateForecaster(served, tokenizer, embedding, state_file=state)
    try:
        scoutgate.load(Path(settings.cache.scoutgate))
    except ConfigError as error:
        log.warning(f"serving without ScoutGate: {error}")
    return scoutgate


def costs_file(settings: Settings) -> Path:
    """Returns the file that keeps the measured costs of expert transfers."""
    return _state_file(settings, Path(settings.model.path)).with_suffix(COSTS)


def _state_file(settings: Settings, directory: Path) -> Path:
    """Returns the file that is named, else one beside the store, or where stores are kept if that is read-only."""
    if settings.cache.state_file:
        return Path(settings.cache.state_file)
    beside = directory.absolute().with_name(STATE % directory.name)
    return beside if os.access(beside.parent, os.W_OK) else Path(settings.model.store_dir) / beside.name

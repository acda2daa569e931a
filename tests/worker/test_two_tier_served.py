"""The source's rules in an engine: they observe steps, plan in idle time, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import tiny_checkpoint
from support.kept import STORES
from support.tiers_kit import running

from edgemoe.config.settings import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    MemorySettings,
    ModelSettings,
    Settings,
)
from edgemoe.store.manifest import Manifest, spec_of
from edgemoe.store.packer import pack
from edgemoe.telemetry.metrics import LEARNED_MOVES
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.worker.assemble import assemble


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pack(tiny_checkpoint("qwen3_moe", folder / "checkpoint"), folder / "store")
    return folder / "store"


def said(store: Path, policy: str) -> tuple[list[int], dict[str, float]]:
    """Serves one request with half of the experts on a device; returns its tokens and the policy's counts."""
    geometry = spec_of(Manifest.load(store)).geometry
    settings = Settings(
        model=ModelSettings(path=str(store), store_dir=str(STORES)),
        memory=MemorySettings(kv_bytes=4 << 20, ram_bytes=geometry.all_bytes),
        device=(DeviceSettings(kind="emulated", expert_bytes=geometry.all_bytes // 2, link_bytes_per_s=2e9),),
        engine=EngineSettings(threads=1),
        cache=CacheSettings(policy=policy),
    )
    emitted: list[Emission] = []
    assembly = assemble(settings, emitted.extend, lambda *_: None)
    with running(assembly.tiers, fill=True):
        loop = assembly.engine.loop
        sampling = Sampling(temperature=0.0, max_tokens=60)
        loop.submit(Request(id="r", prompt=(5, 6, 7, 8, 9), sampling=sampling, seed=1), (), 1, 60.0)
        while not any(one.finish for one in emitted):
            loop.step()
        assert assembly.controller is None or policy == "two-tier"
        metrics = assembly.controller.metrics() if assembly.controller is not None else {}
    assembly.close()
    return [one.token for one in emitted if one.token is not None], metrics


def test_the_sources_rules_plan_and_change_no_token(store: Path) -> None:
    tokens, _ = said(store, "lru")
    again, metrics = said(store, "two-tier")
    assert again == tokens
    assert len(tokens) == 60
    assert metrics[LEARNED_MOVES] > 0

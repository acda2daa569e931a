"""The memory that the front grants a model is enough for the budgets that its engine works out with it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.front_kit import SCRIPTED, http_client, ready, settings_for
from support.kept import STORES
from support.waiting import until

from edgemoe.config.budgets import resolve_budgets
from edgemoe.config.settings import EngineSettings, MemorySettings, ModelSettings, NamedModelSettings, Settings
from edgemoe.demo import model_path
from edgemoe.front.engine_turns import ModelFacts, facts_of, limited, needed_memory
from edgemoe.front.main import Front
from edgemoe.store.manifest import Manifest, spec_of
from edgemoe.store.packer import ensure_store
from edgemoe.types.machine import Machine
from edgemoe.worker.model_preparation import needs_of

MIB, GIB = 1 << 20, 1 << 30
MACHINE = Machine(64 * GIB, 60 * GIB, 8, None)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return facts_of(Settings(model=ModelSettings(path=str(ensure_store(model_path(), STORES)))))


@given(
    ram_bytes=st.sampled_from([0, MIB, 8 * MIB, 32 * MIB]),
    kv_bytes=st.sampled_from([0, MIB, 16 * MIB, GIB]),
    sequences=st.sampled_from([1, 4, 64]),
)
def test_granted_memory_holds_stated_and_unstated_budgets(
    facts: ModelFacts, ram_bytes: int, kv_bytes: int, sequences: int
) -> None:
    settings = Settings(
        memory=MemorySettings(ram_bytes=ram_bytes, kv_bytes=kv_bytes), engine=EngineSettings(max_sequences=sequences)
    )
    memory = needed_memory(settings, facts)
    manifest = Manifest.load(facts.path)
    needs = needs_of(spec_of(manifest), manifest.dense.bytes)
    budgets = resolve_budgets(limited(settings, memory), MACHINE, needs)
    assert budgets.dense_bytes + budgets.kv_bytes + budgets.ram_bytes <= memory.ram_bytes
    assert budgets.all_fit == (not ram_bytes or ram_bytes > 11 * MIB)


async def test_a_model_has_room_beside_one_that_was_alone_and_states_no_limit(
    tmp_path: Path, facts: ModelFacts
) -> None:
    before = settings_for(tmp_path, Path(facts.path))
    settings = {"now": before}
    front = Front(before, SCRIPTED, env={}, reread=lambda: settings["now"])
    task = asyncio.ensure_future(front.serve())
    async with http_client(before) as client:
        await until(lambda: task.done() or ready(front))
        named = {"second": NamedModelSettings(path=facts.path)}
        settings["now"] = msgspec.structs.replace(before, models=named)
        assert (await client.post("/reload")).status_code == 200
        asked = await client.post("/v1/completions", json={"model": "second", "prompt": "x", "max_tokens": 3})
        assert asked.json()["model"] == "second"
    front.stop()
    front.stop()
    await task


def test_facts_of_a_missing_store_need_nothing() -> None:
    missing = facts_of(Settings(model=ModelSettings(path="/nowhere/at/all", store_dir="/nowhere")))
    assert missing.info is None
    assert dataclasses.replace(missing, path="") == ModelFacts("")

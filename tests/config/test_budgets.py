from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgemoe.config.budgets import LEAST_ROWS, TYPICAL_TOKENS, ModelNeeds, resolve_budgets
from edgemoe.config.settings import CacheSettings, DeviceSettings, EngineSettings, MemorySettings, Settings
from edgemoe.errors import CapacityError
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.machine import Gpu, Machine
from edgemoe.types.step import BLOCK_TOKENS, LEAST_STATE_SLOTS, least_blocks

GIB = 1 << 30
EXPERTS = ExpertGeometry(layers=20, experts=100, top_k=8, hidden=1000, width=833, dtype="bfloat16")  # of 5 MB each
NEEDS = ModelNeeds(dense_bytes=GIB, kv_bytes_per_token=1 << 16, experts=EXPERTS, context_tokens=8192)
HOST = Machine(ram_total_bytes=24 * GIB, ram_available_bytes=20 * GIB, cpus=8, memlock_bytes=None)
GPU_HOST = Machine(24 * GIB, 20 * GIB, 8, None, (Gpu(0, "A", 24 * GIB, 8 * GIB), Gpu(1, "B", 24 * GIB, 6 * GIB)))


def settings(device: DeviceSettings | None = None, *, contained: bool = True, **memory: int) -> Settings:
    return Settings(
        device=(device or DeviceSettings(),),
        memory=MemorySettings(**memory),
        cache=CacheSettings(containment=contained),
    )


def test_on_a_cpu_everything_together_leaves_the_headroom_free() -> None:
    found = resolve_budgets(settings(headroom_bytes=12 * GIB), HOST, NEEDS)
    assert (found.devices[0].kind, found.devices[0].expert_bytes) == ("cpu", 0)
    assert found.dense_bytes + found.kv_bytes + found.ram_bytes <= 8 * GIB
    assert found.ram_bytes % EXPERTS.stride_bytes(0) == 0
    assert found.threads == 8


def test_by_default_every_sequence_has_room_for_a_typical_request() -> None:
    needs = dataclasses.replace(NEEDS, kv_bytes_per_token=1 << 14)
    found = resolve_budgets(settings(), HOST, needs)
    assert found.kv_bytes == EngineSettings().max_sequences * TYPICAL_TOKENS * needs.kv_bytes_per_token


ROWS = dataclasses.replace(NEEDS, table_bytes=40 * GIB, row_bytes=21 << 10)


@pytest.mark.parametrize("machine", [HOST, GPU_HOST])
@pytest.mark.parametrize(("stated", "expected"), [(0, None), (1 << 20, 1 << 20), (100 * GIB, 40 * GIB)])
def test_a_table_stays_on_disk_and_few_of_its_rows_take_memory(
    machine: Machine, stated: int, expected: int | None
) -> None:
    if expected and expected > GIB:  # more than the machine has
        with pytest.raises(CapacityError):
            resolve_budgets(settings(row_cache_bytes=stated), machine, ROWS)
        return
    with_table, without = (
        resolve_budgets(settings(row_cache_bytes=stated, kv_bytes=GIB), machine, each) for each in (ROWS, NEEDS)
    )
    least, most = (expected, expected) if expected else (LEAST_ROWS * ROWS.row_bytes, machine.ram_available_bytes // 60)
    assert least <= with_table.row_cache_bytes <= most
    assert with_table.ram_bytes <= without.ram_bytes
    assert "(40.0 GiB stay on disk)" in with_table.lines()[0]
    assert (without.row_cache_bytes, "disk" in without.lines()[0]) == (0, False)


def test_a_small_table_takes_no_more_memory_than_it_has() -> None:
    small = dataclasses.replace(ROWS, table_bytes=1 << 20)
    assert resolve_budgets(settings(), HOST, small).row_cache_bytes == 1 << 20


STATE = 60 << 20


@pytest.mark.parametrize("machine", [HOST, GPU_HOST])
def test_states_of_sequences_are_counted_and_leave_the_headroom_free(machine: Machine) -> None:
    needs = dataclasses.replace(NEEDS, state_bytes=STATE)
    found = resolve_budgets(settings(headroom_bytes=12 * GIB), machine, needs)
    assert found.state_bytes == found.state_slots * STATE
    assert LEAST_STATE_SLOTS < found.state_slots <= 3 * 64 + 1
    experts = found.devices[0].expert_bytes if machine.gpus else found.ram_bytes
    assert found.dense_bytes + found.kv_bytes + found.state_bytes + experts <= (7 if machine.gpus else 8) * GIB
    assert found.kv_bytes >= found.state_bytes
    assert f"({found.state_slots} slots)" in found.lines()[0]


def test_a_stated_budget_holds_blocks_and_states_or_is_refused() -> None:
    needs = dataclasses.replace(NEEDS, state_bytes=STATE)
    found = resolve_budgets(settings(kv_bytes=700 << 20), HOST, needs)
    assert found.state_slots == 5
    assert found.kv_bytes == (700 << 20) - 5 * STATE
    few = resolve_budgets(
        Settings(engine=EngineSettings(max_sequences=1), memory=MemorySettings(kv_bytes=GIB)), HOST, needs
    )
    assert few.state_slots == 4
    with pytest.raises(CapacityError, match=r"keys, values and states: .* set memory\.kv_bytes"):
        resolve_budgets(settings(kv_bytes=3 * STATE), HOST, needs)


@pytest.mark.parametrize(("way", "tokens"), [("recompute", 1600), ("park", 1200)])
def test_on_a_cpu_memory_of_paused_sequences_is_not_promised_to_the_context(way: Any, tokens: int) -> None:
    chosen = Settings(engine=EngineSettings(preemption=way), memory=MemorySettings(kv_bytes=100 << 20))
    found = resolve_budgets(chosen, HOST, NEEDS)
    assert (found.context_tokens, found.kv_bytes) == (tokens, 100 << 20)
    assert resolve_budgets(chosen, GPU_HOST, NEEDS).context_tokens == 1600


def test_a_slab_never_exceeds_the_model() -> None:
    found = resolve_budgets(settings(), HOST, NEEDS)
    assert found.ram_bytes == EXPERTS.all_bytes


def test_auto_takes_the_first_gpu_and_keeps_its_headroom() -> None:
    found = resolve_budgets(settings(), GPU_HOST, NEEDS)
    assert found.devices[0].kind == "cuda:0"
    assert found.dense_bytes + found.kv_bytes + found.devices[0].expert_bytes <= 7 * GIB
    assert found.containment


def test_encoded_weights_are_counted_as_a_gpu_holds_them_which_is_decoded() -> None:
    needs = dataclasses.replace(NEEDS, decoded_bytes=2 * GIB)
    assert resolve_budgets(settings(), HOST, needs).dense_bytes == GIB
    found = resolve_budgets(settings(), GPU_HOST, needs)
    assert found.dense_bytes == 2 * GIB
    assert found.dense_bytes + found.kv_bytes + found.devices[0].expert_bytes <= 7 * GIB


def test_a_second_gpu_holds_experts_only() -> None:
    two = Settings(device=(DeviceSettings(kind="cuda:0"), DeviceSettings(kind="cuda:1")))
    found = resolve_budgets(two, GPU_HOST, NEEDS)
    first, second = (device.expert_bytes for device in found.devices)
    assert second <= 5 * GIB
    assert first + found.kv_bytes + found.dense_bytes <= 7 * GIB


def test_a_missing_gpu_is_named_beside_the_present_ones() -> None:
    with pytest.raises(CapacityError, match=r"no cuda:7 .* cuda:0 \(A\), cuda:1 \(B\)"):
        resolve_budgets(settings(DeviceSettings(kind="cuda:7")), GPU_HOST, NEEDS)


def test_the_slab_of_an_emulated_device_counts_as_ram() -> None:
    device = DeviceSettings(kind="emulated", expert_bytes=GIB, link_bytes_per_s=8e9)
    free = settings(device, headroom_bytes=12 * GIB)
    with_slab, without = (
        resolve_budgets(free, HOST, NEEDS),
        resolve_budgets(settings(headroom_bytes=12 * GIB), HOST, NEEDS),
    )
    assert with_slab.devices[0].expert_bytes == GIB // EXPERTS.stride_bytes(0) * EXPERTS.stride_bytes(0)
    assert without.ram_bytes - with_slab.ram_bytes > 0.7 * GIB


def test_a_stated_budget_is_kept_in_whole_slots_and_blocks() -> None:
    found = resolve_budgets(settings(ram_bytes=GIB, kv_bytes=100 << 20), HOST, NEEDS)
    assert found.ram_bytes == GIB // EXPERTS.stride_bytes(0) * EXPERTS.stride_bytes(0)
    assert found.kv_bytes == 100 << 20


def test_a_stated_budget_that_does_not_fit_is_refused_with_the_missing_bytes() -> None:
    with pytest.raises(CapacityError, match=r"9\.3 GiB needed, .* missing; set a lower memory\.ram_bytes"):
        resolve_budgets(settings(ram_bytes=100 * GIB, headroom_bytes=12 * GIB), HOST, NEEDS)


def test_a_budget_below_one_slot_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"set memory\.ram_bytes"):
        resolve_budgets(settings(ram_bytes=4096), HOST, NEEDS)


def test_a_machine_without_room_for_dense_weights_is_refused_with_their_size() -> None:
    large = dataclasses.replace(NEEDS, dense_bytes=40 * GIB)
    for machine, remedy in ((HOST, "--dense int8"), (GPU_HOST, r"set device\.0\.kind=cpu")):
        with pytest.raises(CapacityError, match=rf"dense weights, .*: 40\.\d GiB needed, .* GiB there, .*{remedy}"):
            resolve_budgets(settings(), machine, large)


def test_stated_containment_needs_ram_for_experts_of_vram() -> None:
    device = DeviceSettings(kind="emulated", expert_bytes=GIB, link_bytes_per_s=8e9)
    with pytest.raises(CapacityError, match=r"cache\.containment=false"):
        resolve_budgets(settings(device, ram_bytes=GIB // 2), HOST, NEEDS)
    assert not resolve_budgets(settings(device, ram_bytes=GIB // 2, contained=False), HOST, NEEDS).containment


def test_containment_is_given_up_where_ram_is_the_smaller_and_nothing_was_stated() -> None:
    little = Machine(4 * GIB, 3 * GIB, 8, None, (Gpu(0, "A", 24 * GIB, 20 * GIB),))
    assert not resolve_budgets(settings(), little, NEEDS).containment


def test_it_is_told_whether_the_fastest_tier_holds_every_expert() -> None:
    assert resolve_budgets(settings(), HOST, NEEDS).all_fit
    assert not resolve_budgets(settings(ram_bytes=EXPERTS.all_bytes - EXPERTS.stride_bytes(0)), HOST, NEEDS).all_fit
    device = DeviceSettings(kind="emulated", expert_bytes=GIB, link_bytes_per_s=8e9)
    assert not resolve_budgets(settings(device), HOST, NEEDS).all_fit


def test_the_context_is_cut_to_the_kv_memory() -> None:
    found = resolve_budgets(settings(kv_bytes=1000 << 16), HOST, NEEDS)
    assert found.context_tokens == 992
    shorter = Settings(engine=EngineSettings(context_tokens=512))
    assert resolve_budgets(shorter, HOST, NEEDS).context_tokens == 512


def test_the_printed_lines_name_every_tier() -> None:
    text = "\n".join(resolve_budgets(settings(), GPU_HOST, NEEDS).lines())
    assert "RAM experts" in text
    assert "cuda:0 experts" in text
    assert "KV" in text


def test_a_limit_bounds_weights_experts_and_kv_together() -> None:
    found = resolve_budgets(settings(limit_bytes=6 * GIB), HOST, NEEDS)
    assert found.dense_bytes + found.kv_bytes + found.ram_bytes <= 6 * GIB
    free = resolve_budgets(settings(), HOST, NEEDS)
    assert free.dense_bytes + free.kv_bytes + free.ram_bytes > 6 * GIB


def test_a_limit_bounds_what_a_gpu_gives() -> None:
    limited = Settings(device=(DeviceSettings(kind="cuda:0", limit_bytes=4 * GIB),))
    found = resolve_budgets(limited, GPU_HOST, NEEDS)
    assert found.dense_bytes + found.kv_bytes + found.devices[0].expert_bytes <= 4 * GIB


@pytest.mark.parametrize("machine", [HOST, GPU_HOST])
@pytest.mark.parametrize("kv_mib", [0, 40, 100, 300, 1000, 4000])
@pytest.mark.parametrize("window", [20, 128, 1024, 4096])
def test_both_kinds_of_blocks_share_the_memory_of_keys_and_values(machine: Machine, kv_mib: int, window: int) -> None:
    needs = dataclasses.replace(NEEDS, kv_bytes_per_token=1 << 14, window=window, window_block_bytes=1 << 17)
    least = 2 * needs.block_bytes + least_blocks(window) * needs.window_block_bytes
    wanted = settings(kv_bytes=kv_mib << 20, headroom_bytes=12 * GIB)
    if 0 < kv_mib << 20 < least:
        with pytest.raises(CapacityError, match=r"memory\.kv_bytes"):
            resolve_budgets(wanted, machine, needs)
        return
    found = resolve_budgets(wanted, machine, needs)
    kept = found.kv_bytes - (0 if machine.gpus else found.kv_swap_bytes)
    used = found.kv_blocks * needs.block_bytes + found.window_blocks * needs.window_block_bytes
    assert used <= kept < used + needs.block_bytes
    assert found.window_blocks >= least_blocks(window)
    assert found.context_tokens == min(8192, found.kv_blocks * BLOCK_TOKENS)
    step_bytes = wanted.engine.step_tokens // BLOCK_TOKENS * needs.window_block_bytes
    if kept > needs.held_bytes(8192) + 2 * needs.window_block_bytes + step_bytes:
        assert found.context_tokens == 8192

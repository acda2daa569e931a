"""Decides memory budgets once at start: from settings, machine and model sizes to the bytes of every slab.

Host RAM holds the RAM slab, the slabs of emulated devices, rows of tables on disk and, where no GPU computes, dense
weights and KV. A GPU holds its expert slab; the first GPU also holds dense weights and KV. States of sequences lie
beside KV. Headroom stays free on both. A stated budget is used as it is or refused, never changed; a budget of 0 takes
the free memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.config.settings import DeviceSettings, Settings
from edgemoe.config.sizes import format_rate, format_size
from edgemoe.errors import CapacityError
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.machine import Machine
from edgemoe.types.size_classes import SizeClasses, SlabLayout
from edgemoe.types.step import BLOCK_TOKENS, LEAST_STATE_SLOTS, least_blocks, most_kept

VRAM_HEADROOM_BYTES = 1 << 30  # left free on each GPU
TYPICAL_TOKENS = 1024  # prompt and answer of a typical request, for the default KV budget
KV_SHARE = 0.25  # the default KV budget's largest part of the memory beside dense weights
KV_SWAP_SHARE = 4  # KV memory over the memory for swapping (on a GPU: the host's headroom over it)
DENSE_REMEDY = "a lower memory.headroom_bytes, or pack the model with --dense int8"
STEP_SHARE = 4  # KV memory over the largest part of it for the windows of a step's tokens
ROWS_SHARE = 64  # free memory over the default memory for rows of tables on disk
LEAST_ROWS = 2048  # in it: of the tokens of some steps


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The model's sizes, on which the budgets depend."""

    dense_bytes: int  # all weights except the experts
    kv_bytes_per_token: int  # in the layers that see all tokens
    experts: ExpertGeometry
    context_tokens: int
    state_bytes: int = 0  # of one sequence, where layers here have states beside keys and values
    states_elsewhere: bool = False  # layers on other boxes have states
    decoded_bytes: int = 0  # of the weights except the experts where a GPU holds them; 0: as many as elsewhere
    window: int = 0  # tokens, where layers have windows, here or on another box
    window_block_bytes: int = 0
    table_bytes: int = 0  # of tables that stay on disk
    row_bytes: int = 0  # of one of their rows

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of one KV block in the layers that see all tokens."""
        return BLOCK_TOKENS * self.kv_bytes_per_token

    def held_bytes(self, tokens: int) -> int:
        """Returns the bytes of keys and values that a sequence of `tokens` tokens holds."""
        windows = min(-(-tokens // BLOCK_TOKENS), most_kept(self.window)) if self.window else 0
        return tokens * self.kv_bytes_per_token + windows * self.window_block_bytes


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """One device and its expert slab; `expert_bytes` is 0 for the cpu, which uses the RAM slab."""

    kind: str  # cpu | emulated | cuda:N
    expert_bytes: int
    link_bytes_per_s: float = 0.0
    link_expert_bytes: float = 0.0  # that an emulated link moves for each expert; 0: as many as it copies
    memory_bytes_per_s: float = 0.0  # of an emulated device; 0: the processor's


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of every slab, and the threads and context that follow from the machine."""

    dense_bytes: int
    kv_bytes: int
    kv_swap_bytes: int  # in host RAM for paused sequences; on a cpu they are a part of `kv_bytes`
    ram_bytes: int  # expert slab in host RAM
    devices: tuple[DeviceBudget, ...]
    threads: int
    context_tokens: int  # longest sequence: the model's or the setting's limit, bounded by KV
    containment: bool  # whether RAM holds the experts of VRAM too
    experts: ExpertGeometry
    state_slots: int = 0
    state_bytes: int = 0  # of all slots
    kv_blocks: int = 0  # of the layers that see all tokens
    window_blocks: int = 0  # of the layers with windows
    table_bytes: int = 0  # of tables that stay on disk
    row_cache_bytes: int = 0  # for rows of them in host RAM

    @property
    def all_fit(self) -> bool:
        """Returns whether the fastest tier holds every expert, so that none is ever evicted."""
        slabs = [device.expert_bytes for device in self.devices if device.kind != "cpu"] or [self.ram_bytes]
        layouts = [SlabLayout.within(size_bytes, self.experts) for size_bytes in slabs]
        divisions = [(layout, layout.divided()) for layout in layouts if layout is not None]
        return all(
            sum(layout.per_extent[i] * given[i] for layout, given in divisions) >= count
            for i, count in enumerate(SizeClasses.of(self.experts).counts)
        )

    def lines(self) -> list[str]:
        """Returns the lines to print at start."""
        rows = [f"dense weights {format_size(self.dense_bytes)}, KV {format_size(self.kv_bytes)}"]
        if self.state_slots:
            rows[0] += f", states {format_size(self.state_bytes)} ({self.state_slots} slots)"
        if self.table_bytes:
            rows[0] += f", rows {format_size(self.row_cache_bytes)} ({format_size(self.table_bytes)} stay on disk)"
        rows.append(self._row("RAM experts", self.ram_bytes))
        for device in self.devices:
            if device.kind != "cpu":
                link = f", link {format_rate(device.link_bytes_per_s)}" if device.link_bytes_per_s else ""
                rows.append(self._row(f"{device.kind} experts", device.expert_bytes) + link)
        return [*rows, f"{self.threads} threads, context of {self.context_tokens} tokens"]

    def _row(self, name: str, size_bytes: int) -> str:
        layout = SlabLayout.within(size_bytes, self.experts)
        assert layout is not None, "budgets hold an expert of each size"
        slots = sum(per * given for per, given in zip(layout.per_extent, layout.divided(), strict=True))
        return f"{name} {format_size(size_bytes)} ({slots} slots, {slots / self.experts.count:.0%} of all experts)"


def resolve_budgets(settings: Settings, machine: Machine, needs: ModelNeeds) -> Budgets:
    """Returns every budget in bytes. Raises CapacityError, which names the missing bytes and the setting to change."""
    devices = devices_of(settings, machine)
    on_gpu = runs_on_gpu(devices)
    emulated_bytes = sum(_slab(device, needs) for device in devices if device.kind == "emulated")
    host_free = _limited(machine.ram_available_bytes - settings.memory.headroom_bytes, settings.memory.limit_bytes)
    host_free -= emulated_bytes
    dense_bytes = (on_gpu and needs.decoded_bytes) or needs.dense_bytes
    host_free -= 0 if on_gpu else dense_bytes
    row_cache_bytes = _row_cache(settings, needs, host_free)
    host_free -= row_cache_bytes
    first_free = _gpu_free(settings, machine, devices[0]) - dense_bytes if on_gpu else host_free
    context_tokens = min(settings.engine.context_tokens or needs.context_tokens, needs.context_tokens)
    remedy = "device.0.kind=cpu" if on_gpu else DENSE_REMEDY
    kv_bytes, state_slots = _sequences(settings, needs, first_free, dense_bytes, context_tokens, remedy)
    state_bytes = state_slots * needs.state_bytes
    taken = kv_bytes + state_bytes
    kv_swap_bytes = (settings.memory.headroom_bytes if on_gpu else kv_bytes) // KV_SWAP_SHARE
    if settings.engine.preemption != "park":
        kv_swap_bytes = 0
    kv_blocks, window_blocks = _blocks(
        kv_bytes - (0 if on_gpu else kv_swap_bytes), needs, context_tokens, settings.engine.step_tokens
    )
    ram_bytes = _slots_bytes(
        settings.memory.ram_bytes,
        host_free - (0 if on_gpu else taken),
        needs,
        "RAM for experts",
        "memory.ram_bytes",
    )
    slabs = []
    for index, device in enumerate(devices):
        free = first_free - taken if index == 0 else _gpu_free(settings, machine, device)
        slabs.append(_device_budget(index, device, free, needs))
    return Budgets(
        dense_bytes=dense_bytes,
        kv_bytes=kv_bytes,
        kv_swap_bytes=kv_swap_bytes,
        ram_bytes=ram_bytes,
        devices=tuple(slabs),
        threads=settings.engine.threads or machine.cpus,
        context_tokens=min(context_tokens, kv_blocks * BLOCK_TOKENS),
        containment=_containment(settings, ram_bytes, slabs, needs),
        experts=needs.experts,
        state_slots=state_slots,
        state_bytes=state_bytes,
        kv_blocks=kv_blocks,
        window_blocks=window_blocks,
        table_bytes=needs.table_bytes,
        row_cache_bytes=row_cache_bytes,
    )


def devices_of(settings: Settings, machine: Machine) -> Sequence[DeviceSettings]:
    """Returns the devices; "auto" becomes the first GPU, else the cpu."""
    first = settings.device[0]
    if first.kind != "auto":
        return settings.device
    kind = "cuda:0" if machine.gpus else "cpu"
    if not machine.gpus:
        return (DeviceSettings(kind=kind),)
    return (DeviceSettings(kind=kind, expert_bytes=first.expert_bytes, limit_bytes=first.limit_bytes),)


def runs_on_gpu(devices: Sequence[DeviceSettings]) -> bool:
    """Returns whether the model itself does; experts may be on others."""
    return devices[0].kind.startswith("cuda:")


def _gpu_free(settings: Settings, machine: Machine, device: DeviceSettings) -> int:
    if not device.kind.startswith("cuda:"):
        return 0
    number = int(device.kind.removeprefix("cuda:"))
    if number >= len(machine.gpus):
        found = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in machine.gpus) or "none"
        raise CapacityError(f"there is no {device.kind} on this machine; found: {found}")
    return _limited(machine.gpus[number].free_bytes - VRAM_HEADROOM_BYTES, device.limit_bytes)


def _limited(free_bytes: int, limit_bytes: int) -> int:
    return min(free_bytes, limit_bytes) if limit_bytes else free_bytes


def _row_cache(settings: Settings, needs: ModelNeeds, free: int) -> int:
    """Returns the memory for rows: as stated, else a share of free memory, at most the tables."""
    usual = max(free // ROWS_SHARE, LEAST_ROWS * needs.row_bytes)
    return min(needs.table_bytes, settings.memory.row_cache_bytes or usual)


def _sequences(
    settings: Settings, needs: ModelNeeds, free: int, dense_bytes: int, context_tokens: int, remedy: str
) -> tuple[int, int]:
    """Returns the bytes of whole KV blocks, and the slots of states, which take half of both at most.

    `free` is left beside the dense weights. `remedy` is for too little memory for both.
    """
    block_bytes, most = needs.block_bytes, settings.engine.max_sequences
    least_states = LEAST_STATE_SLOTS * needs.state_bytes
    has_states = needs.state_bytes > 0 or needs.states_elsewhere
    most_slots = LEAST_STATE_SLOTS * most + 1 if has_states else 0  # one snapshot for each sequence
    least_windows = least_blocks(needs.window) * needs.window_block_bytes if needs.window else 0
    least = 2 * block_bytes + least_states + least_windows
    total = settings.memory.kv_bytes
    what = "keys, values and states" if needs.state_bytes else "keys and values"
    if total:
        _demand(total, least, what, "memory.kv_bytes")
    else:
        _demand(free + dense_bytes, dense_bytes + least, f"dense weights, {what}", remedy)
        one = -(-context_tokens // BLOCK_TOKENS) * block_bytes
        if needs.window:
            one += least_windows + settings.engine.step_tokens // BLOCK_TOKENS * needs.window_block_bytes
        typical = most * min(one, needs.held_bytes(TYPICAL_TOKENS)) + most_slots * needs.state_bytes
        total = max(least, min(max(one + least_states, typical), int(free * KV_SHARE)))
    if needs.window and not needs.state_bytes:
        return total, most_slots
    if not needs.state_bytes:
        return total // block_bytes * block_bytes, most_slots
    slots = min(max(LEAST_STATE_SLOTS, total // 2 // needs.state_bytes), most_slots)
    return (total - slots * needs.state_bytes) // block_bytes * block_bytes, slots


def _blocks(kv_bytes: int, needs: ModelNeeds, context_tokens: int, step_tokens: int) -> tuple[int, int]:
    """Divides memory into the blocks of layers that see all tokens and of layers with windows, as these have any.

    Windows of one sequence and of a step's tokens come first, then one context. The rest is for typical requests, so
    that both kinds of blocks last as long.
    """
    block_bytes, window_bytes = needs.block_bytes, needs.window_block_bytes
    if not needs.window:
        return kv_bytes // block_bytes, 0
    least = least_blocks(needs.window)
    if not window_bytes:  # other boxes have the layers with windows
        return kv_bytes // block_bytes, max(least, kv_bytes // block_bytes + 1)
    spare = max(0, kv_bytes - least * window_bytes)
    windows = least + min(-(-step_tokens // BLOCK_TOKENS), spare // STEP_SHARE // window_bytes)
    context = min(-(-context_tokens // BLOCK_TOKENS), max(0, kv_bytes - windows * window_bytes) // block_bytes)
    each = min(context_tokens, TYPICAL_TOKENS) // BLOCK_TOKENS or 1
    each_windows = min(each, most_kept(needs.window))

    def division(requests: int) -> tuple[int, int]:
        return max(context, requests * each), windows + max(0, requests - 1) * each_windows

    def size(requests: int) -> int:
        blocks, in_windows = division(requests)
        return blocks * block_bytes + in_windows * window_bytes

    requests = bisect_right(range(1, 1 + kv_bytes // (each_windows * window_bytes)), kv_bytes, key=size)
    in_windows = division(requests)[1]
    return max(0, kv_bytes - in_windows * window_bytes) // block_bytes, in_windows


def _slab(device: DeviceSettings, needs: ModelNeeds) -> int:
    layout = SlabLayout.within(device.expert_bytes, needs.experts)
    return layout.size_bytes if layout is not None else 0


def _slots_bytes(stated: int, free: int, needs: ModelNeeds, what: str, setting: str) -> int:
    """Returns the bytes of whole slots: as stated, else as free, at most all experts. Raises CapacityError."""
    _demand(stated or free, SlabLayout.least_bytes(needs.experts), what, setting)
    layout = SlabLayout.within(stated or free, needs.experts)
    assert layout is not None, "it holds an expert of each size"
    if stated:
        most = max(needs.experts.all_bytes, layout.size_bytes)
        _demand(free, min(stated, most), what, f"a lower {setting}, or another budget")
    return layout.size_bytes


def _device_budget(index: int, device: DeviceSettings, free: int, needs: ModelNeeds) -> DeviceBudget:
    if device.kind == "cpu":
        return DeviceBudget("cpu", 0)
    if device.kind == "emulated":
        free = device.expert_bytes  # already subtracted from host RAM
    slab = _slots_bytes(device.expert_bytes, free, needs, f"experts on {device.kind}", f"device.{index}.expert_bytes")
    return DeviceBudget(device.kind, slab, device.link_bytes_per_s, memory_bytes_per_s=device.memory_bytes_per_s)


def _containment(settings: Settings, ram_bytes: int, slabs: Sequence[DeviceBudget], needs: ModelNeeds) -> bool:
    """Returns whether RAM holds VRAM's experts too, for which it needs room for all of them and one more.

    Where RAM is too small, containment is turned off if no budget is stated; stated budgets raise CapacityError.
    """
    slabs_bytes = sum(slab.expert_bytes for slab in slabs)
    if not settings.cache.containment or not slabs_bytes:
        return False
    held = min(slabs_bytes + SlabLayout.least_bytes(needs.experts), SlabLayout.whole_bytes(needs.experts))
    if ram_bytes < held and not settings.memory.ram_bytes and not any(d.expert_bytes for d in settings.device):
        return False
    _demand(ram_bytes, held, "RAM for experts, which holds VRAM's too", "memory.ram_bytes, or cache.containment=false")
    return True


def _demand(have: int, need: int, what: str, remedy: str) -> None:
    if have < need:
        have_text, missing = format_size(max(0, have)), format_size(need - max(0, have))
        raise CapacityError(f"{what}: {format_size(need)} needed, {have_text} there, {missing} missing; set {remedy}")

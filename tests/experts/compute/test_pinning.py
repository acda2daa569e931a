"""A slab is registered for DMA slice by slice; a refused slice stays as it was."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgemoe.experts.compute import cuda_link
from edgemoe.experts.compute.cuda_link import PinnedSlab, is_readable
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout

GPU = torch.device("cuda:1")
TWO_SIZES = ExpertGeometry(2, 6, 2, 8, 8, "float32", layer_bytes=(4096, 3 * 4096))


class FakeCudart:
    """Registers memory up to a limit, and records the devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_bytes: int = 1 << 40) -> None:
        self.registered: dict[int, int] = {}
        self.most_bytes, self.devices = most_bytes, set[torch.device]()
        self._lock = threading.Lock()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self._on)

    def _on(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        self.devices.add(device)
        return contextlib.nullcontext()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        with self._lock:
            assert flags == 3, "kernels of every device read it"
            if sum(self.registered.values()) + size_bytes > self.most_bytes:
                return 2
            self.registered[address] = size_bytes
            return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture(params=["one size", "two sizes"])
def slab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostSlab:
    monkeypatch.setattr(cuda_link, "SLICE_BYTES", 40_000)
    layout = SlabLayout.even(50, 4096) if request.param == "one size" else SlabLayout.within(200_000, TWO_SIZES)
    assert layout is not None
    return HostSlab(layout)


def test_slices_cover_the_slab_and_no_expert_lies_in_two(slab: HostSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, shares = FakeCudart(monkeypatch), list[float]()
    pinned = PinnedSlab(slab, GPU, shares.append)
    assert slab.pinned
    assert len(cuda.registered) > 2
    assert cuda.devices == {GPU}, "a thread's own device would be the first"
    at = slab.address
    for address, size_bytes in sorted(cuda.registered.items()):
        assert address == at
        at += size_bytes
    assert at == slab.address + slab.size_bytes
    for slot in range(slab.layout.count):
        start, size_bytes = slab.layout.place(slot)
        first = slab.address + start
        assert any(a <= first and first + size_bytes <= a + n for a, n in cuda.registered.items())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    pinned.release()
    assert not cuda.registered
    assert not slab.pinned


def test_slices_registered_before_a_refusal_stay_and_the_log_names_the_remedy(
    slab: HostSlab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCudart(monkeypatch, most_bytes=100_000)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedSlab(slab, GPU)
    assert not slab.pinned
    assert 0 < sum(cuda.registered.values()) <= 100_000
    (record,) = caplog.records
    assert record.cuda_error == 2  # type: ignore[attr-defined]
    assert record.bytes == sum(cuda.registered.values())  # type: ignore[attr-defined]
    assert "memory.ram_bytes" in record.message
    pinned.release()
    assert not cuda.registered


def test_a_registered_slab_is_left_to_its_owner(slab: HostSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCudart(monkeypatch)
    first = PinnedSlab(slab, GPU)
    registered = dict(cuda.registered)
    second = PinnedSlab(slab, torch.device("cuda:0"))
    assert cuda.registered == registered
    second.release()
    assert slab.pinned
    first.release()
    assert not slab.pinned


def test_the_limit_of_locked_memory_is_raised_as_far_as_it_may(slab: HostSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCudart(monkeypatch)
    limits: list[tuple[int, int]] = []
    said = SimpleNamespace(
        RLIMIT_MEMLOCK=resource.RLIMIT_MEMLOCK,
        getrlimit=lambda _: (8 << 20, 64 << 30),
        setrlimit=lambda _, pair: limits.append(pair),
    )
    monkeypatch.setattr(cuda_link, "resource", said)
    PinnedSlab(slab, GPU)
    assert limits == [(64 << 30, 64 << 30)]


@pytest.mark.parametrize(
    ("pinned", "moved_bytes", "code", "readable"),
    [(True, 0, 0, True), (True, 4096, 0, False), (True, 0, 1, False), (True, 0, None, False), (False, 0, 0, False)],
    ids=["same address", "another address", "refused", "no driver", "not pinned"],
)
def test_kernels_read_ram_in_place_only_at_the_addresses_of_the_cpu(
    pinned: bool,
    moved_bytes: int,
    code: int | None,
    readable: bool,
    slab: HostSlab,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def address(found: Any, host: int, _flags: int) -> int:
        if code is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        found._obj.value = host + moved_bytes
        return code

    FakeCudart(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(cuda_link, "_driver", lambda: SimpleNamespace(cuMemHostGetDevicePointer_v2=address))
    slab.pinned = pinned
    assert is_readable(slab, GPU) is readable
    assert len(caplog.records) == (pinned and not readable)

"""The kernels of steps of few rows compile for each generation of GPUs as they are launched, without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.kept import STORES
from support.slotted_experts import SlottedExperts
from support.tiny_models import GRAPHED, Session, Tiny

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from dataclasses import replace

from support.compiled_launches import WITHOUT_INPUTS, compiled

from edgemoe.kernels.gpu.launches import LEAST_CAPABILITY, collected
from edgemoe.model import graphed

GENERATIONS = (80, 86, 89, 90, 120)  # compute capability, times 10
GATE = ("qwen3_moe", "gpt_oss")
ROWS = (1, 4)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps compiled kernels between tests."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(STORES.with_name("triton")))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "kv_int8"),
    [
        pytest.param(family, kv_int8, marks=[] if family in GATE and not kv_int8 else pytest.mark.slow)
        for family in GRAPHED
        for kv_int8 in (False, True)
    ],
)
def test_kernels_of_steps_compile_without_spills(make_tiny: Callable[..., Tiny], family: str, kv_int8: bool) -> None:
    tiny = make_tiny(family, fused=False)
    spec = replace(tiny.spec, kv_int8=kv_int8)
    tiny = replace(tiny, spec=spec)
    slots, kv, decoder = SlottedExperts(tiny).slots, Session(tiny, 4).kv, tiny.decoder
    with collected() as launches:
        for rows in ROWS:
            graphed.DecodeRows(spec, decoder._weights, decoder._ropes, kv, slots, rows).launch()
    assert len(launches) >= 5
    generations = GENERATIONS if family not in GATE else GENERATIONS[3:4]
    for launch in launches.values():
        for capability in generations:
            made, waits = compiled(launch, capability), launch.kernel.__name__ not in WITHOUT_INPUTS
            assert made.asm["cubin"]
            assert "ld.local" not in made.asm["ptx"], launch
            early = waits and capability >= 10 * LEAST_CAPABILITY
            assert ("griddepcontrol.wait" in made.asm["ptx"]) == early, launch

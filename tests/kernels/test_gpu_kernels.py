"""The GPU's kernels without a GPU: they compile for each generation, and give correct results when interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.gate import RARE_ENCODINGS
from support.kept import STORES
from support.turns import by_turns

from edgemoe.experts.compute.cuda import ROWS, TILE_ROWS
from edgemoe.kernels.gpu import expert_blocks as gpu_experts
from edgemoe.kernels.gpu import expert_tiles, experts_decode
from edgemoe.kernels.gpu.launches import LEAST_CAPABILITY
from edgemoe.kernels.gpu.weights import KINDS
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import SILU, Activation, ExpertGeometry

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

GENERATIONS = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}  # capability * 10 -> shared memory of one block, bytes
ROOT = Path(__file__).parents[2]
BOTH = [  # with a gate and without
    pytest.param(SILU, id="silu"),
    pytest.param(Activation("relu2"), id="relu2", marks=pytest.mark.slow),
]
COMMON = tuple(kind for kind in KINDS if kind not in RARE_ENCODINGS)
ENCODED = [kind for kind in KINDS if ENCODINGS[kind].scales(1)]
TILES = by_turns(product(GENERATIONS, TILE_ROWS), KINDS, RARE_ENCODINGS)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps compiled kernels between tests."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(STORES.with_name("triton")))


def compiled(kernel: Any, capability: int, geometry: ExpertGeometry, shape: dict[str, int]) -> Any:
    """Compiles the kernel as for its calls: all arrays aligned to 16 bytes, all sizes constants."""
    item = "*bf16" if geometry.bf16 else "*fp32"
    arrays = {"x": item, "mid": item, "slab": "*u8", "out": "*fp32"}
    arrays |= {"shares": "*fp32", "blocks": "*i32", "calls": "*i32"}
    sizes = gpu_experts.constants(geometry, 0, geometry.stride_bytes(0)) | shape
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        kernel,
        {name: arrays.get(name, "constexpr") for name in names},
        constexprs={name: sizes[name] for name in names if name in sizes},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in arrays},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    launch = {name: value for name, value in shape.items() if name.startswith("num_")}
    return triton.compile(source, target=target, options=gpu_experts.OPTIONS | launch)


@pytest.mark.parametrize(("capability", "dtype", "rows"), by_turns(GENERATIONS, product(("float32", "bfloat16"), ROWS)))
def test_kernels_compile_and_fit_each_generation_of_gpus(capability: int, dtype: str, rows: int) -> None:
    geometry = ExpertGeometry(1, 128, 8, 2048, 768, dtype)
    for kernel in (gpu_experts.gate_up, gpu_experts.down):
        made = compiled(kernel, capability, geometry, gpu_experts.block_shape(geometry, 0, rows))
        assert made.asm["cubin"]
        assert made.metadata.shared <= GENERATIONS[capability], "more than one block may have"
        copies = [line for line in made.asm["ptx"].splitlines() if "cp.async.cg" in line]
        assert copies, "weights are not copied, 16 bytes at once, while the ones before them are multiplied"


@pytest.mark.parametrize(("shape", "kind"), by_turns(product(GENERATIONS, ROWS), ENCODED, RARE_ENCODINGS))
def test_kernels_of_encoded_experts_compile_for_each_generation(shape: tuple[int, int], kind: str) -> None:
    capability, rows = shape
    swiglu = Activation("clamped_swiglu", 1.702, 7.0)
    gpt_oss = ExpertGeometry(1, 32, 4, 2880, 2880, "bfloat16", swiglu, True, (kind,))
    for kernel in (gpu_experts.gate_up, gpu_experts.down):
        made = compiled(kernel, capability, gpt_oss, gpu_experts.block_shape(gpt_oss, 0, rows))
        assert made.asm["cubin"]
        assert made.metadata.shared <= GENERATIONS[capability], "more than one block may have"


@pytest.mark.parametrize("activation", BOTH)
@pytest.mark.parametrize(("shape", "kind"), TILES)
def test_kernels_of_many_tokens_use_matrix_units_and_copy_activations_ahead(
    shape: tuple[int, int], kind: str, activation: Activation
) -> None:
    capability, rows = shape
    geometry = ExpertGeometry(1, 128, 8, 2048, 768, "bfloat16", activation, encodings=(kind,))
    for kernel in (expert_tiles.tile_gate_up, expert_tiles.tile_down):
        made = compiled(kernel, capability, geometry, expert_tiles.tile_shape(geometry, 0, rows))
        ptx = made.asm["ptx"]
        assert made.metadata.shared <= GENERATIONS[capability], "more than one block may have"
        assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx
        narrow = [line for line in ptx.splitlines() if "ld.global" in line and ".b16" in line]
        assert not narrow or ENCODINGS[kind].is_affine, "scales are not copied ahead"
        assert "cp.async.cg" in ptx, "activations are not copied, 16 bytes at once"
        assert "ld.local" not in ptx


def run_interpreted(name: str, *words: str) -> Any:
    """Runs a script that interprets kernels, and returns its output."""
    script, path = ROOT / "tests" / "support" / name, os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "words", [pytest.param(COMMON, id="by turns"), pytest.param((*KINDS, "all"), marks=pytest.mark.slow, id="all")]
)
def test_interpreted_kernels_of_few_tokens_find_experts_in_their_slots_in_each_encoding(words: tuple[str, ...]) -> None:
    errors = run_interpreted("interpreted_few.py", *words)
    assert errors.keys() == set(words) - {"all"}
    assert max(map(max, errors.values())) < 5e-6


@pytest.mark.parametrize("activation", BOTH)
@pytest.mark.parametrize(("capability", "kind"), by_turns(GENERATIONS, KINDS, RARE_ENCODINGS))
def test_kernels_of_few_tokens_compile_without_spills_for_each_generation(
    capability: int, kind: str, activation: Activation
) -> None:
    geometry = ExpertGeometry(1, 128, 8, 2048, 768, "bfloat16", activation, encodings=(kind,))
    sizes = gpu_experts.constants(geometry, 0, geometry.stride_bytes(0))
    arrays = {"x": "*fp32", "mid": "*fp32", "slab": "*u8", "places": "*i64", "ids": "*i64"}
    arrays |= {"shares": "*fp32", "out": "*fp32"}
    for kernel, columns, rows in (
        (experts_decode.call_gate_up, geometry.hidden, experts_decode.GATES),
        (experts_decode.call_down, geometry.width, experts_decode.OUTPUTS),
    ):
        early = capability >= 10 * LEAST_CAPABILITY
        given = sizes | experts_decode.steps_of(columns, sizes["KIND"]) | {"ROWS": rows, "EARLY": early}
        source = triton.compiler.ASTSource(
            kernel,
            {name: arrays.get(name, "constexpr") for name in kernel.arg_names},
            constexprs={name: given[name] for name in kernel.arg_names if name in given},
            attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if name in arrays},
        )
        target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options=gpu_experts.OPTIONS | {"num_warps": 1})
        assert made.asm["cubin"]
        assert "ld.local" not in made.asm["ptx"]
        assert ("griddepcontrol.wait" in made.asm["ptx"]) == early
        if early and kernel is experts_decode.call_down:
            before, _ = made.asm["ptx"].split("griddepcontrol.wait")
            assert before.count("ld.global") > 2, "weights are not read while the kernel before still runs"
        assert ".v4." in made.asm["ptx"] or sizes["line"] % 16, "weights are not read 16 bytes at once"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kinds", [pytest.param(COMMON, id="common"), pytest.param(tuple(KINDS), marks=pytest.mark.slow, id="all")]
)
def test_interpreted_kernels_compute_each_call_into_a_row_of_its_own(kinds: tuple[str, ...]) -> None:
    errors = run_interpreted("interpreted.py", *kinds)
    assert errors.keys() >= {*kinds, "layers", "rounded"}
    assert max(errors["rounded"]) < 1e-2
    assert max(*errors["tiles rounded"], *errors["without tiles"]) < 2e-2
    tiles = [f"{kind} in tiles" for kind in kinds]
    assert max(max(errors[kind]) for kind in (*kinds, *tiles, "layers")) < 3e-6

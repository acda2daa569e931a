"""The GPU's kernels without a GPU: they compile for each generation, and compute what they should when interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.kept import STORES

from edgemoe.experts.compute.gpu_calls import ROWS
from edgemoe.kernels.gpu import encoded as gpu_encoded
from edgemoe.kernels.gpu import experts as gpu_experts
from edgemoe.types.encoding import ENCODINGS

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

GENERATIONS = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}  # capability * 10 -> shared memory of one block, bytes
TYPES = {"fp32": 4, "bf16": 2}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled from the same source once is not compiled again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(STORES.with_name("triton")))


def compiled(kernel: Any, capability: int, item: str, rows: int) -> Any:
    """The kernel as it is called at run time: all arrays aligned to 16 bytes, all sizes constants."""
    arrays = dict.fromkeys(("x", "slab", "mid"), f"*{item}")
    arrays |= {"out": "*fp32", "shares": "*fp32", "blocks": "*i32", "calls": "*i32"}
    sizes = {"k": 8, "hidden": 2048, "width": 768, "stride": 3 * 2048 * 768}
    sizes |= gpu_experts.block_shape(rows, TYPES[item])
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        kernel,
        {name: arrays.get(name, "constexpr") for name in names},
        constexprs={name: sizes[name] for name in names if name in sizes},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in arrays},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=gpu_experts.OPTIONS)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("item", TYPES)
@pytest.mark.parametrize("capability", GENERATIONS)
def test_kernels_compile_and_fit_each_generation_of_gpus(capability: int, item: str, rows: int) -> None:
    for kernel in (gpu_experts.gate_up, gpu_experts.down):
        made = compiled(kernel, capability, item, rows)
        assert made.asm["cubin"]
        assert made.metadata.shared <= GENERATIONS[capability], "more than one block may have"
        assert "cp.async" in made.asm["ptx"], "weights are not copied while the ones before them are multiplied"


def compiled_encoded(kernel: Any, capability: int, kind: str, rows: int) -> Any:
    """Like `compiled`, for experts of gpt-oss's sizes and with its biases and activation."""
    encoding, names = ENCODINGS[kind], kernel.arg_names
    line = encoding.row_bytes(2880)
    arrays = {"x": "*bf16", "mid": "*bf16", "slab": "*u8", "out": "*fp32"}
    arrays |= {"shares": "*fp32", "blocks": "*i32", "calls": "*i32"}
    sizes = {"k": 4, "hidden": 2880, "width": 2880, "stride": 3 * 2880 * line + 36864, "line": line, "down_line": line}
    sizes |= {"bias": 3 * 2880 * line, "alpha": 1.702, "limit": 7.0, "ACTIVATION": 2, "WHOLE": kind == "int8"}
    sizes |= {"KIND": gpu_encoded.KINDS[kind], **gpu_encoded.encoded_shape(rows)}
    source = triton.compiler.ASTSource(
        kernel,
        {name: arrays.get(name, "constexpr") for name in names},
        constexprs={name: sizes[name] for name in names if name in sizes},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in arrays},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=gpu_experts.OPTIONS)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", gpu_encoded.KINDS)
@pytest.mark.parametrize("capability", GENERATIONS)
def test_kernels_of_encoded_experts_compile_for_each_generation(capability: int, kind: str, rows: int) -> None:
    for kernel in (gpu_encoded.encoded_gate_up, gpu_encoded.encoded_down):
        made = compiled_encoded(kernel, capability, kind, rows)
        assert made.asm["cubin"]
        assert made.metadata.shared <= GENERATIONS[capability], "more than one block may have"


def test_interpreted_kernels_compute_each_call_into_a_row_of_its_own() -> None:
    script, path = ROOT / "tests" / "support" / "interpreted.py", os.pathsep.join([str(ROOT), *sys.path])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert max(errors["float32"]) < 3e-6
    assert max(errors["bfloat16"]) < 1e-2
    assert errors.keys() >= gpu_encoded.KINDS.keys()
    assert max(max(errors[kind]) for kind in gpu_encoded.KINDS) < 3e-6
    assert max(errors["int8 activations"]) < 3e-2  # as far as they are from activations in float32

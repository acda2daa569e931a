"""The processor that code is compiled for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from edgemoe.errors import UnsupportedProcessor
from edgemoe.jit import compile_target as target
from edgemoe.jit.compile_target import AMX, ARM, ASKED, BF16, KINDS, X86, CompileTarget, host, kind_of, named
from edgemoe.jit.env import PROCESSOR

ASK = (
    "from edgemoe.jit.compile_target import TARGET\n"
    "from edgemoe.jit.intrinsics import LANES, PAIRS\n"
    "from edgemoe.kernels.cpu.encoded.instructions import EVERY\n"
    "from edgemoe.kernels.cpu.vector import make_pack_all\n"
    "import llvmlite.binding as llvm\n"
    "ours = llvm.parse_assembly(make_pack_all(True).compiled.inspect_llvm())\n"
    "code = TARGET.machine_code().emit_assembly(ours)\n"
    "print(LANES, PAIRS, [each.name for each in EVERY if each.is_available], 'zmm' in code, 'ymm' in code)\n"
)
MULTIPLY = (
    "import numpy as np\n"
    "from edgemoe.kernels.cpu.gemm_tile import make_tile\n"
    "ones, panel = np.full((16, 32), 0x3F80, np.uint16), np.full((16, 32), 0x3F803F80, np.uint32)\n"
    "out = np.empty((16, 32), np.float32)\n"
    "a, b, c = (each.ctypes.data for each in (ones, panel, out))\n"
    "make_tile(True).call(a, 64, 16, a, b, 128, 16, c, 128, 32, 1)\n"
    "print(out.sum() / 32)\n"
)
ASK_ARM = (
    "from edgemoe.jit.compile_target import TARGET\n"
    "from edgemoe.jit.object_cache import llvm_module\n"
    "from edgemoe.kernels.cpu.encoded.row_code import WORDS, make_encoded_rows, usable\n"
    "from edgemoe.types.encoding import INT4\n"
    "(instructions,) = usable(True)\n"
    "ours = llvm_module(make_encoded_rows(INT4, instructions, WORDS), TARGET)\n"
    "lines = TARGET.machine_code().emit_assembly(ours).splitlines()\n"
    "print(instructions.name, *sorted({line.split()[0] for line in lines if line.startswith('\\t')}))\n"
)


def _asked(program: str, processor: str) -> str:
    """Runs a program with code compiled for a processor. Returns its output, or the last line of its errors."""
    env = os.environ | {PROCESSOR: processor}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=200)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("haswell", "8 False ['avx2'] False True"),
        ("skylake-avx512", "16 False ['avx2'] False True"),  # for loops LLVM prefers 256 bits
    ],
)
def test_all_code_obeys_the_setting_and_numbas_own_too(processor: str, expected: str) -> None:
    assert _asked(ASK, processor) == expected


@pytest.mark.skipif(not host().has(*AMX), reason="without AMX here")
@pytest.mark.parametrize("processor", ["", "sapphirerapids+amx"])
def test_a_process_may_use_the_tiles_that_its_code_uses(processor: str) -> None:
    assert _asked(MULTIPLY, processor) == "512.0"


def test_an_unknown_processor_is_refused_with_the_known_ones() -> None:
    said = _asked(ASK, "haswall")
    assert said.startswith(
        "edgemoe.errors.UnsupportedProcessor: EDGEMOE_PROCESSOR is 'haswall'; did you mean 'haswell'?"
    )
    assert "sapphirerapids+amx" in said


@pytest.mark.parametrize("name", [*X86, *ARM])
def test_a_processor_is_refused_for_its_missing_features_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "TARGET", named(name))
    monkeypatch.setattr(target, "HOST", named(name))
    monkeypatch.setattr(target.platform, "machine", lambda: named(name).machine)
    if name not in ("nehalem", "sandybridge"):
        target.check_processor()
    else:
        with pytest.raises(UnsupportedProcessor, match=rf"\({name}\) lacks AVX2, FMA, F16C: edgemoe needs"):
            target.check_processor()


def test_code_for_a_greater_processor_than_the_one_at_hand_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "HOST", named("haswell"))
    monkeypatch.setattr(target, "TARGET", named("znver4"))
    with pytest.raises(UnsupportedProcessor, match="this one lacks AVX512BF16, AVX512BW, AVX512F"):
        target.check_processor()


def test_code_for_another_kind_of_machine_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "TARGET", named("cortex-a76" if host().machine == "x86_64" else "haswell"))
    with pytest.raises(UnsupportedProcessor, match="whose code cannot run on"):
        target.check_processor()


def test_the_processor_at_hand_is_compiled_for_where_none_is_named() -> None:
    assert host().flags
    assert host().is_native


@pytest.mark.parametrize(("kind", "member"), [(kind, name) for kind, each in KINDS.items() for name in each.members])
def test_a_processor_of_a_kind_runs_the_codes_of_the_kind(kind: str, member: str) -> None:
    full = replace(named(member), features=named(member).features | KINDS[kind].needed)
    assert kind_of(full) == named(kind)


@pytest.mark.parametrize("name", [*ARM, "apple-m1"])
def test_arm_processors_run_one_code_with_products_of_bytes_and_one_without(name: str) -> None:
    asked = CompileTarget(name, frozenset({"neon", "dotprod"}), "+neon,+dotprod", "aarch64")
    assert kind_of(asked) == named("cortex-a76")
    assert kind_of(replace(asked, features=frozenset({"neon"}))) == named("generic")


@pytest.mark.parametrize(("processor", "expected"), [("generic", "neon"), ("neoverse-n1", "dotprod")])
def test_code_for_arm_has_arms_instructions_wherever_it_is_compiled(processor: str, expected: str) -> None:
    instructions = {"neon": {"smull", "addp", "sadalp"}, "dotprod": {"sdot"}}
    found = _asked(ASK_ARM, processor).split()
    assert found[0] == expected
    assert instructions[expected] <= set(found[1:])
    assert set(found[1:]).isdisjoint(*(each for name, each in instructions.items() if name != expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_with_a_hidden_feature_runs_code_that_needs_no_more_than_it_has(kind: str) -> None:
    for hidden in sorted(KINDS[kind].needed):
        lesser = replace(named(kind), features=(named(kind).features | KINDS[kind].needed) - {hidden})
        found = kind_of(lesser)
        other = next((each for name, each in KINDS.items() if found == named(name)), None)
        assert found == lesser if other is None else other.needed <= lesser.features
        assert lesser.features & ASKED <= found.features


def test_features_decide_where_a_virtual_machine_reports_another_model() -> None:
    every = KINDS["sapphirerapids"].needed | BF16
    assert kind_of(replace(named("rocketlake"), features=every)) == named("sapphirerapids")
    assert kind_of(replace(named("rocketlake"), features=every | AMX)) == named("sapphirerapids+amx")


def test_a_processor_of_no_kind_runs_code_of_its_own() -> None:
    assert kind_of(named("cooperlake")) == named("cooperlake")


def test_engines_compile_where_the_environment_has_numba_run_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    update = "import os; from edgemoe.jit.env import WORKER_ENV; os.environ.update(WORKER_ENV)"
    assert _asked(f"{update}; import numba; print(numba.config.DISABLE_JIT)", "") == "0"

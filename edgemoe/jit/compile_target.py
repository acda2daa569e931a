"""Chooses the processor to compile code for: the kind of this machine's, or a lesser one that a developer names.

Processors of one kind run the same machine code, which a wheel brings along. All generated code, Numba's own included,
obeys `TARGET`, and every constant that depends on the processor is derived from it. Processors have LLVM's names.
"""

from __future__ import annotations

import ctypes
import difflib
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import llvmlite.binding as llvm

from edgemoe.errors import UnsupportedProcessor
from edgemoe.jit.env import PROCESSOR, read_processor

NEEDED = ("avx2", "fma", "f16c")  # on x86-64: Intel since Haswell (2013), AMD since Excavator (2015)
AVX2 = frozenset(NEEDED)
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl"}
VNNI = AVX512 | {"avx512vnni"}
BF16 = VNNI | {"avx512bf16"}
AMX = frozenset({"amx-bf16", "amx-int8", "amx-tile"})  # products of tiles; a virtual machine often hides them
WITH_AMX = "+amx"  # follows the name of a processor whose code uses them
NONE: frozenset[str] = frozenset()
V3 = {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
ICE = V4 | {"avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512vpopcntdq", "gfni", "vaes"}
SAPPHIRE = {"avx512bf16", "avx512fp16", "avxvnni"}


class ProcessorKind(NamedTuple):
    """Processors for which one machine code is right and fast."""

    features: frozenset[str]  # the ones that our code asks for
    needed: set[str]  # features that LLVM may use; a virtual machine may hide some
    members: tuple[str, ...]


_SAPPHIRE = ("sapphirerapids", "emeraldrapids", "graniterapids")
# By the member that the code is compiled for. A processor is of the first kind whose needed features it has, and that
# uses all of its features that our code asks for.
KINDS = {
    "znver4": ProcessorKind(BF16, ICE | {"avx512bf16", "sse4a"}, ("znver4", "znver5")),
    f"sapphirerapids{WITH_AMX}": ProcessorKind(BF16 | AMX, ICE | SAPPHIRE | AMX, _SAPPHIRE),
    "sapphirerapids": ProcessorKind(BF16, ICE | SAPPHIRE, _SAPPHIRE),
    "cascadelake": ProcessorKind(
        VNNI, V4 | {"avx512vnni"}, ("cascadelake", "icelake-client", "icelake-server", "rocketlake", "tigerlake")
    ),
    "skylake-avx512": ProcessorKind(AVX512, V4, ("skylake-avx512",)),
    "znver1": ProcessorKind(
        AVX2, V3 | {"adx", "clflushopt", "fsgsbase", "rdseed", "sha", "sse4a"}, ("znver1", "znver2", "znver3")
    ),
    "haswell": ProcessorKind(
        AVX2,
        V3,
        ("haswell", "broadwell", "skylake", "alderlake", "raptorlake", "meteorlake", "gracemont", "arrowlake"),
    ),
}
ASKED = frozenset().union(*(kind.features for kind in KINDS.values()))
X86 = {
    **dict.fromkeys(("nehalem", "sandybridge"), NONE),
    "x86-64-v3": AVX2,
    "x86-64-v4": AVX512,
    "cooperlake": BF16,
    **{member: kind.features for name, kind in KINDS.items() for member in kind.members if WITH_AMX not in name},
    **{name: kind.features for name, kind in KINDS.items() if WITH_AMX in name},
}
NEON, DOTPROD = frozenset({"neon"}), frozenset({"dotprod"})  # our code asks for either
ARM = {"generic": NEON, **dict.fromkeys(("cortex-a76", "cortex-a78ae", "neoverse-n1", "neoverse-v2"), DOTPROD)}
LONGEST_NAME = 40  # of a processor, in an error
AT_HWCAP, HWCAP_ASIMDDP = 16, 1 << 20  # of Linux
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64
MACHINE_INTRINSICS = ("llvm.x86.", "llvm.aarch64.")
FOREIGN = "foreign."  # in Numba's code, stands before the names of another machine's intrinsics
MACHINES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}  # with LLVM's triples


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A processor that code is compiled for."""

    name: str
    features: frozenset[str]  # all of this machine's; of another processor, only the features our code asks for
    flags: str  # LLVM feature flags beyond the defaults of the name
    machine: str  # as platform.machine() returns it

    def has(self, *features: str) -> bool:
        """Returns whether the processor has all of these features."""
        return self.features.issuperset(features)

    @property
    def is_native(self) -> bool:
        """Returns whether this machine is of the processor's kind."""
        return self.machine == platform.machine()

    @property
    def lacks(self) -> tuple[str, ...]:
        """Returns the features that edgemoe needs and the processor does not have."""
        return tuple(each for each in NEEDED if self.machine == "x86_64" and not self.has(each))

    def machine_code(self) -> llvm.TargetMachine:
        """Returns LLVM's target machine, which translates LLVM code to machine code for the processor."""
        if self.is_native:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            target = llvm.Target.from_default_triple()
        else:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
            target = llvm.Target.from_triple(MACHINES[self.machine])
        return target.create_target_machine(cpu=self.name, features=self.flags, opt=3, codemodel="jitdefault", jit=True)


def host() -> CompileTarget:
    """Returns the processor of this machine, with all its features that this process may use."""
    features = llvm.get_host_cpu_features()
    has = frozenset(name for name, there in features.items() if there)
    if not (has >= AMX and _allowed_tiles()):
        has -= AMX
    if platform.machine() == "aarch64":  # LLVM does not know all
        has |= NEON | (DOTPROD if ctypes.CDLL(None).getauxval(AT_HWCAP) & HWCAP_ASIMDDP else NONE)
    return CompileTarget(llvm.get_host_cpu_name(), has, features.flatten(), platform.machine())


def _allowed_tiles() -> bool:
    """Whether Linux lets this process use the registers of tiles, for which it asks."""
    return bool(ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0)


def named(name: str) -> CompileTarget:
    """Returns the processor with a name. Raises UnsupportedProcessor for an unknown one."""
    if name in X86:
        flags = ",".join(f"+{each}" for each in sorted(X86[name]))
        return CompileTarget(name.removesuffix(WITH_AMX), X86[name], flags, "x86_64")
    if name in ARM:
        return CompileTarget(name, ARM[name], "", "aarch64")
    known = (*X86, *ARM)
    close = difflib.get_close_matches(name.lower()[:LONGEST_NAME], known, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    raise UnsupportedProcessor(f"{PROCESSOR} is {name[:LONGEST_NAME]!r}{meant}; known are {', '.join(known)}")


def kind_of(target: CompileTarget) -> CompileTarget:
    """Returns the kind of a processor; the processor itself if it belongs to none.

    Features decide, not the name: virtual machines hide features, and some report another model than their
    processor's. Arm processors are of two kinds: with `dotprod` (Armv8.2, products of bytes), and without.
    """
    if target.machine == "aarch64":
        return named("cortex-a76" if target.has(*DOTPROD) else "generic")
    for name, kind in KINDS.items():
        if target.has(*kind.needed) and target.features & ASKED <= kind.features:
            return named(name)
    return target


def check_processor() -> None:
    """Raises UnsupportedProcessor if this machine lacks instructions that code for `TARGET` uses."""
    if TARGET.lacks:
        raise UnsupportedProcessor(
            f"the processor ({TARGET.name}) lacks {_listed(TARGET.lacks)}: edgemoe needs an x86-64 processor with "
            "AVX2, FMA and F16C, or a 64-bit Arm one. Intel has them since Haswell (2013), AMD since Excavator (2015). "
            "In a virtual machine, let the guest see the host's processor"
        )
    if not TARGET.is_native:
        raise UnsupportedProcessor(f"{PROCESSOR} is {TARGET.name!r}, whose code cannot run on {platform.machine()}")
    if missing := sorted(TARGET.features - HOST.features):
        raise UnsupportedProcessor(f"{PROCESSOR} is {TARGET.name!r}, and this one lacks {_listed(missing)}")


def _listed(features: Iterable[str]) -> str:
    return ", ".join(each.upper() for each in features)


HOST = host()  # asks for tiles, also where a processor is named whose code uses them
TARGET = named(name) if (name := read_processor()) else kind_of(HOST)


if __name__ == "__main__":  # a separate process, for callers that must not load LLVM
    try:
        check_processor()
    except UnsupportedProcessor as refused:
        sys.exit(str(refused))

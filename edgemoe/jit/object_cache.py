"""Keeps compiled kernels on disk as object files, so that an engine that starts again compiles nothing.

Numba writes LLVM code, LLVM makes one object file of it, and the linker fills in the addresses. Nothing is pickled.
A wheel brings the object files of the common kinds of processors (`BUILT`). Files compiled here are kept in a
directory. Write access to it means running code as the service: it must belong to this user, writable by no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
import numba.core.cgutils
import numba.extending
import numpy as np
import xxhash
from llvmlite import ir
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from edgemoe.durable import make_folder, open_kept, remove_file, replace_file
from edgemoe.errors import UnsupportedProcessor
from edgemoe.jit.compile_target import FOREIGN, TARGET, CompileTarget
from edgemoe.jit.whole_optimiser import machine_code, unoptimised

log = logging.getLogger(__name__)
types: Any = numba.types
_cgutils: Any = numba.core.cgutils
_intrinsic: Callable[[Any], Any] = numba.extending.intrinsic
CompileProgress = Callable[
    [str, int, int], object
]  # called with a function's name, the number compiled, and of how many
KEPT = 128  # most object files in the directory: for several uses, versions, encodings and processors
DIGEST_BYTES = 16
PACKAGE = Path(__file__).parents[1]
BUILT = Path(__file__).parent / "objects"  # made with the wheel (tools/build_hook.py); a source tree has none
TEMPORARY = ".tmp"
COMPILE_S = 120.0  # how long an engine waits for another engine that compiles
SYMBOL = np.dtype("u4, u1, u1, u2, u8, u8").newbyteorder("<")
SYMBOL.names = ("name", "info", "other", "section", "value", "size")  # an entry of an ELF symbol table
C_TYPES: dict[str, Any] = {"none": None, "int64": ctypes.c_int64, "float32": ctypes.c_float}
_config: Any = numba.config
# For another kind of machine, Numba writes portable LLVM code, which `CompileTarget.machine_code` takes.
_config.CPU_NAME, _config.CPU_FEATURES = (TARGET.name, TARGET.flags) if TARGET.is_native else ("generic", "")
_linked: list[Any] = []  # keeps machine code in use alive; never freed


class Code:
    """A function of numbers and addresses, compiled. Kernels and Python call it by its address."""

    def __init__(self, arguments: tuple[Any, ...], function: Any, result: Any = types.void) -> None:
        self.arguments, self.result, self._function, self._linked = arguments, result, function, 0
        self.name = f"{function.__module__}.{function.__qualname__}"

    @cached_property
    def compiled(self) -> Any:
        """Returns Numba's compiled function; compiles it at the first use."""
        options: Any = {"fastmath": {"contract"}, "error_model": "numpy", "_nrt": False}
        with unoptimised():
            return numba.cfunc(self.result(*self.arguments), **options)(self._function)

    @property
    def symbol(self) -> str:
        """Returns its symbol in object code compiled now, and compiles it. An object file from disk may use another."""
        return str(self.compiled.native_name)

    @property
    def address(self) -> int:
        """Returns its address; compiles it, alone, if it has not been linked."""
        if not self._linked:
            link((self,), None)
        return self._linked

    @cached_property
    def call(self) -> Callable[..., None]:
        """Returns the function for Python, which releases the GIL during a call."""
        return self._prototype(ctypes.CFUNCTYPE)

    @cached_property
    def call_briefly(self) -> Callable[..., Any]:
        """Returns the function for Python, which holds the GIL during a call, for calls of a few microseconds.

        Another thread that took the GIL would keep it for milliseconds.
        """
        return self._prototype(ctypes.PYFUNCTYPE)

    def _prototype(self, make: Callable[..., Any]) -> Callable[..., Any]:
        kinds = (self.result, *self.arguments)
        return make(*(C_TYPES[str(kind)] for kind in kinds))(self.address)  # type: ignore[no-any-return]

    @property
    def folder(self) -> Path:
        """Returns the folder of its source."""
        return Path(self._function.__code__.co_filename).parent

    @property
    def is_linked(self) -> bool:
        """Whether `link` has given it an address."""
        return self._linked != 0

    def set_address(self, address: int) -> None:
        """Records the address from the linker."""
        self._linked = address


class CompiledPart(NamedTuple):
    """Functions that are compiled into one object file."""

    codes: tuple[Code, ...]
    variant: str = ""  # distinguishes functions with the same source


def code(*arguments: Any, result: Any = types.void) -> Callable[[Any], Code]:
    """Decorates a function that is called by its address. `link` compiles it, or reads it from disk."""
    return lambda function: Code(arguments, function, result)


# A chunk of a kernel: (address of its record, number of the chunk), see `thread_pool.parallel`.
chunk = code(types.int64, types.int64)


def address_of(code: Code) -> Callable[[], int]:
    """Makes a function that returns the address of `code` to kernels; the linker fills it in."""

    @_intrinsic
    def address(typing: Any) -> Any:
        symbol, word = code.symbol, ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * len(code.arguments))

        def emit(_: Any, builder: Any, __: Any, ___: Any) -> Any:
            return builder.ptrtoint(_cgutils.get_or_insert_function(builder.module, kind, symbol), word)

        return types.int64(), emit

    return address  # type: ignore[no-any-return]


def no_progress(name: str, done: int, count: int) -> None:
    """Ignores the progress of compiling."""


def link(
    codes: Sequence[Code], directory: Path | None, variant: str = "", progress: CompileProgress = no_progress
) -> None:
    """Gives all `codes` addresses, from the object file of the wheel or of `directory` where there is one.

    Compiles them if there is none. They may refer to each other, and to no other code. `variant` distinguishes
    functions with the same source. `progress` is called before each is compiled. Raises UnsupportedProcessor if they
    call routines that this process lacks.
    """
    if all(code.is_linked for code in codes):
        return
    if (built := _built(codes, variant)) is not None:
        symbols, object_code = built
    elif directory is None or not is_private(directory):
        _compile_each(codes, progress)
        symbols, object_code = _compile(codes)
    else:
        path = _path_in(directory, codes, variant)
        symbols, object_code = _kept(path, codes) or _compile_once(path, codes, progress)
    rtsys.initialize(cpu_target.target_context)  # LLVM learns the addresses of Numba's helpers
    _check_symbols(codes, object_code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), TARGET.machine_code())
    object_file = llvm.ObjectFileRef.from_data(object_code)
    engine.add_object_file(object_file)
    engine.finalize_object()
    _linked.extend((engine, object_file, object_code))
    for code in codes:
        code.set_address(engine.get_function_address(symbols[code.name]))


def is_ready(codes: Sequence[Code], directory: Path, variant: str = "") -> bool:
    """Whether `link` would compile nothing."""
    return _built(codes, variant) is not None or _kept(_path_in(directory, codes, variant), codes) is not None


def compile_ahead(codes: Sequence[Code], directory: Path, variant: str = "") -> None:
    """Compiles into an object file of `directory`, which `link` in another process waits for and reads."""
    path = _path_in(directory, codes, variant)
    if is_private(directory) and _kept(path, codes) is None:
        _compile_once(path, codes, no_progress)


def build(codes: Sequence[Code], directory: Path, variant: str = "") -> None:
    """Compiles into an object file for `BUILT`. Raises OSError."""
    replace_file(directory / f"{_fingerprint(codes, variant)}.o", _packed(*_compile(codes)))


def undefined_symbols(machine_code: bytes) -> list[str]:
    """Returns the undefined symbols of an object file (64-bit ELF)."""
    object_file = llvm.ObjectFileRef.from_data(machine_code)
    parts = {section.name(): section.data() for section in object_file.sections()}
    table, names = np.frombuffer(parts[b".symtab"], SYMBOL), parts[b".strtab"]
    places = table["name"][(table["section"] == 0) & (table["name"] != 0)]
    return sorted(names[place : names.index(b"\0", place)].decode() for place in places.tolist())


def _check_symbols(codes: Sequence[Code], machine_code: bytes) -> None:
    """Raises UnsupportedProcessor for a missing symbol; LLVM's linker would end the process."""
    missing = [name for name in undefined_symbols(machine_code) if not llvm.address_of_symbol(name)]
    if missing:
        names = ", ".join(code.name for code in codes if _calls(code, missing)) or codes[0].name
        raise UnsupportedProcessor(
            f"code for the processor {TARGET.name} calls {', '.join(missing)}, which is not here: {names}; please "
            "report this with the processor's name"
        )


def object_code(codes: Sequence[Code], target: CompileTarget) -> bytes:
    """Returns one object file of these functions for a processor, of another kind of machine if it is one."""
    modules = [llvm_module(code, target) for code in codes]
    return machine_code(modules, [code.symbol for code in codes], target.machine_code())


def llvm_module(code: Code, target: CompileTarget) -> Any:
    """Returns the LLVM code of a function, not optimised; for another kind of machine if the target is one."""
    text = code.compiled.inspect_llvm().replace(f"@{FOREIGN}", "@")
    if not target.is_native:
        machine = target.machine_code()
        text = re.sub(r'target triple = ".*"', f'target triple = "{machine.triple}"', text)
        text = re.sub(r'target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', text)
    return llvm.parse_assembly(text)


def _calls(code: Code, missing: Sequence[str]) -> bool:
    """Whether the code itself calls one of these symbols."""
    return not set(missing).isdisjoint(undefined_symbols(object_code((code,), TARGET)))


def _built(codes: Sequence[Code], variant: str) -> tuple[dict[str, str], bytes] | None:
    """Returns the symbols and the object file of the wheel; None if it has none for these sources and processor."""
    return _kept(BUILT / f"{_fingerprint(codes, variant)}.o", codes) if BUILT.exists() else None


def _path_in(directory: Path, codes: Sequence[Code], variant: str) -> Path:
    """Returns the path of the object file that is compiled here, with these versions of the compilers."""
    return directory / f"{_fingerprint(codes, variant, (numba.__version__, llvmlite.__version__))}.o"


def _kept(path: Path, codes: Sequence[Code]) -> tuple[dict[str, str], bytes] | None:
    """Returns the kept symbols by name, and the object file; None if it is missing, damaged or incomplete."""
    kept = _read(path)
    return kept if kept is not None and set(kept[0]) == {code.name for code in codes} else None


def _compile_once(path: Path, codes: Sequence[Code], progress: CompileProgress) -> tuple[dict[str, str], bytes]:
    """Compiles and keeps them. Engines that start together wait for the first of them, at most `COMPILE_S`."""
    with contextlib.ExitStack() as stack:
        try:
            lock = open_kept(path.with_suffix(".lock"))
            stack.callback(os.close, lock)
        except OSError as error:
            _warn_once("kernels are compiled without waiting for other engines", _why(error, path.parent))
        else:
            progress("waiting for another engine that compiles", 0, len(codes))
            _lock_before(lock, time.monotonic() + COMPILE_S)
        if (kept := _kept(path, codes)) is None:
            _compile_each(codes, progress)
            kept = _compile(codes)
            _write(path, *kept)
        with contextlib.suppress(OSError):
            remove_file(path.with_suffix(".lock"), missing_ok=True)
        return kept


def _lock_before(lock: int, end_s: float) -> None:
    """Locks the file; continues without the lock after `end_s`. The system frees the lock of a process that ends."""
    while time.monotonic() < end_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.1)


def is_private(directory: Path) -> bool:
    """Whether only this user can write the directory; creates it if it is missing."""
    try:
        make_folder(directory, 0o700)
        status = directory.stat()
    except OSError as error:
        _warn_once("kernels are compiled at each start", _why(error, directory))
        return False
    if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return True
    _warn_once("kernels are compiled at each start", f"others can write {directory}")
    return False


def _why(error: OSError, directory: Path) -> str:
    """Returns the reason, which is the same for each file of a folder."""
    return f"{error.strerror or error}: {directory}"


@cache
def _warn_once(text: str, why: str) -> None:
    """Logs a warning, once for all parts of the code."""
    log.warning(text, extra={"why": why})


def sources(codes: Sequence[Code]) -> list[Path]:
    """Returns the source files that the machine code may depend on."""
    inlined = {PACKAGE / name for name in ("jit", "kernels/cpu", "encodings")}
    files = {file for folder in inlined | {code.folder for code in codes} for file in folder.rglob("*.py")}
    return sorted(
        files
        | {
            PACKAGE / name
            for name in ("durable.py", "errors.py", "types/arrays.py", "types/encoding.py", "types/experts.py")
        }
    )


def _fingerprint(codes: Sequence[Code], variant: str, versions: Sequence[str] = ()) -> str:
    """Returns a hash of sources, processor, compilers' versions and functions, which determine the machine code.

    Files of the wheel are named without the versions: their machine code needs no compiler.
    """
    digest = xxhash.xxh3_128()
    for file in sources(codes):
        digest.update(file.read_bytes())
    box = (TARGET.machine, TARGET.name, TARGET.flags, *versions)
    digest.update(json.dumps([*box, variant, [code.name for code in codes]]).encode())
    return str(digest.hexdigest())


def _compile_each(codes: Sequence[Code], progress: CompileProgress) -> None:
    for done, code in enumerate(codes):
        progress(code.name.removeprefix(f"{PACKAGE.name}."), done, len(codes))
        code.compiled  # noqa: B018 (compiles at the first use)


def _compile(codes: Sequence[Code]) -> tuple[dict[str, str], bytes]:
    """Compiles all. Returns their symbols by name, and one object file."""
    symbols = {code.name: code.symbol for code in codes}
    assert len(symbols) == len(codes), "two kernels of one name"
    return symbols, object_code(codes, TARGET)


def _read(path: Path) -> tuple[dict[str, str], bytes] | None:
    """Returns the symbols and the object file that `_write` wrote; None if missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if xxhash.xxh3_128_digest(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        return None
    names, _, machine_code = data[DIGEST_BYTES:].partition(b"\n")
    return json.loads(names), machine_code


def _write(path: Path, symbols: dict[str, str], machine_code: bytes) -> None:
    """Writes the object file, preceded by a hash, and deletes the oldest files beyond KEPT. Logs a failure."""
    try:
        replace_file(path, _packed(symbols, machine_code))
        for old in sorted(path.parent.glob("*.o"), key=_age)[:-KEPT]:
            remove_file(old, missing_ok=True)
        for left in path.parent.glob(f"*{TEMPORARY}"):  # by a process that was killed while writing
            if time.time() - _age(left) > COMPILE_S:
                remove_file(left, missing_ok=True)
    except OSError as error:
        _warn_once("compiled kernels could not be kept", _why(error, path.parent))


def _packed(symbols: dict[str, str], machine_code: bytes) -> bytes:
    """Returns the contents of an object file of ours, which `_read` reads."""
    data = json.dumps(symbols).encode() + b"\n" + machine_code
    return bytes(xxhash.xxh3_128_digest(data)) + data


def _age(file: Path) -> float:
    """Returns the file's modification time; the current time if it was just deleted."""
    try:
        return file.stat().st_mtime
    except OSError:
        return time.time()

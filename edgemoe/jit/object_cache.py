"""Keeps compiled kernels on disk as an object file. An engine that starts again saves ten seconds of compiling.

Numba compiles; LLVM makes one object file of the result; the linker fills in the addresses. Nothing is pickled. Whoever
can write the directory can run code as the service, so it is used only where it belongs to this user and nobody else
can write it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
import xxhash
from llvmlite import ir
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from edgemoe.durable import make_folder, open_kept, remove_file, replace_file
from edgemoe.errors import UnsupportedProcessor
from edgemoe.jit.target import TARGET

log = logging.getLogger(__name__)
types: Any = numba.types
Compiling = Callable[[str, int, int], object]  # is told a function's name, how many are compiled, and of how many
KEPT = 48  # object files in the directory at most: of other uses, versions, encodings or processors
DIGEST_BYTES = 16
PACKAGE = Path(__file__).parents[1]
TEMPORARY = ".tmp"
COMPILE_S = 120.0  # how long an engine waits for another one that compiles
SYMBOL = np.dtype("u4, u1, u1, u2, u8, u8").newbyteorder("<")
SYMBOL.names = ("name", "info", "other", "section", "value", "size")  # a line of an ELF file's table of symbols
C_TYPES: dict[str, Any] = {"none": None, "int64": ctypes.c_int64, "float32": ctypes.c_float}
_config: Any = numba.config
# For another kind of machine, Numba writes portable LLVM code, which `CompileTarget.machine_code` takes.
_config.CPU_NAME, _config.CPU_FEATURES = (TARGET.name, TARGET.flags) if TARGET.is_native else ("generic", "")
_linked: list[Any] = []  # what holds machine code in use; never freed


class Code:
    """Holds a function of numbers. Kernels and Python call it by its address."""

    def __init__(self, arguments: tuple[Any, ...], function: Any, result: Any = types.void) -> None:
        self.arguments, self.result, self._function, self._linked = arguments, result, function, 0
        self.name = f"{function.__module__}.{function.__qualname__}"

    @cached_property
    def compiled(self) -> Any:
        """Returns Numba's compiled function; compiles it at the first use."""
        stand_in()
        options: Any = {"fastmath": {"contract"}, "error_model": "numpy"}
        return numba.cfunc(self.result(*self.arguments), **options)(self._function)

    @property
    def symbol(self) -> str:
        """Returns its name in object code that is compiled now; compiles it. What was linked may have another."""
        return str(self.compiled.native_name)

    @property
    def address(self) -> int:
        """Returns its address; compiles it, alone, where it has not been linked."""
        if not self._linked:
            link((self,), None)
        return self._linked

    @cached_property
    def call(self) -> Callable[..., None]:
        """Returns the function for Python. It releases the GIL."""
        return self._prototype(ctypes.CFUNCTYPE)

    @cached_property
    def call_briefly(self) -> Callable[..., Any]:
        """Returns the function for Python, for calls of a few microseconds: it holds the GIL, which another thread
        would take for milliseconds."""
        return self._prototype(ctypes.PYFUNCTYPE)

    def _prototype(self, make: Callable[..., Any]) -> Callable[..., Any]:
        kinds = (self.result, *self.arguments)
        return make(*(C_TYPES[str(kind)] for kind in kinds))(self.address)  # type: ignore[no-any-return]

    @property
    def folder(self) -> Path:
        """Returns where its source lies."""
        return Path(self._function.__code__.co_filename).parent

    @property
    def is_linked(self) -> bool:
        """Returns whether `place` has given it an address."""
        return self._linked != 0

    def place(self, address: int) -> None:
        """Records the address that the linker gave it."""
        self._linked = address


def silent(name: str, done: int, count: int) -> None:
    """Tells nobody how far compiling is."""


def link(codes: Sequence[Code], directory: Path | None, variant: str = "", progress: Compiling = silent) -> None:
    """Gives all `codes` addresses, from the object file in `directory` where there is one.

    Compiles them where there is none. They may refer to each other but to no further ones. `variant` tells apart
    functions that have the same source. `progress` is called before each is compiled. Raises UnsupportedProcessor where
    they call what is not here.
    """
    if all(code.is_linked for code in codes):
        return
    if directory is None or not _is_private(directory):
        _compile_each(codes, progress)
        symbols, machine_code = _compile(codes)
    else:
        path = directory / f"{_fingerprint(codes, variant)}.o"
        symbols, machine_code = _kept(path, codes) or _compile_once(path, codes, progress)
    rtsys.initialize(cpu_target.target_context)  # LLVM learns the addresses of Numba's helpers
    _check_symbols(codes, machine_code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), TARGET.machine_code())
    object_file = llvm.ObjectFileRef.from_data(machine_code)
    engine.add_object_file(object_file)
    engine.finalize_object()
    _linked.extend((engine, object_file, machine_code))
    for code in codes:
        code.place(engine.get_function_address(symbols[code.name]))


def _compiler_routines() -> Iterator[str]:
    """Yields the routines of a compiler's library that LLVM may call where a processor lacks an instruction."""
    formats, widths = ("hf", "bf", "sf", "df", "xf", "tf"), ("si", "di", "ti")
    yield from (f"__{name}{a}{b}2" for name in ("trunc", "extend") for a in formats for b in formats)
    yield from (f"__{name}{a}{b}" for name in ("fix", "fixuns") for a in formats for b in widths)
    yield from (f"__{name}{b}{a}" for name in ("float", "floatun") for a in formats for b in widths)
    arithmetic = ("add", "sub", "mul", "div", "udiv", "mod", "umod", "ashl", "ashr", "lshr")
    yield from (f"__{name}{a}3" for name in arithmetic for a in (*formats, *widths))
    yield from (f"__{name}{a}2" for name in ("neg", "clz", "ctz", "popcount", "powi") for a in (*formats, *widths))
    yield from (f"__{name}{a}4" for name in ("mulo", "divmod", "udivmod") for a in widths)
    yield from ("__gnu_f2h_ieee", "__gnu_h2f_ieee")


@cache
def stand_in() -> frozenset[str]:
    """Gives LLVM an address, of `abort`, for each such routine that is not in this process. Returns their names.

    Without an address LLVM ends the process while Numba compiles, before `link` can refuse the code.
    """
    missing = frozenset(name for name in _compiler_routines() if not llvm.address_of_symbol(name))
    for name in missing:
        llvm.add_symbol(name, llvm.address_of_symbol("abort"))
    return missing


def undefined_symbols(machine_code: bytes) -> list[str]:
    """Returns the names of what an object file (ELF, of 64 bits) calls or reads and does not hold."""
    object_file = llvm.ObjectFileRef.from_data(machine_code)
    parts = {section.name(): section.data() for section in object_file.sections()}
    table, names = np.frombuffer(parts[b".symtab"], SYMBOL), parts[b".strtab"]
    places = table["name"][(table["section"] == 0) & (table["name"] != 0)]
    return sorted(names[place : names.index(b"\0", place)].decode() for place in places.tolist())


def _check_symbols(codes: Sequence[Code], machine_code: bytes) -> None:
    """Raises UnsupportedProcessor where a symbol is missing, at which LLVM's linker would end the process."""
    absent = stand_in()
    called = undefined_symbols(machine_code)
    missing = [name for name in called if name in absent or not llvm.address_of_symbol(name)]
    if missing:
        names = ", ".join(code.name for code in codes if _calls(code, missing)) or codes[0].name
        raise UnsupportedProcessor(
            f"code for the processor {TARGET.name} calls {', '.join(missing)}, which is not here: {names}; please "
            "report this with the processor's name"
        )


def _calls(code: Code, missing: Sequence[str]) -> bool:
    """Returns whether the code calls one of these symbols on its own."""
    machine_code = TARGET.machine_code().emit_object(llvm.parse_assembly(code.compiled.inspect_llvm()))
    return not set(missing).isdisjoint(undefined_symbols(machine_code))


def _kept(path: Path, codes: Sequence[Code]) -> tuple[dict[str, str], bytes] | None:
    """Returns the kept symbols by names, and the object file; None where it is missing, damaged or incomplete."""
    kept = _read(path)
    return kept if kept is not None and set(kept[0]) == {code.name for code in codes} else None


def _compile_once(path: Path, codes: Sequence[Code], progress: Compiling) -> tuple[dict[str, str], bytes]:
    """Compiles and keeps them. Engines that start together wait for the first one, at most `COMPILE_S`."""
    with contextlib.ExitStack() as stack:
        try:
            lock = open_kept(path.parent / "lock")
            stack.callback(os.close, lock)
        except OSError as error:
            log.warning("kernels are compiled here and by others at once", extra={"why": str(error)})
        else:
            progress("waiting for another engine that compiles", 0, len(codes))
            _take(lock, time.monotonic() + COMPILE_S)
        if (kept := _kept(path, codes)) is None:
            _compile_each(codes, progress)
            kept = _compile(codes)
            _write(path, *kept)
        return kept


def _take(lock: int, end_s: float) -> None:
    """Locks the file, and goes on without the lock after `end_s`. A process that ends frees its lock."""
    while time.monotonic() < end_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.1)


def _is_private(directory: Path) -> bool:
    """Returns whether only this user can write the directory; makes it where it is missing."""
    try:
        make_folder(directory, 0o700)
        status = directory.stat()
    except OSError as error:
        log.warning("kernels are compiled at each start", extra={"why": str(error)})
        return False
    if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return True
    log.warning("kernels are compiled at each start", extra={"why": f"others can write {directory}"})
    return False


def sources(codes: Sequence[Code]) -> list[Path]:
    """Returns the files whose text, constants included, may be in the machine code."""
    inlined = {PACKAGE / name for name in ("jit", "kernels/cpu", "encodings")}
    files = {file for folder in inlined | {code.folder for code in codes} for file in folder.rglob("*.py")}
    return sorted(
        files | {PACKAGE / name for name in ("durable.py", "errors.py", "types/encoding.py", "types/experts.py")}
    )


def _fingerprint(codes: Sequence[Code], variant: str) -> str:
    """Returns a hash of all that the machine code depends on."""
    digest = xxhash.xxh3_128()
    for file in sources(codes):
        digest.update(file.read_bytes())
    box = (TARGET.machine, TARGET.name, TARGET.flags, numba.__version__, llvmlite.__version__)
    digest.update(json.dumps([*box, variant, [code.name for code in codes]]).encode())
    return str(digest.hexdigest())


def _compile_each(codes: Sequence[Code], progress: Compiling) -> None:
    for done, code in enumerate(codes):
        progress(code.name.removeprefix(f"{PACKAGE.name}."), done, len(codes))
        code.compiled  # noqa: B018 (compiles at the first use)


def _compile(codes: Sequence[Code]) -> tuple[dict[str, str], bytes]:
    """Compiles all. Returns their symbols by names, and one object file."""
    symbols = {code.name: str(code.compiled.native_name) for code in codes}
    assert len(symbols) == len(codes), "two kernels of one name"
    whole = llvm.parse_assembly("")
    for code in codes:
        whole.link_in(llvm.parse_assembly(code.compiled.inspect_llvm()))
    return symbols, TARGET.machine_code().emit_object(whole)


def _read(path: Path) -> tuple[dict[str, str], bytes] | None:
    """Returns what `_write` wrote; None where it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if xxhash.xxh3_128_digest(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
        return None
    names, _, machine_code = data[DIGEST_BYTES:].partition(b"\n")
    return json.loads(names), machine_code


def _write(path: Path, symbols: dict[str, str], machine_code: bytes) -> None:
    """Keeps the object file, with a hash in front, and deletes the oldest beyond KEPT. Logs where it cannot."""
    data = json.dumps(symbols).encode() + b"\n" + machine_code
    try:
        replace_file(path, xxhash.xxh3_128_digest(data) + data)
        for old in sorted(path.parent.glob("*.o"), key=_age)[:-KEPT]:
            remove_file(old, missing_ok=True)
        for left in path.parent.glob(f"*{TEMPORARY}"):  # by whoever was killed while writing
            if time.time() - _age(left) > COMPILE_S:
                remove_file(left, missing_ok=True)
    except OSError as error:
        log.warning("compiled kernels could not be kept", extra={"why": str(error)})


def _age(file: Path) -> float:
    """Returns when the file was changed last; now where somebody has just deleted it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return time.time()


def symbol_type(arguments: int) -> Any:
    """Returns the LLVM type of a `Code` with so many int64 arguments."""
    return ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments)

"""Adds to Numba the operations that kernels need: pointers, bf16 bits, atomics, pause and semaphores.

Kernels take addresses, not arrays. So a call costs a fraction of a microsecond, and several threads can work on the
same job (see `thread_pool`). An address is an int64; `record` reads a job's fields.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numba
import numba.core.cgutils
import numba.extending
import numba.np.arrayobj
import numpy as np
from llvmlite import ir

from edgemoe.jit.compile_target import FOREIGN, MACHINE_INTRINSICS, TARGET

I64 = ir.IntType(64)
F32 = ir.FloatType()
Decorator = Callable[[Any], Any]
types: Any = numba.types
cgutils: Any = numba.core.cgutils
_arrays: Any = numba.np.arrayobj
carray: Any = _arrays.get_cfarray_intrinsic("C", None)  # returns an array at a pointer
intrinsic: Decorator = numba.extending.intrinsic
_INNER: Any = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,  # no reference counts, no allocations: arrays are views of memory that Python owns
}
jit: Decorator = numba.njit(fastmath={"contract"}, **_INNER)  # decorates functions that only kernels call
view: Decorator = numba.njit(inline="always", **_INNER)  # decorates functions that return an array
summing: Decorator = numba.njit(fastmath={"contract", "reassoc"}, **_INNER)
INT: Any = types.int64
WIDE = TARGET.has("avx512f")
LANES = 16 if WIDE else 8  # float32 in a vector
WIDEST = 4 if WIDE else 2  # tokens of one loop: sums for four need 32 wide registers
PAIRS = TARGET.has("avx512f", "avx512bf16") and llvm.llvm_version_info >= (16,)  # multiplies pairs of bf16
ZEN = TARGET.name.startswith("znver")
# Prefetching. A Xeon reads 35 GB/s on two cores with it, into the second-level cache, and 23 without. A Zen 5 reads 42
# to 52 GB/s with the second-level cache, and 48 to 60 with the first-level cache and twice the distance.
AHEAD_BYTES, CACHE_LEVEL = (8192, 1) if ZEN else (4096, 2)


class BFloat(ir.Type):  # type: ignore[misc]
    """Stands for LLVM's type bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


_libc = ctypes.CDLL(None, use_errno=True)
sem_init = _libc.sem_init
sem_init.argtypes, sem_init.restype = (ctypes.c_size_t, ctypes.c_int, ctypes.c_uint), ctypes.c_int
sem_post = _libc.sem_post
sem_post.argtypes, sem_post.restype = (ctypes.c_size_t,), ctypes.c_int


def _pointer(element: Any) -> Any:
    """Makes a function that turns an address into a pointer to elements of this type."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        kind = types.CPointer(element)

        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), emit

    return pointer


f32_at = _pointer(types.float32)
i64_at = _pointer(types.int64)
u64_at = _pointer(types.uint64)
u32_at = _pointer(types.uint32)
u16_at = _pointer(types.uint16)
i16_at = _pointer(types.int16)
u8_at = _pointer(types.uint8)
i8_at = _pointer(types.int8)


@intrinsic
def record(typing: Any, address: Any, dtype: Any) -> Any:
    """Returns the record of type `dtype`, a NumPy structured dtype, at `address`."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(dtype.dtype))

    return dtype.dtype(types.int64, dtype), emit


def _libc_call(builder: Any, name: str, arguments: list[Any]) -> Any:
    """Calls a libc function by name, since its address differs between processes and code is kept on disk."""
    kind = ir.FunctionType(ir.IntType(32), [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def wait_for(typing: Any, semaphore: Any) -> Any:
    """Calls sem_wait for the semaphore at an address."""
    return types.int32(types.int64), lambda _, builder, __, args: _libc_call(builder, "sem_wait", [args[0]])


@intrinsic
def wait_until(typing: Any, semaphore: Any, deadline: Any) -> Any:
    """Calls sem_timedwait for the semaphore at an address, up to the timespec (of time.time) at another; 0: woken."""
    return types.int32(*[types.int64] * 2), lambda _, builder, __, args: _libc_call(builder, "sem_timedwait", [*args])


@intrinsic
def wake(typing: Any, semaphore: Any) -> Any:
    """Calls sem_post for the semaphore at an address."""
    return types.int32(types.int64), lambda _, builder, __, args: _libc_call(builder, "sem_post", [args[0]])


@intrinsic
def give_way(typing: Any) -> Any:
    """Calls sched_yield: lets another thread have this core."""
    return types.int32(), lambda _, builder, __, ___: _libc_call(builder, "sched_yield", [])


@intrinsic
def bf16_to_f32(typing: Any, bits: Any) -> Any:
    """Returns the bf16 in the low half of a uint32 as float32."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(args[0], ir.Constant(ir.IntType(32), 16)), F32)

    return types.float32(types.uint32), emit


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """Returns the bits of a float32 as uint32."""
    return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def f32_of(typing: Any, bits: Any) -> Any:
    """Returns the float32 with these bits, a uint32."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], F32)


def block_elements(bf16: bool) -> int:
    """Returns the elements of a row that one turn of the loop takes."""
    return LANES * (2 if bf16 else 1)


def prefetch(builder: Any, address: Any) -> None:
    """Writes the LLVM code of a prefetch of the line at an address."""
    byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(i32, hint) for hint in (0, 4 - CACHE_LEVEL, 1)]  # to read, into that level, data
    builder.call(fetch, [builder.inttoptr(address, byte), *hints])


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Writes the LLVM code of a * b + c, which may become one instruction."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def round_bf16(builder: Any, value: Any) -> Any:
    """Writes LLVM code that rounds float32, one or a vector, to bf16: to nearest, ties to even, NaN stays NaN.

    Returns the bits in the upper half of 32. On processors without AVX-512 BF16, LLVM's own rounding calls a
    compiler-library routine that is not linked.
    """
    word = ir.IntType(32)
    kind = word if value.type == F32 else ir.VectorType(word, value.type.count)

    def each(number: int) -> Any:
        return ir.Constant(kind, number if kind is word else [number] * kind.count)

    bits = builder.bitcast(value, kind)
    odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    nearest = builder.add(builder.add(bits, each(0x7FFF)), odd)
    quiet = builder.or_(bits, each(1 << 22))  # else a NaN whose upper half has no bit set would become infinite
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)
    return builder.and_(chosen, each(0xFFFF0000))


@intrinsic
def rounded(typing: Any, value: Any) -> Any:
    """Returns a float32 rounded to bf16, as bits: the upper half of a uint32."""
    return types.uint32(types.float32), lambda _, builder, __, args: round_bf16(builder, args[0])


@jit
def load_bf16(address: int, index: int) -> float:
    """Returns element `index` of the bf16 array at `address`, as float32."""
    return bf16_to_f32(np.uint32(u16_at(address)[index]))  # type: ignore[no-any-return]


@jit
def load_f32(address: int, index: int) -> float:
    """Returns element `index` of the float32 array at `address`."""
    return f32_at(address)[index]  # type: ignore[no-any-return]


@jit
def store_bf16(address: int, index: int, value: float) -> None:
    """Stores a float32 as bf16, rounded to nearest, ties to even."""
    u16_at(address)[index] = np.uint16(rounded(np.float32(value)) >> np.uint32(16))


@jit
def store_f32(address: int, index: int, value: float) -> None:
    """Stores element `index` of the float32 array at `address`."""
    f32_at(address)[index] = value


@intrinsic
def atomic_load(typing: Any, address: Any) -> Any:
    """Returns the int64 at an address."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def atomic_store(typing: Any, address: Any, value: Any) -> Any:
    """Stores an int64 at an address."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def atomic_add(typing: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address. Returns the old value."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_swap(typing: Any, address: Any, value: Any) -> Any:
    """Stores an int64 at an address. Returns the old value."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_replace(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Stores `value` at an address if `expected` is there. Returns whether it was."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


def instruction(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Calls an LLVM intrinsic.

    Numba's engine knows this machine's only. Another machine's is a function to it, which `llvm_module` renames.
    """
    if name.startswith(MACHINE_INTRINSICS) and not TARGET.is_native:
        name = f"{FOREIGN}{name}"
        llvm.add_symbol(name, llvm.address_of_symbol("abort"))
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def pause(typing: Any) -> Any:
    """Tells the processor that this thread spins (the pause instruction)."""
    names = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}

    def emit(context: Any, builder: Any, _: Any, __: Any) -> Any:
        name, operands = names[TARGET.machine]
        instruction(builder, name, ir.VoidType(), [ir.Constant(ir.IntType(32), operand) for operand in operands])
        return context.get_dummy_value()

    return types.void(), emit


def _call(_: Any, builder: Any, __: Any, args: Any) -> Any:
    """Calls the function at the address args[0] with the other arguments, int64."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * (len(args) - 1))
    builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
    return ir.Constant(ir.IntType(8).as_pointer(), None)


@intrinsic
def call_chunk(typing: Any, function: Any, job: Any, number: Any) -> Any:
    """Calls the `chunk` at an address. If called by name, LLVM would optimise it again inside each caller."""
    return types.void(*[types.int64] * 3), _call


@intrinsic
def call_rows(
    typing: Any, fn: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any, k: Any
) -> Any:
    """Calls a product of `gemv.make_rows` or `gemm_tile.make_tile` by its address."""
    return types.void(*[types.int64] * 12), _call


@intrinsic
def call_pack(typing: Any, fn: Any, values: Any, first: Any, count: Any, n: Any, out: Any) -> Any:
    """Calls, by its address, code that packs elements of a vector or decodes rows of weights."""
    return types.void(*[types.int64] * 6), _call

"""Runs the kernels for Python. An object holds threads, scratch memory and compiled functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgemoe.jit.object_cache import Code, CompiledPart, CompileProgress, link, no_progress
from edgemoe.jit.thread_pool import PAUSE_OFTEN, RUN_CHUNKS, RUN_HELPER, ThreadPool
from edgemoe.kernels.cpu import decode_attention as attention
from edgemoe.kernels.cpu import linear as products
from edgemoe.kernels.cpu import prefill_attention as prefill
from edgemoe.kernels.cpu.decode_attention import make_attention
from edgemoe.kernels.cpu.decode_step import make_step
from edgemoe.kernels.cpu.encoded.row_code import RowCode, make_row_code
from edgemoe.kernels.cpu.experts_decode import EXPERTS_CODE
from edgemoe.kernels.cpu.experts_prefill import make_prefill_experts
from edgemoe.kernels.cpu.gemv import rows_in_chunk
from edgemoe.kernels.cpu.latent_step import make_latent
from edgemoe.kernels.cpu.linear import (
    BYTE_PRODUCT,
    GROUPED,
    LINEAR,
    LINEAR_CODE,
    PRODUCT,
    byte_product,
    linear,
    make_grouped_linear,
    make_product,
)
from edgemoe.kernels.cpu.paged_cache import ATTENTION, PagedCache, fill_cache
from edgemoe.kernels.cpu.prefill_attention import PREFILL, make_prefill_attention
from edgemoe.kernels.cpu.prefill_heads import SOME, make_many_heads
from edgemoe.kernels.cpu.prefill_states import carry_state, make_delta_span, make_mamba_span
from edgemoe.kernels.cpu.state_step import STATE_STAGES, advance_delta
from edgemoe.kernels.cpu.vector import make_pack_all, pack_for
from edgemoe.types.encoding import BFLOAT16, FLOAT32, Encoding

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
MOST_TOKENS = 1024  # of one call of a kernel for single tokens


def kernel_part(bf16: bool) -> CompiledPart:
    """Returns the code of the kernels for one weight type, less that of rows (see `row_code`)."""
    refers = (make_step, make_attention, make_grouped_linear, make_prefill_experts, make_prefill_attention)
    packs = (make_pack_all(bf16), pack_for)
    every = (RUN_HELPER, RUN_CHUNKS, PAUSE_OFTEN, *EXPERTS_CODE, *LINEAR_CODE, *packs, make_many_heads(bf16))
    made = (make(bf16)[-1] for make in (*refers, make_product))
    return CompiledPart(tuple(dict.fromkeys((*every, *chain.from_iterable(made)))), variant_of(bf16))


def stage_parts(bf16: bool) -> list[CompiledPart]:
    """Returns the stages that only some families use, a part each (see `Kernels.stage_address`)."""
    steps = (*make_latent(bf16), advance_delta, *STATE_STAGES)
    prompts = (*make_delta_span(bf16), *make_mamba_span(bf16), carry_state)
    return [CompiledPart((stage,), variant_of(bf16)) for stage in (*steps, *prompts)]


def variant_of(bf16: bool) -> str:
    """Returns the variant of code for one weight type."""
    return "bf16" if bf16 else "f32"


class KernelContext:
    """Holds threads and scratch memory of the kernels for one weight type. `threads` include the caller's.

    Only one thread may call at a time, because the scratch memory is shared. Close it, or let it be collected.
    """

    def __init__(self, threads: int, bf16: bool, directory: Path | None = None, byte_activations: bool = True) -> None:
        """Keeps compiled code of rows in `directory`, if one is given.

        With `byte_activations`, many tokens are multiplied with encoded rows in whole numbers of 8 bits.
        """
        self.bf16, self._directory, self._byte_activations = bf16, directory, byte_activations
        self.dtype = BFLOAT16 if bf16 else FLOAT32
        self.pool = ThreadPool(threads)
        self.close = self.pool.close
        self.scratch_changes = 0  # scratch arrays that were replaced by larger ones
        self._scratch: dict[str, tuple[int, npt.NDArray[Any]]] = {}  # by name: address and memory
        self._iota = np.arange(MOST_TOKENS, dtype=np.int64)
        self.iota = self._iota.ctypes.data
        self._borrowed = np.zeros(threads, np.int64)

    def clone_for_thread(self) -> Self:
        """Returns another one for the thread that computes for peers, with threads and scratch memory of its own.

        It rounds no activations to 8 bits, because boxes compare each other's results closely.
        """
        return type(self)(self.pool.threads, self.bf16, self._directory, byte_activations=False)

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike = np.float32) -> int:
        """Returns the address of an array of at least `count` elements, aligned to 64 bytes.

        The array stays until a larger one of this name is asked for.
        """
        size = count * np.dtype(dtype).itemsize + 64
        if name not in self._scratch or self._scratch[name][1].nbytes < size:
            memory = np.zeros(size, np.uint8)
            self.scratch_changes += 1
            self._scratch[name] = (memory.ctypes.data + 63) & ~63, memory
        return self._scratch[name][0]

    def row_code(self, encoding: Encoding) -> RowCode:
        """Returns the code for rows of an encoding; compiles it, or reads it from disk, at the first use."""
        code = make_row_code(encoding, self.bf16, self._directory)
        return code if self._byte_activations else replace(code, byte_rows=None, byte_pack=None)

    def decode_rows(self, job: npt.NDArray[np.void], rows: RowCode, floats: int) -> None:
        """Sets a record's fields for encoded rows, with room for `floats` decoded float32 in each thread."""
        assert rows.unpack is not None
        each = -(-floats // 16) * 16
        job["unpack"], job["threads"] = rows.unpack.address, self.pool.threads
        job["decoded"], job["decoded_bytes"] = self.scratch("decoded", each * self.pool.threads), 4 * each
        job["borrowed"] = self._borrowed.ctypes.data


class Kernels(KernelContext):
    """Runs the kernels for one weight type on `threads` threads, the caller's among them.

    Compiling takes ten seconds; the machine code is kept in `directory`, where one is given. Only one thread may call
    at a time, because the scratch memory is shared. Close it, or let it be collected. `progress` as of `link`.
    """

    def __init__(
        self,
        threads: int,
        bf16: bool,
        directory: Path | None = None,
        progress: CompileProgress = no_progress,
        byte_activations: bool = True,
    ) -> None:
        part = kernel_part(bf16)
        link(part.codes, directory, part.variant, progress)  # the pool's code is in it, and would be compiled alone
        super().__init__(threads, bf16, directory, byte_activations)
        self._progress = progress
        attention, pack = make_attention(bf16)[1], make_pack_all(bf16)
        grouped, product, prefill = make_grouped_linear(bf16)[0], make_product(bf16)[0], make_prefill_attention(bf16)[0]
        self._step = make_step(bf16)[0].call
        self._linear, self._attention, self._pack_queries = linear.call, attention.call, pack.call
        self._pack, self._grouped = pack_for.call, grouped.call
        self._prefill, self._product, self._byte_product = prefill.call, product.call, byte_product.call
        self.linear_record = np.zeros(1, LINEAR)
        self.linear_record["threads"] = threads
        self._attention_job = np.zeros(1, ATTENTION)
        self._many_heads = make_many_heads(bf16).address

    def linear(
        self, weight: int, rows: int, n: int, x: int, x_bf16: bool, tokens: int, out: int, code: RowCode | None = None
    ) -> None:
        """Computes out [tokens, rows] float32 = x [tokens, n] . weight [rows, n] transposed; `code` is of its encoding.

        Without `code` weights are of the model's type.
        """
        code = code or self.row_code(self.dtype)
        packed, plain = self.scratch("linear.x", tokens * n), self.scratch("linear.plain", n)
        self._pack(x, x_bf16, tokens, n, packed, plain, code.pack.address)
        job = self.linear_record
        line = code.encoding.row_bytes(n)
        job["weight"], job["line"], job["multiply"] = weight, line, code.rows.address
        job["rows"], job["n"], job["x"], job["out"] = rows, n, packed, out
        job["index"], job["tokens"], job["step"] = self.iota, tokens, rows_in_chunk(rows, line, self.pool.threads)
        self._linear(self.pool.control, job.ctypes.data)

    def grouped_linear(self, weight: int, groups: int, rows: int, n: int, x: int, tokens: int, out: int) -> None:
        """Computes out [tokens, groups, rows] float32 = x [tokens, groups, n] . weight [groups, rows, n].

        `x` is in the weights' type.
        """
        job = np.zeros(1, GROUPED)
        packed = self.scratch("grouped.x", tokens * groups * n)
        self._pack_queries(x, self.bf16, tokens * groups, n, packed, 1.0)
        job["weight"], job["groups"], job["rows"], job["n"] = weight, groups, rows, n
        job["x"], job["tokens"], job["out"], job["iota"] = packed, tokens, out, self.iota
        self._grouped(self.pool.control, job.ctypes.data)

    def product(
        self, weight: int, rows: int, n: int, x: int, x_bf16: bool, tokens: int, out: int, code: RowCode
    ) -> None:
        """Computes the same as `linear`, for encoded weights and many tokens."""
        if code.byte_rows is not None:
            self._product_of_bytes(weight, rows, n, x, x_bf16, tokens, out, code)
            return
        job = np.zeros(1, PRODUCT)
        job["weight"], job["line"], job["rows"], job["n"] = weight, code.encoding.row_bytes(n), rows, n
        job["x"], job["x_bf16"], job["tokens"], job["out"] = x, x_bf16, tokens, out
        for name, count in products.scratch_floats(n, tokens, self.pool.threads).items():
            job[name] = self.scratch(f"product.{name}", count)
        job["some"] = products.many_rows(self.pool.threads)
        self.decode_rows(job, code, products.MOST_ROWS * n)
        self._product(self.pool.control, job.ctypes.data)

    def _product_of_bytes(
        self, weight: int, rows: int, n: int, x: int, x_bf16: bool, tokens: int, out: int, code: RowCode
    ) -> None:
        assert code.byte_rows is not None
        assert code.byte_pack is not None
        job = np.zeros(1, BYTE_PRODUCT)
        job["weight"], job["line"], job["rows"], job["n"] = weight, code.encoding.row_bytes(n), rows, n
        job["x"], job["x_bf16"], job["tokens"], job["out"], job["iota"] = x, x_bf16, tokens, out, self.iota
        job["multiply"], job["pack"] = code.byte_rows.address, code.byte_pack.address
        job["some"] = products.many_rows(self.pool.threads)
        for name, count in products.byte_scratch_floats(n, tokens).items():
            job[name] = self.scratch(f"byte_product.{name}", count)
        self._byte_product(self.pool.control, job.ctypes.data)

    def attend(
        self, queries: int, tokens: int, tables: IntArray, contexts: IntArray, cache: PagedCache, out: int
    ) -> None:
        """Computes the attention of one new token each of several sequences: out [tokens, heads * value_dim] float32.

        `queries` [tokens, heads, head_dim] are in the weights' type, after rotary; `tables` [tokens, blocks] are block
        ids, `contexts` [tokens] the tokens of each context, the new one among them. The new tokens' keys and
        values are in the cache already.
        """
        packed = self.scratch("attend.queries", tokens * cache.heads * cache.head_dim)
        self._pack_queries(queries, self.bf16, tokens * cache.heads, cache.head_dim, packed, cache.scale)
        job = self._attention_job
        fill_cache(job, cache)
        job["queries"], job["out"], job["plain"], job["iota"] = packed, out, 1, self.iota
        self.fill_contexts(job, tables, contexts, [cache])
        self._attention(self.pool.control, job.ctypes.data)

    def prefill(self, queries: int, tokens: int, table: IntArray, context: int, cache: PagedCache, out: int) -> None:
        """Computes the attention of one sequence's last `tokens`: out [tokens, heads, value_dim] in the model's type.

        `queries` [tokens, heads, head_dim] are in the model's type, after rotary; `table` [blocks] are block ids;
        `context` is the number of tokens with these. The chunk's own keys and values are in the cache already.
        """
        shape = (cache.heads, cache.kv_heads)
        span = prefill.span_tokens(*shape, tokens, self.pool.threads)
        piece = prefill.scratch_floats(*shape, cache.head_dim, cache.value_dim, span)
        job = np.zeros(1, PREFILL)
        fill_cache(job, cache)
        job["queries"], job["out"], job["tokens"] = queries, out, tokens
        job["table"], job["context"] = table.ctypes.data, context
        job["scratch"] = self.scratch("prefill", cache.kv_heads * -(-tokens // span) * piece)
        job["span"], job["piece_bytes"] = span, 4 * piece
        job["scale"] = cache.scale
        self._prefill(self.pool.control, job.ctypes.data)

    def place_heads(self, job: npt.NDArray[np.void], cache: PagedCache) -> None:
        """Takes all tokens of a MANY_HEADS record to the cache. Fills its scratch."""
        kept = np.zeros(1, ATTENTION)
        fill_cache(kept, cache)
        chunks = -(-int(job["tokens"][0]) // SOME)
        job["attention"] = kept.ctypes.data
        job["x"] = self.scratch("heads.x", chunks * int(job["line"][0]))
        job["values"] = self.scratch("heads.values", chunks * cache.kv_heads * cache.head_dim)
        self.pool.run(self._many_heads, job.ctypes.data, chunks)

    def fill_contexts(
        self, jobs: npt.NDArray[np.void], tables: IntArray, contexts: IntArray, caches: Iterable[PagedCache]
    ) -> None:
        """Writes contexts and scratch memory into ATTENTION records, which run one after the other over `caches`.

        Keep the arrays while the records are used.
        """
        tokens, longest, sizes = len(contexts), int(contexts.max()), dict[str, int]()
        for shape in {(cache.heads, cache.value_dim, cache.window) for cache in caches}:
            read = attention.reach(longest, shape[2])
            for name, count in attention.scratch_floats(*shape[:2], tokens, read).items():
                sizes[name] = max(count, sizes.get(name, 0))
        for name, count in sizes.items():
            jobs[name] = self.scratch(f"attention.{name}", count)
        jobs["tokens"], jobs["longest"], jobs["contexts"] = tokens, longest, contexts.ctypes.data
        jobs["tables"], jobs["table_width"] = tables.ctypes.data, tables.shape[1]

    def stage_address(self, stage: Code) -> int:
        """Returns the address of a stage. At first use one that few families have is compiled, or read from disk."""
        link((stage,), self._directory, variant_of(self.bf16), self._progress)
        return stage.address

    def step(self, record: int) -> None:
        """Runs the plan of the STEP record at this address, up to a layer whose experts the caller computes."""
        self._step(self.pool.control, record)

"""Plans a model's decode step: the stages that the kernel runs, and the memory that their records point to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.families.spec import ModelSpec, RopeSpec
from edgemoe.jit.object_cache import Code
from edgemoe.kernels.cpu.decode_stages import (
    ACTIVATE,
    JOIN,
    PART,
    PRODUCTS,
    SOURCE,
    STEP_TOKENS,
    WEIGH,
    activate_token,
    make_join,
    multiply_parts,
    weigh,
)
from edgemoe.kernels.cpu.decode_step import ATTENTION as ATTENTION_STAGE
from edgemoe.kernels.cpu.decode_step import CHUNKS, EXPERTS_OF, STAGE, STEP
from edgemoe.kernels.cpu.gemv import rows_in_chunk
from edgemoe.kernels.cpu.paged_cache import ATTENTION
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.kernels.cpu.vector import ACTIVATIONS, PACK
from edgemoe.model.dense_weights import FEW_TOKENS, DenseMatrix, Norm
from edgemoe.model.feed_forward import Mlp
from edgemoe.model.kv import DTYPES
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import Activation

Record = npt.NDArray[Any]


class Source(NamedTuple):
    """Something that is added to the residual: `factor` * sigmoid(gate) * norm(x + bias). Addresses; 0: without."""

    x: int
    bias: int = 0
    norm: int = 0
    gate: int = 0
    factor: float = 1.0


class Packed(NamedTuple):
    """A vector as several matrices want it: PACK records, and the places of the packed vectors by `Code.address`."""

    packs: int
    pack_count: int
    places: dict[int, int]


class Part(NamedTuple):
    """One product: a matrix's rows at `weight`, packed vectors and results, with bytes from token to token."""

    matrix: DenseMatrix
    x: int
    out: int
    weight: int = 0  # 0: the matrix's own
    rows: int = 0
    x_stride: int = 0
    out_stride: int = 0


def plain_matrix(rows: torch.Tensor) -> DenseMatrix:
    """Returns a matrix of numbers, for products."""
    return DenseMatrix(rows, ENCODINGS[str(rows.dtype).removeprefix("torch.")], rows.shape[1])


class StepPlan:
    """Collects stages in the order in which they run. Vectors have room for FEW_TOKENS tokens."""

    def __init__(self, spec: ModelSpec, kernels: Kernels) -> None:
        self.spec, self.kernels = spec, kernels
        self.step = np.zeros(1, STEP)
        self.residual = torch.zeros(FEW_TOKENS, spec.hidden)
        self.hidden = torch.zeros(FEW_TOKENS, spec.hidden, dtype=DTYPES[spec.dtype])
        self.given = self.hidden  # the experts' input
        if spec.feed_forward.latent:
            self.given = torch.zeros(FEW_TOKENS, spec.feed_forward.latent, dtype=DTYPES[spec.dtype])
        self.mixed = torch.zeros(self.given.shape)  # the experts' sum
        width = 0 if spec.layer_inputs is None else spec.layer_inputs.width
        self.inputs = torch.zeros(spec.layers, FEW_TOKENS, 2 * width)  # of each layer, behind room for their gate
        self.reads, self.writes = (np.zeros(FEW_TOKENS, np.int64) for _ in range(2))  # slots of states
        self.attention: Record = np.zeros(spec.layers, ATTENTION)
        self.angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
        self._kept: list[Any] = []  # of which records have addresses
        self._buffers: dict[tuple[str, int], int] = {}
        self._stages: list[tuple[int, int, int, int, int]] = []
        self._pending: list[Source] = []
        self._added: dict[str, Any] = {}

    # --- memory -----------------------------------------------------------------------------------------------------

    def record(self, dtype: np.dtype[Any], **values: Any) -> Record:
        """Returns a new record with these fields; others are 0."""
        made: Record = np.zeros(1, dtype)
        for name, value in values.items():
            made[name] = value
        self._kept.append(made)
        return made

    def room(self, count: int, dtype: npt.DTypeLike = np.float32) -> int:
        """Returns the address, a multiple of 64, of a new array."""
        memory = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
        self._kept.append(memory)
        return (memory.ctypes.data + 63) & ~63

    def buffer(self, name: str, width: int) -> int:
        """Returns the address of float32 [tokens, width] for FEW_TOKENS tokens; layers that use one name share it."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self.room(FEW_TOKENS * width)
        return self._buffers[name, width]

    def vector(self, values: torch.Tensor | None) -> int:
        """Returns the address of the values in float32, or 0."""
        if values is None:
            return 0
        wide = values.float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()

    def rotation(self, rope: RopeSpec) -> tuple[int, int]:
        """Returns the addresses of a step's cos and sin [tokens, dims / 2]."""
        if rope not in self.angles:
            self.angles[rope] = torch.zeros(FEW_TOKENS, rope.dims // 2), torch.zeros(FEW_TOKENS, rope.dims // 2)
        cos, sin = self.angles[rope]
        return cos.data_ptr(), sin.data_ptr()

    # --- stages -----------------------------------------------------------------------------------------------------

    def chunks(self, code: Code, record: Record, each: int = 1, fixed: int = 0) -> None:
        """Adds a stage that calls a chunk `each` times for each token, and `fixed` times more."""
        self._stages.append((CHUNKS, self.kernels.stage_address(code), record.ctypes.data, each, fixed))

    def attend(self, record: Record) -> None:
        """Adds attention from an ATTENTION record."""
        self._stages.append((ATTENTION_STAGE, 0, record.ctypes.data, 0, 0))

    def experts(self, layer: int) -> None:
        """Adds the experts of a layer, counted among layers with experts, from `given` to `mixed`."""
        self._stages.append((EXPERTS_OF, 0, layer, 0, 0))

    def packed(self, name: str, width: int, matrices: Sequence[DenseMatrix]) -> Packed:
        """Returns the places of a vector of `width` numbers for these matrices."""
        codes = dict.fromkeys(self.kernels.row_code(matrix.encoding).pack.address for matrix in matrices)
        places = {code: self.buffer(f"{name}.{number}", width) for number, code in enumerate(codes)}
        records: Record = np.zeros(len(places), PACK)
        records["pack"], records["out"] = list(places), list(places.values())
        self._kept.append(records)
        return Packed(records.ctypes.data, len(records), places)

    def part(self, matrix: DenseMatrix, x: Packed, out: int) -> Part:
        """Returns a matrix's product with a packed vector."""
        return Part(matrix, x.places[self.kernels.row_code(matrix.encoding).pack.address], out)

    def multiply(self, parts: Sequence[Part], of_rows: bool = False) -> None:
        """Adds products that run side by side."""
        made, chunks = np.zeros(len(parts), PART), 0
        for record, part in zip(made, parts, strict=True):
            code, n, rows = (
                self.kernels.row_code(part.matrix.encoding),
                part.matrix.columns,
                part.rows or len(part.matrix),
            )
            record["weight"], record["line"] = part.weight or part.matrix.rows.data_ptr(), code.encoding.row_bytes(n)
            record["rows"], record["n"], record["multiply"] = rows, n, code.rows.address
            record["x"], record["x_stride"] = part.x, part.x_stride or 4 * n
            record["out"], record["out_stride"] = part.out, part.out_stride or 4 * rows
            some = rows_in_chunk(rows, code.encoding.row_bytes(n), self.kernels.pool.threads)
            record["some"], record["first"] = some, chunks
            chunks += -(-rows // some)
        self._kept += [made, parts]
        tokens = self.step.ctypes.data
        job = self.record(PRODUCTS, step=tokens, of_rows=of_rows, parts=made.ctypes.data, count=len(made))
        job["threads"] = self.kernels.pool.threads
        self.chunks(multiply_parts, job, each=0, fixed=chunks)

    def weigh(self, x: int, width: int, packed: Packed, **gates: int) -> None:
        """Adds a stage that weighs a vector by gates, if there are any, and packs it."""
        self.chunks(weigh, self.record(WEIGH, x=x, n=width, packs=packed.packs, pack_count=packed.pack_count, **gates))

    def pend(self, *sources: Source, after: Norm | None = None, factor: float = 1.0, scalar: float = 1.0) -> None:
        """Leaves sources to be added to the residual by the next `join`."""
        self._pending = list(sources)
        self._added = {"after": 0 if after is None else after.weight.data_ptr(), "factor": factor, "scalar": scalar}
        self._kept.append(after)

    def join(self, norm: Norm | None, name: str, matrices: Sequence[DenseMatrix], experts: bool = False) -> Packed:
        """Adds the pending sources to the residual, and returns its norm as these matrices want it.

        With `experts` it is the input of the experts too.
        """
        sources: Record = np.zeros(len(self._pending), SOURCE)
        for record, source in zip(sources, self._pending, strict=True):
            for field, value in source._asdict().items():
                record[field] = value
        packed, width = self.packed(name, self.spec.hidden, matrices), self.spec.hidden
        job = self.record(JOIN, residual=self.residual.data_ptr(), width=width, eps=self.spec.block.eps)
        job["sources"], job["count"], job["factor"], job["scalar"] = sources.ctypes.data, len(sources), 1.0, 1.0
        for field, value in self._added.items():
            job[field] = value
        job["centred"] = self.spec.block.centred
        job["norm"] = 0 if norm is None else norm.weight.data_ptr()
        job["plain"], job["packs"], job["pack_count"] = self.buffer("plain", width), packed.packs, packed.pack_count
        job["hidden"] = self.hidden.data_ptr() if experts else 0
        self._kept += [sources, norm]
        self._pending, self._added = [], {}
        self.chunks(make_join(self.kernels.bf16), job)
        return packed

    def give(self, x: int) -> None:
        """Adds a stage that copies a vector to the experts' input, in the model's type."""
        job = self.record(JOIN, residual=x, width=self.given.shape[1], plain=x, hidden=self.given.data_ptr())
        self.chunks(make_join(self.kernels.bf16), job)

    def normalised(self, name: str, x: int, width: int, norm: Norm, matrices: Sequence[DenseMatrix]) -> Packed:
        """Adds the norm of a vector that is not the residual. Returns it as these matrices want it."""
        packed = self.packed(name, width, matrices)
        job = self.record(JOIN, residual=x, width=width, norm=norm.weight.data_ptr(), eps=norm.eps, plain=x)
        job["packs"], job["pack_count"] = packed.packs, packed.pack_count
        self._kept.append(norm)
        self.chunks(make_join(self.kernels.bf16), job)
        return packed

    def network(self, name: str, mlp: Mlp, out: int) -> None:
        """Adds the second half of a network, whose gate and up, or up alone, lie at `out` [tokens, line]."""
        self.activate(name, mlp.activation, mlp.down, out, len(mlp.gate_up))

    def activate(self, name: str, activation: Activation, down: DenseMatrix, x: int, line: int) -> None:
        """Adds an activation of gate and up, or of up alone, at `x` [tokens, line], and its product with `down`."""
        width = down.columns
        packed = self.packed(f"{name}.middle", width, [down])
        job = self.record(ACTIVATE, x=x, line=line, width=width, packs=packed.packs, pack_count=packed.pack_count)
        job["activation"] = ACTIVATIONS.index(activation.kind)
        job["alpha"], job["limit"] = activation.alpha, activation.limit
        self.chunks(activate_token, job)
        self.multiply([self.part(down, packed, self.buffer(name, self.spec.hidden))])

    def finish(self) -> Record:
        """Returns the STEP record with all stages, and scratch memory."""
        step, router, pairs = self.step, self.spec.router, FEW_TOKENS * self.spec.router.top_k
        stages: Record = np.zeros(len(self._stages), STAGE)
        for record, stage in zip(stages, self._stages, strict=True):
            for name, value in zip(STAGE.names or (), stage, strict=True):
                record[name] = value
        self._kept.append(stages)
        step["stages"], step["stage_count"], step["iota"] = stages.ctypes.data, len(stages), self.kernels.iota
        step["width"], step["experts"], step["k"] = self.given.shape[1], router.experts, router.top_k
        step["hidden"], step["mixed"] = self.given.data_ptr(), self.mixed.data_ptr()
        for name in ("slots", "offsets", "index"):
            step[name] = self.room(pairs + 1, np.int64)
        step["shares"], step["counts"] = self.room(pairs), self.room(router.experts, np.int64)
        return step


assert STEP.names is not None
assert STEP.names[: len(STEP_TOKENS.names or ())] == STEP_TOKENS.names

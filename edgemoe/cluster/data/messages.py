"""Messages of the two channels between engines: expert calls, and bulk transfers of experts, KV entries and stores.

calls   Hello -> Hello, ExpertCall -> ExpertResult, OpenStage -> StageOpened, StageStep -> StageResult
bulk    FetchExpert -> ExpertChunk, FetchPiece -> PiecePart, FetchKV -> KVPart; each part is a tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self, get_args

import numpy as np
import xxhash
from msgspec import Meta

from edgemoe.cluster.rpc.envelope import Failure
from edgemoe.errors import PeerRefused
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.bounds import Bitmap, Bytes, Count, Seconds, Small, Word
from edgemoe.types.experts import ExpertGeometry, ServedModel
from edgemoe.types.peers import ExpertWork
from edgemoe.types.placement import pack_bits, unpack_bits
from edgemoe.types.stages import CacheRoom, StageWork
from edgemoe.types.step import BLOCK_TOKENS, EntryKind, StateUse
from edgemoe.wire.protocol import Buffer, Message, MessageLanguage

CHUNK_BYTES = 1 << 20  # of an expert in one message
PART_BYTES = 4 << 20  # of an entry of the prefix cache in one message
MAX_ROWS = 1 << 16  # of one call
BlockKey = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(Message, frozen=True, tag="Hello"):
    """Names the served model, with bitmaps of the experts in memory and on the disk. Reply: Hello."""

    model: Word  # digest
    layers: Small
    experts: Small
    row_bytes: Bytes  # one row of hidden states
    expert_bytes: Bytes  # of a largest one
    ram: Bitmap
    disk: Bitmap

    @classmethod
    def of(cls, model: ServedModel, ram: BoolArray, disk: BoolArray) -> Self:
        """Returns the hello that names these experts in memory and on the disk, [L, E] each."""
        return cls(model.digest, *_sizes(model.geometry), pack_bits(ram), pack_bits(disk))

    def holdings(self, node: str, ours: ServedModel) -> tuple[BoolArray, BoolArray]:
        """Returns the node's experts in memory and on its disk, [L, E] each. Raises PeerRefused for another model."""
        if self.model != ours.digest:
            raise PeerRefused(
                f"{node} serves model {self.model[:12]}, not {ours.digest[:12]}; serve the same packed store on both: "
                "the same checkpoint in the same encodings"
            )
        layers, experts, *_ = sizes = (self.layers, self.experts, self.row_bytes, self.expert_bytes)
        if sizes != _sizes(ours.geometry):
            raise PeerRefused(f"{node} computes the same model in other sizes: {sizes}; run the same release on both")
        try:
            return unpack_bits(self.ram, layers, experts), unpack_bits(self.disk, layers, experts)
        except ValueError as error:
            raise PeerRefused(f"{node} tells its experts wrongly: {error}") from error


class ExpertCall(Message, frozen=True, tag="Call"):
    """Asks to compute `experts` experts of a layer, `calls` calls in all, on `rows` rows. Reply: ExpertResult.

    Tensors: the rows, and an int32 index: experts [n], calls of each [n], row of each call [m], routing weight of each
    call [m] as bits of float32.
    """

    layer: Small
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    experts: Annotated[int, Meta(ge=1, le=1 << 20)]
    calls: Annotated[int, Meta(ge=1, le=1 << 24)]

    @classmethod
    def of(cls, work: ExpertWork) -> tuple[Self, list[Buffer]]:
        """Returns the message and the tensors that carry the work."""
        n, m = len(work.experts), len(work.rows)
        index = np.empty(2 * n + 2 * m, np.int32)
        index[:n], index[n : 2 * n] = work.experts, np.diff(work.offsets)
        index[2 * n : 2 * n + m] = work.rows
        index[2 * n + m :] = work.weights.view(np.int32)
        return cls(work.layer, len(work.hidden), n, m), [work.hidden.data.cast("B"), index.data.cast("B")]

    def work(self, tensors: Sequence[memoryview], geometry: ExpertGeometry) -> ExpertWork:
        """Returns the work that a peer asks for. Raises PeerRefused where it is not valid."""
        n, m, rows = self.experts, self.calls, self.rows
        row_bytes = geometry.row_bytes
        fits = len(tensors) == 2 and tensors[0].nbytes == rows * row_bytes and tensors[1].nbytes == 8 * (n + m)
        if not fits or self.layer >= geometry.layers or n > geometry.experts_of(self.layer):
            raise PeerRefused("a call whose sizes do not fit together")
        index = np.frombuffer(tensors[1], np.int32)
        numbers, weights = index[: 2 * n + m].astype(np.int64), index[2 * n + m :].view(np.float32)
        experts, counts, row = numbers[:n], numbers[n : 2 * n], numbers[2 * n :]
        inside = numbers.min() >= 0 and experts.max() < geometry.experts_of(self.layer) and row.max() < rows
        distinct = len(set(experts.tolist())) == n
        if not (inside and distinct and counts.min() >= 1 and counts.sum() == m and np.isfinite(weights).all()):
            raise PeerRefused("a call whose numbers cannot be")
        offsets = np.concatenate(([0], np.cumsum(counts)))
        hidden = np.frombuffer(tensors[0], np.uint8).reshape(rows, row_bytes)
        return ExpertWork(self.layer, experts, offsets, row, weights, hidden)


class ExpertResult(Message, frozen=True, tag="Result"):
    """Carries a call's sums; `served_s` is the time from the call's arrival to this answer."""

    served_s: Seconds


class FetchExpert(Message, frozen=True, tag="Fetch"):
    """Asks for `bytes` bytes of one expert from `offset`."""

    layer: Small
    expert: Small
    offset: Bytes
    bytes: Annotated[int, Meta(ge=1, le=CHUNK_BYTES)]


class ExpertChunk(Message, frozen=True, tag="Chunk"):
    """Carries the bytes asked for, and the checksum of the whole expert."""

    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class FetchKV(Message, frozen=True, tag="FetchKV"):
    """Asks for `bytes` bytes of the block known by `key`, from `offset`; or of the state after it, or of its window.

    `encoding` is a digest of the model and of how its keys, values and states lie in bytes.
    """

    encoding: Word
    key: BlockKey
    state: bool
    offset: Bytes
    bytes: Annotated[int, Meta(ge=1, le=PART_BYTES)]
    window: bool = False

    @property
    def kind(self) -> EntryKind:
        """Returns the kind of the entry."""
        if self.window:
            return EntryKind.WINDOW
        return EntryKind.STATE if self.state else EntryKind.BLOCK


class KVPart(Message, frozen=True, tag="KVPart"):
    """Carries the bytes asked for. All parts of one entry have one generation.

    The checksum is of the key, the generation and the offset too, so that no part is taken for another.
    """

    generation: Count
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]

    @classmethod
    def of(cls, asked: FetchKV, generation: int, part: Buffer) -> Self:
        return cls(generation, _checksum(asked, generation, part))

    def is_intact(self, asked: FetchKV, part: Buffer) -> bool:
        """Returns whether these bytes are the requested part."""
        return self.checksum == _checksum(asked, self.generation, part)


class FetchPiece(Message, frozen=True, tag="FetchPiece"):
    """Asks for `bytes` bytes from `offset` of the piece of a store that has this checksum.

    The model's digest stands for the store's manifest.
    """

    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    offset: Bytes
    bytes: Annotated[int, Meta(ge=1, le=CHUNK_BYTES)]


class PiecePart(Message, frozen=True, tag="PiecePart"):
    """Carries the bytes asked for, fewer where the piece ends before; `size` is that of the whole piece."""

    size: Bytes


class OpenStage(Message, frozen=True, tag="OpenStage"):
    """Asks to use the layers first:after of a box. Reply: StageOpened."""

    model: Word  # digest
    first: Small
    after: Small


class StageOpened(Message, frozen=True, tag="StageOpened"):
    """Names the opening. It stays while both engines live; with another one, all keys and values are gone.

    `CacheRoom` describes the counts.
    """

    opening: Count
    blocks: Small
    window_blocks: Small
    state_slots: Small

    @property
    def room(self) -> CacheRoom:
        return CacheRoom(self.blocks, self.window_blocks, self.state_slots)


class StageStep(Message, frozen=True, tag="StageStep"):
    """Asks to compute a stage for `rows` tokens of some sequences. Reply: StageResult.

    Tensors: the residual, float32, and an int32 index. The index has the tokens of each sequence in the step, and in
    all. The blocks of each follow, and with `windows` the windows' blocks of each. With `states` follow the slot that
    each reads and the number of slots that it writes. At last come these slots, each with the tokens before it.
    """

    opening: Count
    number: Count  # of the step, rising
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    sequences: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    windows: bool = False
    states: bool = False

    @classmethod
    def of(cls, opening: int, number: int, work: StageWork) -> tuple[Self, list[Buffer]]:
        """Returns the message and the tensors that carry the work."""
        parts: list[Sequence[int]] = [work.query_lens, work.context_lens, *work.block_tables, *work.window_tables]
        if uses := work.states:
            parts += [[use.read for use in uses], [len(use.writes) for use in uses]]
            parts += [[number for write in use.writes for number in write] for use in uses]
        index = np.concatenate([np.array(part, np.int32) for part in parts])
        count = len(work.query_lens)
        hidden = np.ascontiguousarray(work.hidden)
        message = cls(opening, number, len(hidden), count, bool(work.window_tables), bool(work.states))
        return message, [hidden.data.cast("B"), index.data.cast("B")]

    def work(self, tensors: Sequence[memoryview], width: int) -> StageWork:
        """Returns the work that a peer asks for, of residuals of this width. Raises PeerRefused where it is invalid."""
        count, rows = self.sequences, self.rows
        if len(tensors) != 2 or tensors[0].nbytes != 4 * rows * width or tensors[1].nbytes % 4:
            raise PeerRefused("a step whose sizes do not fit together")
        index = np.frombuffer(tensors[1], np.int32).astype(np.int64)
        lens, contexts, tables = index[:count], index[count : 2 * count], index[2 * count :]
        if len(index) < 2 * count or lens.min() < 1 or lens.sum() != rows or (contexts < lens).any():
            raise PeerRefused("a step whose numbers cannot be")
        held = -(-contexts // BLOCK_TOKENS)
        held_blocks = int(held.sum()) * (1 + self.windows)
        tables, uses = tables[:held_blocks], tables[held_blocks:]
        if len(tables) != held_blocks or (len(uses) and not self.states):
            raise PeerRefused("a step whose blocks do not fit its contexts")
        parts = [part.tolist() for part in np.split(tables, np.cumsum(np.tile(held, 1 + self.windows))[:-1])]
        hidden = np.frombuffer(tensors[0], np.float32).reshape(rows, width)
        states = _state_uses(uses, lens) if self.states else ()
        return StageWork(hidden, lens.tolist(), contexts.tolist(), parts[:count], parts[count:], states)


def _state_uses(numbers: IntArray, lens: IntArray) -> list[StateUse]:
    """Returns the slots of states in the last part of a step's index. Raises PeerRefused where they cannot be."""
    count = len(lens)
    reads, writes, pairs = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    if len(numbers) < 2 * count or (writes < 1).any() or 2 * writes.sum() != len(pairs):
        raise PeerRefused("a step whose states do not fit its sequences")
    pairs, ends = pairs.reshape(-1, 2), np.cumsum(writes)
    befores = np.concatenate([[0], pairs[:-1, 0]])
    befores[ends[:-1]] = 0  # of each sequence's first slot
    if (pairs[:, 0] <= befores).any() or (pairs[ends - 1, 0] != lens).any():
        raise PeerRefused("a step whose states do not fit its tokens")
    parts = np.split(pairs, ends[:-1])
    return [
        StateUse(read, [(a, s) for a, s in part.tolist()]) for read, part in zip(reads.tolist(), parts, strict=True)
    ]


class StageResult(Message, frozen=True, tag="StageResult"):
    """Carries the residual behind the stage; `served_s` is the time from the step's arrival to this answer."""

    served_s: Seconds


ExpertCallMessage = Hello | ExpertCall | ExpertResult | OpenStage | StageOpened | StageStep | StageResult | Failure
BulkMessage = FetchExpert | ExpertChunk | FetchKV | KVPart | FetchPiece | PiecePart | Failure
EXPERT_CALLS: MessageLanguage[ExpertCallMessage] = MessageLanguage(*get_args(ExpertCallMessage))
BULK: MessageLanguage[BulkMessage] = MessageLanguage(*get_args(BulkMessage))


def _sizes(geometry: ExpertGeometry) -> tuple[int, int, int, int]:
    """Returns the sizes that must be equal on two engines that compute for each other."""
    largest_bytes = max(geometry.expert_bytes(layer) for layer in range(geometry.layers))
    return geometry.layers, geometry.experts, geometry.row_bytes, largest_bytes


def _checksum(asked: FetchKV, generation: int, part: Buffer) -> str:
    digest = xxhash.xxh3_128(asked.key)
    digest.update(f"{asked.state} {generation} {asked.offset} ".encode())
    digest.update(part)
    return digest.hexdigest()

"""Keeps copies of peers' answers until they are computed again, and counts the wrong ones of each box.

No thread, no clock: `answer_checker` does the work. docs/design/answer_checks.md has the arithmetic.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import BoolArray, FloatArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.peers import ExpertWork, row_floats

KEPT_BYTES = 32 << 20  # of all answers that may be checked in idle time
DUE_BYTES = 8 << 20  # of all answers that must be checked
KEPT_ROWS = 4  # of one answer: as many, drawn at random, stand for a longer one
BATCH_ROWS = 64  # checked together
WRONG_ANSWERS = 2  # after which a box is cut off
CLEARED_ANSWERS = 1000  # right ones in a row, after which a wrong one is forgotten

# The largest distance of two right results, relative to a row's length. Four times as much as was measured, at least.
ROUNDED_TO_BFLOAT16 = 2.0**-5
ENCODED = 2.0**-8  # activations are rounded to 16 bits by some kernels
FLOAT32 = 2.0**-14

ByteRows = npt.NDArray[np.uint8]  # [r, bytes of a row]
InMemory = Callable[[int], BoolArray]  # layer -> mask of its experts [E]


def tolerance(geometry: ExpertGeometry, layer: int) -> float:
    """Returns the relative distance up to which two boxes' results of a layer count as equal."""
    if geometry.bf16:
        return ROUNDED_TO_BFLOAT16
    encoded = geometry.encoding(layer).group or geometry.down_encoding(layer).group
    return ENCODED if encoded else FLOAT32


def wrong_rows(theirs: FloatArray, ours: FloatArray, most: float) -> BoolArray:
    """Returns which rows [r] of two results [r, H] are further apart than `most`, relative to ours.

    A row that is not finite here either says nothing, and counts as right.
    """
    theirs, ours = theirs.astype(np.float64), ours.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart, length = np.linalg.norm(theirs - ours, axis=1), np.linalg.norm(ours, axis=1)
        wrong: BoolArray = np.isfinite(length) & ~(apart <= most * length)
    return wrong


class KeptAnswer(NamedTuple):
    """A copy of an answer, or of some of its rows."""

    node: str
    work: ExpertWork
    sums: ByteRows

    @property
    def size_bytes(self) -> int:
        return 2 * self.sums.nbytes + 64 * len(self.work.rows)

    @classmethod
    def of(cls, node: str, work: ExpertWork, result: memoryview, rng: random.Random) -> KeptAnswer:
        """Returns a copy of at most KEPT_ROWS rows of the answer."""
        sums = np.frombuffer(result, np.uint8).reshape(work.hidden.shape)
        rows = len(work.hidden)
        if rows <= KEPT_ROWS:
            return cls(node, work, sums.copy())
        chosen = np.array(sorted(rng.sample(range(rows), KEPT_ROWS)))
        return cls(node, rows_of(work, chosen), sums[chosen])


def rows_of(work: ExpertWork, chosen: npt.NDArray[np.int64]) -> ExpertWork:
    """Returns the part of the work on the chosen rows, in ascending order."""
    kept = np.flatnonzero(np.isin(work.rows, chosen))
    ends = np.searchsorted(kept, work.offsets)
    used = np.flatnonzero(np.diff(ends))
    return ExpertWork(
        work.layer,
        work.experts[used],
        np.append(ends[used], len(kept)),
        np.searchsorted(chosen, work.rows[kept]),
        work.weights[kept],
        work.hidden[chosen],
    )


@dataclass(slots=True)
class PeerRecord:
    """The checked answers of one box."""

    right: int = 0
    wrong: int = 0  # in all
    held_against: int = 0  # wrong ones that are not forgotten
    right_since: int = 0  # the last wrong one, or the suspicion
    suspected: bool = False  # all its answers are checked
    cut: bool = False


class AnswerLedger:
    """Draws the answers to check, and judges the boxes."""

    def __init__(self, geometry: ExpertGeometry, share: float, rng: random.Random) -> None:
        """Has `share` of all answers checked in any case, and others in idle time."""
        self.records = defaultdict[str, PeerRecord](PeerRecord)
        self.dropped = 0  # answers drawn for a check, without room for them
        self._geometry, self._share, self._rng = geometry, share, rng
        self._due = deque[KeptAnswer]()
        self._kept = defaultdict[int, list[KeptAnswer]](list)  # by layer
        self._due_bytes = self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._due) + sum(map(len, self._kept.values()))

    def note(self, node: str, work: ExpertWork, result: memoryview) -> None:
        """Keeps a copy of an answer to be checked later."""
        record = self.records[node]
        if record.cut:
            return
        answer = KeptAnswer.of(node, work, result, self._rng)
        must = self._rng.random() < self._share
        if not ((must or record.suspected) and self._add_due(answer)):
            self.dropped += must
            self._keep(answer)

    def suspect(self, node: str) -> None:
        """Has all kept and coming answers of a box checked, until CLEARED_ANSWERS in a row were right."""
        record = self.records[node]
        if record.suspected or record.cut:
            return
        record.suspected, record.right_since = True, 0
        for answer in self._remove_answers(lambda answer: answer.node == node):
            if not self._add_due(answer):
                self._keep(answer)

    @property
    def has_suspects(self) -> bool:
        """Returns whether the answers of some box are all checked."""
        return any(record.suspected for record in self.records.values())

    def next_batch(self, in_memory: InMemory, idle: bool) -> list[KeptAnswer]:
        """Removes and returns answers of one layer: drawn ones, else in `idle` time others.

        Answers whose experts are all in memory are checked together; others one at a time.
        """
        if self._due:
            batch = self._pop_due(in_memory)
        elif idle and self._kept:
            batch = [self._pop_kept()]
        else:
            return []
        layer, room = batch[0].work.layer, BATCH_ROWS - sum(len(answer.sums) for answer in batch)
        if is_there(batch[0].work, mask := in_memory(layer)):
            batch += self._pop_likewise(layer, mask, room)
        return batch

    def put_back(self, batch: list[KeptAnswer]) -> None:
        """Takes back answers that could not be checked now."""
        for answer in batch:
            if not self._add_due(answer):
                self._keep(answer)

    def judge(self, answer: KeptAnswer, ours: memoryview) -> bool:
        """Returns whether the answer is right; `ours` are the sums computed again."""
        bf16 = self._geometry.bf16
        shape = len(answer.sums), -1
        theirs, mine = row_floats(answer.sums.data, bf16).reshape(shape), row_floats(ours, bf16).reshape(shape)
        return not wrong_rows(theirs, mine, tolerance(self._geometry, answer.work.layer)).any()

    def record_right(self, node: str) -> None:
        """Counts a right answer, which may end a suspicion."""
        record = self.records[node]
        record.right += 1
        record.right_since += 1
        if record.suspected and record.right_since >= CLEARED_ANSWERS:
            record.suspected, record.held_against = False, 0

    def record_wrong(self, node: str) -> bool:
        """Counts a wrong answer. Returns whether the box is now cut off; else it is suspected."""
        record = self.records[node]
        record.wrong += 1
        record.held_against += 1
        record.right_since = 0
        if record.cut or record.held_against < WRONG_ANSWERS:
            self.suspect(node)
            return False
        record.cut, record.suspected = True, False
        self._remove_answers(lambda answer: answer.node == node)
        return True

    def forget(self, node: str) -> None:
        """Drops the copies of answers of a box that has left. Its record stays until the engine ends."""
        self._remove_answers(lambda answer: answer.node == node)

    # --- inside -------------------------------------------------------------------------------------------------

    def _add_due(self, answer: KeptAnswer) -> bool:
        """Has the answer checked. Returns False where there is no room."""
        if self._due_bytes + answer.size_bytes > DUE_BYTES:
            return False
        self._due.append(answer)
        self._due_bytes += answer.size_bytes
        return True

    def _keep(self, answer: KeptAnswer) -> None:
        """Keeps the answer in place of others, drawn at random, so that the kept ones stand for all."""
        self._kept[answer.work.layer].append(answer)
        self._kept_bytes += answer.size_bytes
        while self._kept_bytes > KEPT_BYTES:
            self._pop_kept()

    def _pop_kept(self) -> KeptAnswer:
        layers = list(self._kept)
        (layer,) = self._rng.choices(layers, [len(self._kept[each]) for each in layers])
        answers = self._kept[layer]
        at = self._rng.randrange(len(answers))
        answers[at], answers[-1] = answers[-1], answers[at]
        return self._removed(layer)

    def _removed(self, layer: int) -> KeptAnswer:
        answer = self._kept[layer].pop()
        if not self._kept[layer]:
            del self._kept[layer]
        self._kept_bytes -= answer.size_bytes
        return answer

    def _pop_due(self, in_memory: InMemory) -> list[KeptAnswer]:
        first = self._due.popleft()
        layer, mask, batch, rest = first.work.layer, in_memory(first.work.layer), [first], deque[KeptAnswer]()
        rows = len(first.sums)
        for answer in self._due if is_there(first.work, mask) else ():
            fits = answer.work.layer == layer and rows + len(answer.sums) <= BATCH_ROWS
            if fits and is_there(answer.work, mask):
                batch.append(answer)
                rows += len(answer.sums)
            else:
                rest.append(answer)
        if len(batch) > 1:
            self._due = rest
        self._due_bytes -= sum(answer.size_bytes for answer in batch)
        return batch

    def _pop_likewise(self, layer: int, mask: BoolArray, rows: int) -> list[KeptAnswer]:
        """Removes kept answers of the layer whose experts are in memory, up to `rows` rows."""
        batch: list[KeptAnswer] = []
        answers = self._kept.get(layer, [])
        for at in range(len(answers) - 1, -1, -1):
            if rows < KEPT_ROWS:
                break
            if is_there(answers[at].work, mask):
                rows -= len(answers[at].sums)
                answers[at], answers[-1] = answers[-1], answers[at]
                batch.append(self._removed(layer))
        return batch

    def _remove_answers(self, wanted: Callable[[KeptAnswer], bool]) -> list[KeptAnswer]:
        """Removes and returns the wanted answers."""
        found = [answer for answer in self._all() if wanted(answer)]
        self._due = deque(answer for answer in self._due if not wanted(answer))
        for layer in list(self._kept):
            self._kept[layer] = [answer for answer in self._kept[layer] if not wanted(answer)]
            if not self._kept[layer]:
                del self._kept[layer]
        self._due_bytes = sum(answer.size_bytes for answer in self._due)
        self._kept_bytes = sum(answer.size_bytes for answers in self._kept.values() for answer in answers)
        return found

    def _all(self) -> Iterator[KeptAnswer]:
        yield from self._due
        for answers in self._kept.values():
            yield from answers


def is_there(work: ExpertWork, mask: BoolArray) -> bool:
    """Returns whether all experts of the work are in the mask [E]."""
    return bool(mask[work.experts].all())

"""A box that computes wrongly is found by computing its answers again, and cut off; a right one never is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import partial_store, tiny_checkpoint
from support.engines import EXPERTS, LAYERS, EngineBox, prompts, running
from support.gate import RARE_ENCODINGS, in_gate
from support.kept import KERNELS
from support.waiting import wait_until
from test_data_plane import SIZES, work

from edgemoe.cluster.data import answer_ledger as ledger_module
from edgemoe.cluster.data.answer_checker import AnswerChecker, CheckingMeans
from edgemoe.cluster.data.answer_ledger import AnswerLedger, KeptAnswer, rows_of, tolerance, wrong_rows
from edgemoe.encodings.codec import pack
from edgemoe.errors import PeerBusy
from edgemoe.ipc.messages import PeerCutOff
from edgemoe.kernels.cpu.expert_math import ExpertMath, ExpertSlab, WayLimits
from edgemoe.kernels.cpu.experts_decode import ExpertLayout
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.store import packer
from edgemoe.telemetry.metrics import ANSWERS_CHECKED, named
from edgemoe.types.arrays import BoolArray
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.peers import ExpertWork

ALL_EXPERTS = np.ones(SIZES.experts, np.bool_)


def asked(seed: int, rows: int = 1, layer: int = 1) -> ExpertWork:
    """Returns work on random finite rows."""
    made = work(layer, rows, seed)
    hidden = np.random.default_rng(seed).normal(size=(rows, SIZES.hidden)).astype(np.float32)
    return made._replace(hidden=hidden.view(np.uint8))


def right(done: ExpertWork) -> memoryview:
    """Returns the sums of experts that return their input."""
    hidden = done.hidden.reshape(-1).view(np.float32).reshape(len(done.hidden), -1)
    sums = np.zeros_like(hidden)
    np.add.at(sums, done.rows, hidden[done.rows] * done.weights[:, None])
    return memoryview(sums.view(np.uint8).data.cast("B"))


def wrong(done: ExpertWork) -> memoryview:
    sums = np.frombuffer(right(done), np.float32) * np.float32(1.5)
    return memoryview(sums.view(np.uint8).data.cast("B"))


class Spare:
    """A box that checks answers by `right`, when the test says so."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self.ledger = AnswerLedger(SIZES, share, random.Random(seed))
        self.cut: list[tuple[str, str]] = []
        self.now_s, self.idle, self.busy = 0.0, True, False
        self.mask: BoolArray = ALL_EXPERTS
        self.computed: list[int] = []  # works of each batch
        self.other: Any = None
        self.faults = 0  # computations here that go wrong
        means = CheckingMeans(self.here, self.another, lambda _: self.mask, lambda: self.idle)
        self.checker = AnswerChecker(self.ledger, share, means, lambda *said: self.cut.append(said), lambda: self.now_s)

    async def here(self, works: Sequence[ExpertWork]) -> list[memoryview]:
        if self.busy:
            raise PeerBusy("a peer's call waits")
        self.computed.append(len(works))
        self.now_s += 1e-3
        self.faults, wrongly = max(0, self.faults - 1), self.faults > 0
        return [wrong(each) if wrongly else right(each) for each in works]

    async def another(self, _work: ExpertWork, _than: str) -> memoryview | None:
        return self.other

    async def check_all(self) -> None:
        while len(self.ledger) and not self.busy:
            self.now_s += 10
            if not await self.checker.check_some():
                break


async def test_a_box_is_cut_off_at_its_second_wrong_answer_and_its_other_answers_are_dropped() -> None:
    spare = Spare(share=1.0)
    for n in range(10):
        spare.ledger.note("b", asked(n), (wrong if n in (2, 3, 7) else right)(asked(n)))
        spare.ledger.note("c", asked(n), right(asked(n)))
    await spare.check_all()
    ((node, why),) = spare.cut
    assert node == "b"
    assert "layer 1, experts [2, 5]" in why
    assert spare.ledger.records["b"].cut
    assert spare.ledger.records["c"].wrong == 0
    spare.ledger.note("b", asked(0), right(asked(0)))
    assert len(spare.ledger) == 0


async def test_one_wrong_answer_is_forgiven_after_many_right_ones_which_are_all_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "CLEARED_ANSWERS", 20)
    spare = Spare(share=0.5)
    spare.ledger.note("b", asked(0), wrong(asked(0)))
    await spare.check_all()
    record = spare.ledger.records["b"]
    assert record.suspected
    spare.idle = False
    for n in range(20):
        spare.ledger.note("b", asked(n), right(asked(n)))
    await spare.check_all()
    assert record.right == 20
    assert not record.suspected
    spare.ledger.note("b", asked(1), wrong(asked(1)))
    spare.idle = True
    await spare.check_all()
    assert not spare.cut
    assert record.wrong == 2


async def test_while_the_box_is_busy_drawn_answers_are_checked_with_others_within_the_share_of_time() -> None:
    spare = Spare(share=0.01, seed=3)
    spare.idle = False
    for n in range(1000):
        spare.ledger.note("b", asked(n), right(asked(n)))
        spare.now_s += 1e-3
        await spare.checker.check_some()
    checked, batches = spare.ledger.records["b"].right, len(spare.computed)
    assert 2 <= batches <= 25
    assert checked > batches  # answers of the layer whose experts are in memory come along
    assert spare.checker.seconds <= 0.01 * spare.now_s + 2e-3
    spare.idle = True
    await spare.check_all()
    assert spare.ledger.records["b"].right == 1000
    assert ledger_module.BATCH_ROWS // 2 < max(spare.computed) <= ledger_module.BATCH_ROWS


async def test_kept_answers_are_bounded_and_drawn_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    each = KeptAnswer.of("b", asked(0), right(asked(0)), random.Random(0)).size_bytes
    monkeypatch.setattr(ledger_module, "KEPT_BYTES", 100 * each)
    monkeypatch.setattr(ledger_module, "DUE_BYTES", 5 * each)
    spare = Spare(share=0.02)
    for n in range(3000):
        spare.ledger.note("b", asked(n)._replace(layer=n % 2), right(asked(n)))
        assert len(spare.ledger) <= 105
    assert spare.ledger.dropped > 20
    spare.idle = True
    await spare.check_all()
    assert spare.ledger.records["b"].right == 105


async def test_a_long_answer_is_checked_by_some_of_its_rows() -> None:
    spare = Spare(share=1.0)
    for n in range(2):
        spare.ledger.note("b", asked(n, rows=100), wrong(asked(n, rows=100)))
    await spare.check_all()
    assert [node for node, _ in spare.cut] == ["b"]


def test_some_rows_of_a_work_have_the_same_sums() -> None:
    whole = asked(5, rows=40)
    chosen = np.array([3, 4, 17, 39])
    some = np.frombuffer(right(rows_of(whole, chosen)), np.float32).reshape(4, -1)
    np.testing.assert_array_equal(some, np.frombuffer(right(whole), np.float32).reshape(40, -1)[chosen])


async def test_an_answer_that_this_box_computes_wrongly_counts_against_nobody() -> None:
    spare = Spare(share=1.0)
    spare.faults = 1
    spare.ledger.note("b", asked(0), right(asked(0)))
    await spare.check_all()
    assert spare.checker.own_errors == 1
    assert spare.ledger.records["b"].wrong == 0


async def test_another_box_agrees_or_this_box_reads_the_experts_and_decides() -> None:
    spare = Spare(share=1.0)
    spare.mask = ~ALL_EXPERTS
    spare.other = right(asked(0))
    spare.ledger.note("b", asked(0), right(asked(0)))
    await spare.check_all()
    assert (spare.computed, spare.ledger.records["b"].right) == ([], 1)
    spare.other = wrong(asked(1))  # the other box lies
    spare.ledger.note("b", asked(1), right(asked(1)))
    await spare.check_all()
    assert (spare.computed, spare.ledger.records["b"].wrong) == ([1], 0)
    spare.other = None
    for n in (2, 3):
        spare.ledger.note("b", asked(n), wrong(asked(n)))
    await spare.check_all()
    assert [node for node, _ in spare.cut] == ["b"]


async def test_peers_calls_go_before_checks() -> None:
    spare = Spare(share=1.0)
    spare.ledger.note("b", asked(0), right(asked(0)))
    spare.busy, spare.now_s = True, 10.0
    assert not await spare.checker.check_some()
    assert len(spare.ledger) == 1
    spare.busy = False
    assert await spare.checker.check_some()
    assert len(spare.ledger) == 0


def test_rows_that_are_not_numbers_are_wrong_where_ours_are() -> None:
    ours = np.ones((4, 8), np.float32)
    theirs = ours.copy()
    theirs[0, 3], theirs[1, 0], theirs[2, 1] = np.nan, np.inf, 1.0 + 1e-6
    assert wrong_rows(theirs, ours, 2.0**-14).tolist() == [True, True, False, False]
    ours[3, 0] = np.inf  # of hidden states that are no numbers
    assert not wrong_rows(theirs, ours, 2.0**-14)[3]


# --- the rounding of honest boxes ----------------------------------------------------------------------------------

GROUPED = ["", *(name for name, each in ENCODINGS.items() if each.group)]
WAYS = {"dots": WayLimits(np.inf), "tiles": WayLimits(0.0), "products": WayLimits(0.0, 0.0)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoding", in_gate(GROUPED, [name for name in GROUPED if name not in RARE_ENCODINGS]))
def test_honest_boxes_differ_by_less_than_a_quarter_of_the_bound_in_each_encoding(dtype: str, encoding: str) -> None:
    """Each way on many tokens, with outliers, against each other one; and sums in another order of experts."""
    geometry = ExpertGeometry(1, 4, 2, 256, 128, dtype, encodings=(encoding,) if encoding else ())
    rng = np.random.default_rng(0)
    layout = ExpertLayout.of(geometry, 0)
    parts = [
        pack(rng.normal(0, 0.05, (4 * rows, columns)).astype(np.float32), geometry.encoding(0)).reshape(4, -1)
        for rows, columns in (geometry.gate_up_shape, geometry.down_shape)
    ]
    raw = torch.from_numpy(np.ascontiguousarray(np.concatenate([part.view(np.uint8) for part in parts], axis=1)))
    slab = ExpertSlab(raw, layout, geometry.bf16)
    kernels = Kernels(1, geometry.bf16, directory=KERNELS).clone_for_thread()  # as for other boxes
    x = rng.normal(size=(16, 256)).astype(np.float32)
    x[:, ::37] *= 30.0
    hidden = torch.from_numpy(x).to(torch.bfloat16 if geometry.bf16 else torch.float32)
    weights = rng.random(32).astype(np.float32)
    results = []
    for limits in WAYS.values():
        for order in (np.arange(4), np.arange(4)[::-1].copy()):
            index, out = np.tile(np.arange(16).reshape(2, 8), 2).reshape(4, 8)[order].ravel(), torch.zeros(16, 256)
            ExpertMath(kernels, limits).add(
                slab, order, np.arange(5) * 8, index, weights.reshape(4, 8)[order].ravel(), hidden, out
            )
            results.append(out.to(hidden.dtype).float().numpy())
    kernels.close()
    for theirs in results:
        for ours in results:
            assert not wrong_rows(theirs, ours, tolerance(geometry, 0) / 4).any()
    assert wrong_rows(results[0] * np.float32(1 + 2 * tolerance(geometry, 0)), results[0], tolerance(geometry, 0)).all()


# --- real engines --------------------------------------------------------------------------------------------------


class Liar:
    """Corrupts a share of the answers that a box gives to others, by a seed."""

    def __init__(self, box: EngineBox, share: float, seed: int = 0) -> None:
        self.answers = self.lies = 0
        self._share, self._rng = share, random.Random(seed)
        host = box.side._host
        self._compute, self._at_once = host.compute, host.compute_at_once
        host.compute = self.compute  # type: ignore[method-assign]
        host.compute_at_once = self.compute_at_once  # type: ignore[method-assign]

    def compute(self, works: Any) -> Any:
        return [self._perhaps_wrong(sums) for sums in self._compute(works)]

    def compute_at_once(self, asked: Any) -> Any:
        sums = self._at_once(asked)
        return None if sums is None else self._perhaps_wrong(sums)

    def _perhaps_wrong(self, sums: memoryview) -> memoryview:
        self.answers += 1
        if self._rng.random() >= self._share:
            return sums
        self.lies += 1
        bad = np.frombuffer(sums, np.float32).copy()
        bad[self._rng.randrange(len(bad))] += np.abs(bad).max()  # one number
        return memoryview(bad.view(np.uint8).data)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    packer.pack(tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint")), directory)
    return directory


def held(third: int | None) -> BoolArray:
    of_third = np.arange(EXPERTS) % 3 == third if third is not None else np.ones(EXPERTS, np.bool_)
    return np.tile(of_third, (LAYERS, 1))


def test_a_live_box_that_lies_in_a_tenth_of_its_answers_is_cut_off_and_the_honest_one_is_not(
    store: Path, tmp_path: Path
) -> None:
    """Box a has a third of the experts, on disk and in memory. Boxes b and c compute the others."""
    a, b, c = (
        EngineBox(node, partial_store(store, tmp_path / node, held(third)), LAYERS * EXPERTS, tmp_path, check_share=0.2)
        for node, third in (("a", 0), ("b", None), ("c", None))
    )
    calls = a.side.plane.calls
    real = calls.fetch_s
    calls.fetch_s = lambda *which: 1e4 * real(*which)  # type: ignore[method-assign]
    with running(a, b, c):
        liar = Liar(b, 0.1)
        records = a.side.checker.ledger.records
        offers = calls.offers
        for n in range(3000):  # checks take spare time, of which a busy machine has little
            turn = "bc"[n % 2]  # both are asked, also where one is slower
            calls.offers = lambda *which, turn=turn: [one for one in offers(*which) if one.node == turn]  # type: ignore[method-assign,misc]
            a.generate(prompts(seed=n), tag=f"{n}-")
            if records["b"].cut:
                break
        calls.offers = offers  # type: ignore[method-assign]
        assert records["b"].cut, f"{n + 1} rounds, {liar.answers} answers, {liar.lies} lies, {records}"
        wait_until(lambda: any(isinstance(said, PeerCutOff) for said in a.told))
        (told,) = (said for said in a.told if isinstance(said, PeerCutOff))
        assert told.node == "b"
        assert liar.lies >= 2
        assert records["c"].wrong == 0
        assert records["c"].right > 0
        wrong = a.side.metrics()[named(ANSWERS_CHECKED, peer="b", found="wrong")]
        assert wrong == records["b"].wrong >= 2  # more where others of the batch were wrong, too
        assert [peer.node for peer in calls.offers(0, np.arange(EXPERTS))] == ["c"]
        before = liar.answers
        a.generate(prompts(seed=999), tag="after-")
        assert liar.answers == before


async def test_a_checker_that_is_cancelled_ends() -> None:
    spare = Spare(share=1.0)
    task = asyncio.create_task(spare.checker.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()

"""A box's layers for another box: who may use them, and which steps are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import tiny_checkpoint
from support.engine_kit import Drive

from edgemoe.cluster.data.messages import StageStep
from edgemoe.engine.stage_host import StageHost, batch_of
from edgemoe.engine.steps import LoadedModel
from edgemoe.errors import PeerRefused
from edgemoe.model.kv import KVCache
from edgemoe.store.catalog import spec_at
from edgemoe.types.stages import CacheRoom, StageWork, parse_stages
from edgemoe.types.step import Batch, ExpertExecutor, StateUse, StepRouting

WIDTH = 4
STAGES = parse_stages("a:0-0 b:1-1")


class Doubled:
    """Layers that double the residual."""

    def compute(self, residual: torch.Tensor, batch: Batch, kv: Any, experts: ExpertExecutor) -> torch.Tensor:
        return 2 * residual


def work(lens: list[int], contexts: list[int], tables: list[list[int]]) -> StageWork:
    hidden = np.arange(sum(lens) * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    return StageWork(hidden, lens, contexts, tables, ())


STEP = work([3, 1], [20, 1], [[4, 2], [0]])


def host_of(drive: Drive) -> StageHost:
    model = drive.model
    kv = KVCache.of(model.spec, drive.engine.blocks.count, 0)
    loaded = LoadedModel(model.spec, model.decoder, IdleExperts(), kv, torch.device("cpu"))
    drive.engine.runner._model = loaded
    return StageHost(STAGES, "b", Doubled(), loaded, drive.engine)


class IdleExperts:
    """Experts that nobody calls."""

    def begin_step(self, meta: Any) -> Any:
        self.meta = meta
        return np.full((2, len(meta.tokens), 2), -1, np.int16)

    def end_step(self) -> Any:
        ids = np.full((2, len(self.meta.tokens), 2), -1, np.int16)
        return StepRouting(self.meta, ids, np.zeros(ids.shape, np.float32), {}, 0.0, 0.0)


def test_a_step_s_positions_follow_from_its_lengths() -> None:
    batch, meta = batch_of(STEP)
    assert batch.positions.tolist() == [17, 18, 19, 0]
    assert meta.decode.tolist() == [False, True]
    assert not batch.decode


def test_a_step_is_computed_once_and_in_order_under_its_opening_alone() -> None:
    drive = Drive()
    host = host_of(drive)
    opening = host.open("a", "boot", range(1, 2))
    assert host.open("a", "boot", range(1, 2)) == opening
    asked = [host.start(opening, number, STEP) for number in (1, 3, 3, 2)] + [host.start(opening + 1, 9, STEP)]
    drive.step()
    for done in asked[:2]:
        np.testing.assert_array_equal(done.result(0), 2 * STEP.hidden)
    for refused in asked[2:]:
        with pytest.raises(PeerRefused, match="too late"):
            refused.result(0)
    assert host.steps == 2
    again = host.open("a", "another boot", range(1, 2))
    late, new = host.start(opening, 4, STEP), host.start(again, 1, STEP)
    drive.step()
    with pytest.raises(PeerRefused, match="gone"):
        late.result(0)
    assert new.result(0).shape == STEP.hidden.shape


def test_only_the_box_with_the_first_stage_may_use_it_and_only_as_it_is() -> None:
    drive = Drive()
    host = host_of(drive)
    blocks = host.room.blocks
    assert blocks == drive.engine.blocks.count
    with pytest.raises(PeerRefused, match="c is not the box with the first stage"):
        host.open("c", "boot", range(1, 2))
    with pytest.raises(PeerRefused, match="b holds layer 1, not layers 1 to 2: state the same"):
        host.open("a", "boot", range(1, 3))
    opening = host.open("a", "boot", range(1, 2))
    for tables in ([[blocks, 2], [0]], [[4, -1], [0]]):
        with pytest.raises(PeerRefused, match="a block that is not there"):
            host.start(opening, 1, work([3, 1], [20, 1], tables))


def test_places_of_states_are_those_of_this_box(tmp_path: Path) -> None:
    drive, spec = Drive(), spec_at(tiny_checkpoint("qwen3_next", tmp_path))
    loaded = LoadedModel(spec, drive.model.decoder, IdleExperts(), KVCache.of(spec, 8, 6), torch.device("cpu"))
    host = StageHost(STAGES, "b", Doubled(), loaded, drive.engine)
    opening = host.open("a", "boot", range(1, 2))
    assert host.room == CacheRoom(8, 0, 6)
    for wrong in (StateUse(6, [(3, 1)]), StateUse(-1, [(3, 1)]), StateUse(1, [(3, 6)]), StateUse(1, [(3, 0)])):
        with pytest.raises(PeerRefused, match="a state that is not there"):
            host.start(opening, 1, replace(work([3], [20], [[4, 2]]), states=[wrong]))
    with pytest.raises(PeerRefused, match="other states than the model has"):
        host.start(opening, 1, work([3], [20], [[4, 2]]))


def test_another_opening_follows_where_keys_and_values_may_be_wrong() -> None:
    host = host_of(Drive())
    opening = host.open("a", "boot", range(1, 2))
    host.close()
    assert host.open("a", "boot", range(1, 2)) != opening


def test_a_box_that_computes_for_another_one_is_not_idle() -> None:
    drive = Drive()
    host, now = host_of(drive), [100.0]
    drive.engine.runner.clock = lambda: now[0]
    assert drive.engine.is_idle()
    done = host.start(host.open("a", "boot", range(1, 2)), 1, STEP)
    drive.step()
    done.result(0)
    assert not drive.engine.is_idle()
    now[0] += 2.0
    assert drive.engine.is_idle()


def test_a_step_s_message_carries_its_work_and_is_refused_where_it_cannot_be() -> None:
    step = STEP
    windowed = StageWork(step.hidden, step.query_lens, step.context_lens, step.block_tables, [[1, 0], [3]])
    uses = [StateUse(0, [(1, 4), (3, 5)]), StateUse(7, [(1, 6)])]
    stateful = replace(windowed, states=uses)
    for sent in (step, windowed, stateful):
        message, tensors = StageStep.of(7, 1, sent)
        found = message.work([memoryview(part) for part in tensors], WIDTH)
        np.testing.assert_array_equal(found.hidden, sent.hidden)
        assert (list(found.query_lens), list(found.context_lens)) == (sent.query_lens, sent.context_lens)
        assert (found.block_tables, list(found.window_tables)) == (sent.block_tables, list(sent.window_tables))
        assert list(found.states) == list(sent.states)
    message, (hidden, index) = StageStep.of(7, 1, step)
    numbers = np.frombuffer(index, np.int32)
    for place, value in ((0, 0), (0, 4), (0, -1), (2, 2), (2, 400), (3, -5), (3, 2**31 - 1)):
        wrong = numbers.copy()
        wrong[place] = value
        with pytest.raises(PeerRefused):
            message.work([memoryview(hidden), wrong.data.cast("B")], WIDTH)
    message, (_, index) = StageStep.of(7, 1, stateful)
    numbers = np.frombuffer(index, np.int32)
    for place, value in ((-6, 0), (-6, 3), (-4, 2), (-4, 4), (-2, 0), (-2, 2), (-7, 0), (-7, -1), (-8, 2**31 - 1)):
        wrong = numbers.copy()
        wrong[place] = value
        with pytest.raises(PeerRefused, match="states"):
            message.work([memoryview(hidden), wrong.data.cast("B")], WIDTH)
    for cut in (2, 4, 6, 10):
        with pytest.raises(PeerRefused, match="states"):
            message.work([memoryview(hidden), numbers[:-cut].data.cast("B")], WIDTH)
    message, (hidden, index) = StageStep.of(7, 1, step)
    for tensors in ([hidden], [hidden, index[:-4]], [hidden, index[:-1]], [hidden, index[:4]], [hidden[:-1], index]):
        with pytest.raises(PeerRefused):
            message.work([memoryview(part) for part in tensors], WIDTH)

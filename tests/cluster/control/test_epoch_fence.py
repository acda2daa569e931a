"""The epoch fence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.errors import CoordUnavailable, ServiceError, StaleEpoch
from edgemoe.types.placement import PlacementPlan, pack_bits


def test_a_lower_epoch_is_refused_even_after_a_restart(tmp_path: Path) -> None:
    fence = EpochFence(tmp_path / "epoch")
    fence.admit(3)
    fence.admit(3)
    fence.admit(9)
    again = EpochFence(tmp_path / "epoch")
    assert again.highest == 9
    with pytest.raises(StaleEpoch, match="epoch 9 has been seen"):
        again.admit(8)
    assert (tmp_path / "epoch").stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_is_an_error_and_not_epoch_zero(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("12x\n")
    with pytest.raises(ServiceError, match="holds no epoch"):
        EpochFence(tmp_path / "epoch")


def test_an_epoch_that_cannot_be_kept_is_not_obeyed(tmp_path: Path) -> None:
    fence = EpochFence(tmp_path / "epoch")
    fence.admit(3)
    (tmp_path / "epoch.tmp").mkdir()  # nothing can be written there
    with pytest.raises(CoordUnavailable, match="epoch 4 cannot be kept"):
        fence.admit(4)
    assert fence.highest == EpochFence(tmp_path / "epoch").highest == 3


def test_a_plan_that_cannot_be_kept_on_disk_is_gone_by_all_the_same(tmp_path: Path) -> None:
    keeper = PlanStore(tmp_path / "plan")
    (tmp_path / "plan.tmp").mkdir()
    plan = PlacementPlan(1, 1, "m", 1, 8, ("a",), (pack_bits(np.ones((1, 8), bool)),))
    keeper.adopt(plan)
    assert keeper.plan == plan
    assert PlanStore(tmp_path / "plan").plan is None

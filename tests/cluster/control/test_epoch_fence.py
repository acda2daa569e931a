"""The highest epoch seen, kept on disk: no lower one is admitted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from edgemoe.cluster.control.coordination.epoch_fence import MAX_LEAP, EpochFence
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


@pytest.mark.parametrize("text", ["12x\n", "", "13 SUM\n", "12 SU\n"])
def test_a_damaged_file_is_an_error_and_not_epoch_zero(text: str, tmp_path: Path) -> None:
    EpochFence(tmp_path / "epoch").admit(12)
    its_sum = (tmp_path / "epoch").read_text().split()[1]
    (tmp_path / "epoch").write_text(text.replace("SUM", its_sum).replace("SU", its_sum[:2]))
    with pytest.raises(ServiceError, match="is damaged"):
        EpochFence(tmp_path / "epoch")


def test_an_epoch_raised_in_leaps_survives_a_restart(tmp_path: Path) -> None:
    fence = EpochFence(tmp_path / "epoch")
    for leap in range(1, 4):
        fence.admit(leap * MAX_LEAP)
    assert EpochFence(tmp_path / "epoch").highest == 3 * MAX_LEAP


def test_a_file_without_a_checksum_is_believed_near_the_known_epoch(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text(f"{MAX_LEAP + 7}\n")
    assert EpochFence(tmp_path / "epoch", known=7).highest == MAX_LEAP + 7
    with pytest.raises(ServiceError, match="far above that of the plan"):
        EpochFence(tmp_path / "epoch", known=6)


def full(_: int, __: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_epoch_that_cannot_be_kept_is_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = EpochFence(tmp_path / "epoch")
    fence.admit(3)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CoordUnavailable, match="epoch 4 cannot be kept"):
        fence.admit(4)
    assert fence.highest == EpochFence(tmp_path / "epoch").highest == 3


def test_a_plan_that_cannot_be_kept_on_disk_is_gone_by_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = PlanStore(tmp_path / "plan")
    monkeypatch.setattr(os, "write", full)
    plan = PlacementPlan(1, 1, "m", 1, 8, ("a",), (pack_bits(np.ones((1, 8), bool)),))
    keeper.adopt(plan)
    assert keeper.plan == plan
    assert PlanStore(tmp_path / "plan").plan is None

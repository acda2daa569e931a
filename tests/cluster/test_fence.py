"""The epoch fence."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgemoe.cluster.control.fence import EpochFence
from edgemoe.errors import ServiceError, StaleEpoch


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

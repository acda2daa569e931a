"""Drafts without a governor, for tests that drafts change no token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from edgemoe.engine.draft_governor import DraftGovernor, Floats


def _all(governor: DraftGovernor, chances: Sequence[Floats], sure: int, room: int) -> list[int]:
    lengths = []
    for each in chances:
        lengths.append(min(len(each), room))
        room -= lengths[-1]
    return lengths


@contextmanager
def drafting() -> Iterator[None]:
    """Has each step check all drafts for which it has room, at any cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftGovernor, "lengths", _all)
        patch.setattr(DraftGovernor, "is_asked", lambda governor: True)
        yield

"""A short run of the journal's door."""

from __future__ import annotations

import logging

import pytest

from edgemoe.cluster.control.coordination import raft_journal, recovery
from tools.fuzzing.journal import WHATS, fuzz


@pytest.mark.parametrize("what", WHATS)
def test_no_damaged_file_of_the_agreement_is_believed(what: str) -> None:
    try:
        assert fuzz(what, 60, seed=11) == {"ok": True, "count": 60, "seed": 11, "wrong": []}
    finally:
        for module in (raft_journal, recovery):
            logging.getLogger(module.__name__).setLevel(logging.NOTSET)

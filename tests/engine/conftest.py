"""Keeps residency's compiled functions between runs, for they take seconds to compile."""

from __future__ import annotations

import pytest
from support.kept import KERNELS

from edgemoe.experts.compiled_parts import TIERS
from edgemoe.jit.object_cache import link


@pytest.fixture(scope="session", autouse=True)
def _calls() -> None:
    link(TIERS.codes, KERNELS)

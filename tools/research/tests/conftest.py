"""Fixtures of the studies' tests: compiled code is kept between runs."""

from __future__ import annotations

import pytest
from support.kept import KERNELS

from edgemoe.experts.compiled_parts import TIERS
from edgemoe.experts.predict.next_use import link_predictor
from edgemoe.jit.object_cache import link


@pytest.fixture(scope="session", autouse=True)
def _calls() -> None:
    link(TIERS.codes, KERNELS)
    link_predictor(KERNELS)

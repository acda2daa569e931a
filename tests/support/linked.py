"""A fixture that links residency's compiled functions from kept code; alone, each takes up to two seconds to compile.

Folders whose tests use tiers import it in their conftest.py.
"""

from __future__ import annotations

import pytest

from edgemoe.experts.compiled_parts import TIERS
from edgemoe.jit.object_cache import link
from support.kept import KERNELS


@pytest.fixture(scope="session", autouse=True)
def residency_is_linked() -> None:
    link(TIERS.codes, KERNELS)

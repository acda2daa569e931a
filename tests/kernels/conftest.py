"""Kernels of both weight types, compiled once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kept import KERNELS

from edgemoe.kernels.cpu.runtime import Kernels


@pytest.fixture(scope="session", params=[False, True], ids=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    kernels = Kernels(threads=2, bf16=request.param, directory=KERNELS)
    yield kernels
    kernels.close()


@pytest.fixture(scope="session")
def float_kernels(kernels: Kernels) -> Iterator[Kernels]:
    """Kernels that round no activations to 8 bits."""
    made = kernels.clone_for_thread()
    yield made
    made.close()

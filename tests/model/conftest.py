"""Random checkpoints, made once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.kept import KERNELS
from support.tiny_models import FAMILIES, SIZES, Tiny, load_tiny

from edgemoe.experts.compiled_parts import TIERS
from edgemoe.jit.object_cache import link
from edgemoe.kernels.cpu.runtime import Kernels


@pytest.fixture(scope="session")
def kernels() -> Iterator[dict[bool, Kernels]]:
    """By weight type: whether weights are bf16. Residency's functions are linked, too."""
    link(TIERS.codes, KERNELS)
    made = {bf16: Kernels(threads=2, bf16=bf16, directory=KERNELS) for bf16 in (False, True)}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(scope="session")
def make_tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """Makes tiny models; kernels are compiled only for tests that use them, and GPU tests do not."""

    def make(family: str, *, dtype: torch.dtype = torch.float32, fused: bool = True, **changes: Any) -> Tiny:
        config_class, model_class, own = FAMILIES[family]
        torch.manual_seed(0)
        config = config_class(**{**SIZES, **own, **changes})
        model = model_class(config).to(dtype).eval()
        for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
            if name.endswith((".scale", "expert_scale", "scalar", "bias", "sinks")) or "norm" in name:
                parameter.data += torch.randn_like(parameter) * 0.1
        for values in (*model.parameters(), *model.buffers()):
            if values.is_floating_point() and not values.any():
                values.data += torch.randn_like(values) * 0.2
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory / "checkpoint")
        return load_tiny(
            model,
            directory / "checkpoint",
            directory / "store",
            request.getfixturevalue("kernels") if fused else None,
        )

    return make

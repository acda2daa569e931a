"""Random checkpoints, made once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.kept import KERNELS
from support.tiny_models import FAMILIES, SIZES, ResidentExperts, Tiny

from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder


@pytest.fixture(scope="session")
def kernels() -> Iterator[dict[bool, Kernels]]:
    """By whether the weights are bf16."""
    made = {bf16: Kernels(threads=2, bf16=bf16, directory=KERNELS) for bf16 in (False, True)}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(scope="session")
def make_tiny(kernels: dict[bool, Kernels], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    def make(family: str, *, dtype: torch.dtype = torch.float32, fused: bool = True, **changes: Any) -> Tiny:
        config_class, model_class, own = FAMILIES[family]
        torch.manual_seed(0)
        config = config_class(**{**SIZES, **own, **changes})
        model = model_class(config).to(dtype).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data += torch.randn_like(parameter) * 0.1
        directory = tmp_path_factory.mktemp(family)
        config.dtype = dtype
        config.save_pretrained(directory)
        spec = spec_from_config(json.loads((directory / "config.json").read_text()))
        return Tiny(
            model, spec, load_decoder(directory, spec, model, kernels if fused else None), ResidentExperts(model)
        )

    return make


def load_decoder(directory: Path, spec: ModelSpec, model: Any, kernels: dict[bool, Kernels] | None) -> Decoder:
    state = model.state_dict()
    path = directory / "dense.safetensors"
    save_file({name: state[name].contiguous().clone() for name in dense_shapes(spec)}, path)
    return Decoder.load(spec, path, kernels=kernels and kernels[spec.dtype == "bfloat16"])

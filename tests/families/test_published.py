"""Published configurations, without fields that sizes do not depend on, give models of the published sizes."""

from __future__ import annotations

import json
import math

import pytest
from support.published import CONFIGURATIONS

from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import dense_shapes

PARAMETERS = {  # in billions: all, without vision and without layers for predicting several tokens
    "DeepSeek-V3": 671.03,
    "GLM-4.5-Air": 106.85,
    "Kimi-K2.5": 1026.41,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.58,
    "Mixtral-8x7B-Instruct-v0.1": 46.70,
    "OLMoE-1B-7B-0924": 6.92,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-Next-80B-A3B-Instruct": 79.67,
    "gpt-oss-120b": 116.83,
    "gpt-oss-20b": 20.91,
    "granite-4.0-h-tiny": 6.94,
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_model_has_as_many_parameters_as_its_makers_say(name: str) -> None:
    spec = spec_from_config(json.loads(CONFIGURATIONS[name].read_text()))
    geometry = spec.geometry
    each = math.prod(geometry.gate_up_shape) + math.prod(geometry.down_shape)
    each += geometry.biases * (geometry.first_rows + geometry.hidden)
    dense = sum(math.prod(shape) for shape in dense_shapes(spec).values())
    assert (dense + geometry.count * each) / 1e9 == pytest.approx(PARAMETERS[name], abs=0.01)

"""With every expert in memory a step is one call, with the results of separate calls for each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import tiny_checkpoint
from support.engine_kit import Drive, Model, prompt
from support.family_kit import family_model
from support.kept import KERNELS
from support.waiting import wait_until

from edgemoe.kernels.cpu.expert_math import ExpertMath, WayLimits
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.packer import AS_IT_IS
from edgemoe.types.step import StepRouting

EXPERTS, LAYERS, TOKENS = 18, 3, 24
SEQUENCES = 5
WAYS = [("qwen3_moe", 8.0, ""), ("qwen3_moe", 8.0, "int8"), ("qwen3_moe", 2.0, ""), ("gpt_oss", 8.0, "")]


@dataclass
class Counting:
    """The experts, which count the layers that are computed one by one."""

    experts: Any
    one_by_one: bool
    layers: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    @property
    def places(self) -> Any:
        return None if self.one_by_one else self.experts.places

    def forward(self, *args: Any) -> torch.Tensor:
        self.layers += 1
        mixed: torch.Tensor = self.experts.forward(*args)
        return mixed


@pytest.fixture(scope="module", params=WAYS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, float]]:
    """All experts in memory, and the number of tokens per expert from which another kernel computes them."""
    family, most, encoding = request.param
    checkpoint = tiny_checkpoint(family, tmp_path_factory.mktemp("checkpoint") / "hf")
    wanted = WantedEncodings.parse(encoding, encoding) if encoding else AS_IT_IS
    kernels = Kernels(2, bf16=False, directory=KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ExpertMath,
            "calibrate",
            lambda self, layouts, bf16: self.measured.update(dict.fromkeys(layouts, WayLimits(most))),
        )
        store = tmp_path_factory.mktemp("store")
        with family_model(checkpoint, store, kernels, EXPERTS, wanted=wanted, fill=True) as made:
            wait_until(lambda: made.experts.residency.has_all)
            yield made, most
    kernels.close()


def drive(model: Model, one_by_one: bool) -> tuple[list[list[int]], list[StepRouting], int]:
    """Returns the tokens, the steps, and the decoding layers that were computed one by one."""
    counting, steps = Counting(model.experts, one_by_one), list[StepRouting]()
    engine = Drive(model=model._replace(experts=counting), observe=steps.append)
    for number in range(SEQUENCES):
        engine.submit(prompt(3 + number, number, 96), f"r{number}", max_tokens=TOKENS)
    engine.run()
    prompts = sum(LAYERS for step in steps if not step.meta.decode.all())
    return [engine.tokens(f"r{number}") for number in range(SEQUENCES)], steps, counting.layers - prompts


def test_whole_steps_give_the_bits_of_layers_called_one_by_one(model: tuple[Model, float]) -> None:
    made, most = model
    before = sum(made.experts.residency.served)
    tokens, steps, asked = drive(made, one_by_one=True)
    between = sum(made.experts.residency.served)
    again, whole, asked_again = drive(made, one_by_one=False)
    assert tokens == again
    assert sum(made.experts.residency.served) - between == between - before > 0
    for one, other in zip(steps, whole, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert one.weights.tobytes() == other.weights.tobytes()
    assert asked > 20 * LAYERS
    assert asked_again == 0 if most > SEQUENCES else 0 < asked_again < asked

"""Runs decode steps as a GPU does, its kernels in Triton's interpreter on the CPU; prints how far they are off as JSON.

Each step runs twice: with all experts in the slab, then with others read from RAM; the logits' bits must be equal.

    python interpreted_steps.py float32 "qwen3_moe by turns" "mixtral int8" ...

A family is followed by the type of its KV cache if that is not its own. With "by turns", sequences join and leave.

A program of its own: whether Triton compiles or interprets is settled when it is imported.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgemoe.kernels.gpu import decode_attention, decode_dense, decode_latent, experts_decode
from edgemoe.model import graphed
from edgemoe.model.graphed import DecodeRows, GraphedDecoder
from support.interpreter import prepare_interpreter
from support.slotted_experts import EachTwice, SlottedExperts
from support.tiny_models import FAMILIES, SIZES, Session, Tiny, load_tiny

PROMPTS = (list(range(100, 133)), [7], list(range(40, 56)))  # one ends at the end of a block
VARIANTS: dict[str, dict[str, Any]] = {"without latents": {"moe_latent_size": None}}
BY_TURNS = ((0,), (0, 1, 2), (0, 1))  # the sequences of each step


class Questions(TorchDispatchMode):
    """Notes the operations for which the host waits for a GPU, and which no graph can hold."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        masks = [each for each in (args[1] if name.startswith("index") and len(args) > 1 else ()) if each is not None]
        if name.lstrip("_") in self.WAITS or name in self.WAITS or any(mask.dtype == torch.bool for mask in masks):
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


class Watched(DecodeRows):
    """Launches a step, and notes its questions."""

    asked: ClassVar[list[str]] = []

    def launch(self) -> None:
        with Questions() as questions:
            super().launch()
        self.asked.extend(questions.asked)


def make(family: str, dtype: torch.dtype, directory: Path, changes: dict[str, Any]) -> Tiny:
    """Makes a random checkpoint of a family, without kernels."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **own, **changes})).to(dtype).eval()
    for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.endswith((".scale", "expert_scale", "scalar", "bias", "sinks")) or "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory / "checkpoint")
    return load_tiny(model, directory / "checkpoint", directory / "store", None)


@torch.inference_mode()
def far(tiny: Tiny, int8: bool, steps: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Returns the errors of logits in steps of some of three sequences, and the host's waits."""
    Watched.asked.clear()
    tiny = replace(tiny, spec=replace(tiny.spec, kv_int8=int8))
    slotted = SlottedExperts(tiny)
    decoder = tiny.decoder
    plain, ours = Session(tiny, 3), Session(replace(tiny, experts=slotted), 3)
    errors = []
    for session in (plain, ours):
        session.kv.data.fill_(255)  # NaN where nobody writes
    for session in (plain, ours):
        for s, prompt in enumerate(PROMPTS):
            session.step(*([] for _ in range(s)), prompt)
    token = 11
    rows = EachTwice(GraphedDecoder(tiny.spec, decoder._weights, decoder._ropes, decoder.device), slotted)
    for sequences in steps:
        chunks = [[token + s] if s in sequences else [] for s in range(3)]
        token += 5
        want = plain.step(*chunks)
        decoder._graphed = rows  # type: ignore[assignment]
        got = ours.step(*chunks)
        decoder._graphed = None
        errors.append(float((got - want).abs().max() / want.abs().max()))
    assert len(slotted.told) == 2 * len(steps), "a step was computed in another way"
    return {"errors": errors, "asked": sorted(set(Watched.asked)), "equal": rows.equal}


def main() -> None:
    graphed.DecodeRows = Watched  # type: ignore[misc]
    decode_attention.PROGRAMS, decode_dense.PER_PROGRAM = 8, 64  # few programs, interpreted one after the other
    decode_latent.PER_PROGRAM = 64
    experts_decode.GATES, experts_decode.OUTPUTS = 64, 64
    prepare_interpreter()
    dtype, found = getattr(torch, sys.argv[1]), {}
    for case in sys.argv[2:]:
        family, _, rest = case.partition(" ")
        steps = BY_TURNS if rest == "by turns" else BY_TURNS[1:2]
        with tempfile.TemporaryDirectory() as directory:
            found[case] = far(make(family, dtype, Path(directory), VARIANTS.get(rest, {})), rest == "int8", steps)
            print(case, found[case], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""The gated delta net against transformers' two, with states in slots in random order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from edgemoe.families.state_mechanisms import DeltaHeads
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.delta_net import DeltaNet
from edgemoe.model.dense_weights import DenseMatrix
from edgemoe.model.kv import StateCache, StepStates
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.step import Batch, StateUse

HIDDEN, EPS = 32, 1e-6
HEADS = [(4, 2, 8, 12, 4), (2, 2, 16, 8, 4), (3, 1, 6, 6, 3)]  # value heads, key heads, their widths, taps
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "rms_norm_eps": EPS}


class Place:
    """The position of a layer as the second of two, with the weights of one of transformers'."""

    def __init__(self, heads: DeltaHeads, theirs: Any) -> None:
        self.number, self.attention = 7, SimpleNamespace(heads=heads)
        self.spec = SimpleNamespace(block=SimpleNamespace(eps=EPS), state_layers=(3, 7))
        self._state = theirs.state_dict()

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.cat([self._state[name.removeprefix("linear_attn.")] for name in names])

    def matrix(self, *names: str) -> DenseMatrix:
        rows = self.read(*names)
        return DenseMatrix(rows, ENCODINGS["float32"], rows.shape[1])


class Layer:
    """A random layer of transformers, and ours with the same weights."""

    def __init__(self, kind: str, count: int, kv_count: int, dim: int, value_dim: int, taps: int) -> None:
        torch.manual_seed(0)
        grouped = kind == "qwen3_next"
        heads = DeltaHeads(count, kv_count, dim, value_dim=value_dim, taps=taps, grouped=grouped)
        sizes: dict[str, Any] = {
            "linear_num_key_heads": kv_count,
            "linear_num_value_heads": count,
            "linear_key_head_dim": dim,
            "linear_value_head_dim": value_dim,
            "linear_conv_kernel_dim": taps,
        }
        if grouped:
            self.theirs: Any = Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**SIZES, **sizes), 0)
        else:
            self.theirs = Qwen3_5MoeGatedDeltaNet(transformers.Qwen3_5MoeTextConfig(**SIZES, **sizes), 0)
        for parameter in self.theirs.parameters():
            parameter.data = torch.rand_like(parameter) if parameter.dim() == 1 else torch.randn_like(parameter) * 0.2
        self.heads = heads
        self.ours = DeltaNet(Place(heads, self.theirs.eval()))  # type: ignore[arg-type]

        self.kernels: Kernels | None = None

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return self.theirs(x[None])[0]  # type: ignore[no-any-return]


class Sequences:
    """States that move from slot to slot at each step."""

    def __init__(self, layer: Layer, count: int, slots: int = 40) -> None:
        self._layer = layer
        self.cache = StateCache(layer.heads, 2, slots)
        self.cache.data[1:] = torch.nan  # as left by other sequences
        self.free = (torch.randperm(slots - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.slots = [0] * count

    def step(self, *chunks: torch.Tensor, cuts: dict[int, list[int]] | None = None) -> list[torch.Tensor]:
        """Returns the outputs of each sequence's next tokens; sequence s also leaves its state after cuts[s] tokens."""
        present = [s for s, chunk in enumerate(chunks) if len(chunk)]
        uses = []
        for s in present:
            ends = [*(cuts or {}).get(s, ()), len(chunks[s])]
            uses.append(StateUse(self.slots[s], [(end, self.free.pop()) for end in ends]))
            self.slots[s] = uses[-1].writes[-1][1]
        lengths = [len(chunks[s]) for s in present]
        batch = Batch(
            tokens=torch.empty(0),
            positions=torch.empty(0),
            query_lens=lengths,
            context_lens=lengths,
            block_tables=[[]] * len(present),
            logit_rows=torch.empty(0),
            decode=False,
            states=uses,
        )
        states = StepStates.of(batch, torch.device("cpu"))
        step: Any = SimpleNamespace(states=states, kv=SimpleNamespace(states=self.cache), kernels=self._layer.kernels)
        self.uses = dict(zip(present, uses, strict=True))
        out = self._layer.ours(torch.cat(chunks), step)
        return list(out.split([len(chunk) for chunk in chunks]))


def random(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def near(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=3e-5, rtol=1e-4)


@pytest.fixture(params=[(kind, *sizes) for kind in ("qwen3_next", "qwen3_5_moe") for sizes in HEADS], ids=str)
def layer(request: pytest.FixtureRequest, by_kernels: bool) -> Layer:
    layer = Layer(*request.param)
    layer.kernels = request.getfixturevalue("kernels")[False] if by_kernels else None
    return layer


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def by_kernels(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@torch.inference_mode()
def test_prompts_chunks_and_single_tokens_equal_transformers(layer: Layer) -> None:
    x = random(170, 1)
    reference = layer.reference(x)
    near(Sequences(layer, 1).step(x)[0], reference)
    pieces = Sequences(layer, 1)
    near(torch.cat([pieces.step(part)[0] for part in x.split([1, 2, 64, 1, 70, 32])]), reference)
    single = Sequences(layer, 1)
    single.free = [1, 2] * 100  # two slots are enough
    near(torch.cat([single.step(token)[0] for token in x.split(1)]), reference)


@torch.inference_mode()
def test_sequences_of_a_mixed_step_get_the_same_as_alone(layer: Layer) -> None:
    lines = [random(n, n) for n in (80, 3, 41, 1)]
    references = [layer.reference(x) for x in lines]
    together, none = Sequences(layer, 4), random(0, 0)
    first = together.step(lines[0][:70], lines[1][:1], lines[2][:40], none)
    second = together.step(lines[0][70:], lines[1][1:2], lines[2][40:], lines[3])
    third = together.step(none, lines[1][2:], none, none)
    for s, reference in enumerate(references):
        near(torch.cat([first[s], second[s], third[s]]), reference)


@torch.inference_mode()
def test_a_state_left_on_the_way_goes_on_as_the_sequence_did(layer: Layer) -> None:
    x, other = random(100, 1), random(30, 2)
    leaving = Sequences(layer, 2)
    near(leaving.step(x, other, cuts={0: [1, 48, 80]})[0], layer.reference(x))
    for cut, slot in leaving.uses[0].writes:
        follower = Sequences(layer, 1)
        follower.cache, follower.slots = leaving.cache, [slot]
        follower.free = [leaving.free.pop()]
        tail = torch.cat([x[cut:], other])
        near(follower.step(tail)[0], layer.reference(torch.cat([x, other]))[cut:])


@torch.inference_mode()
def test_a_step_that_is_computed_again_gives_the_same_bits(layer: Layer) -> None:
    """A step does not change the states that it reads, so it can be repeated after a failure."""
    sequences, x = Sequences(layer, 2), random(90, 1)
    sequences.step(x[:70], x[:9])
    slots, free = list(sequences.slots), list(sequences.free)
    once = sequences.step(x[70:], x[9:10])
    sequences.slots, sequences.free = slots, free
    again = sequences.step(x[70:], x[9:10])
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


@torch.inference_mode()
def test_states_copied_out_and_into_other_slots_go_on_alike(layer: Layer) -> None:
    sequences, x = Sequences(layer, 1), random(40, 1)
    sequences.step(x[:30])
    rows = sequences.cache.gather(sequences.slots)
    sequences.cache.data[sequences.slots] = torch.nan
    sequences.slots = [sequences.free.pop()]
    sequences.cache.scatter(sequences.slots, rows)
    near(sequences.step(x[30:])[0], layer.reference(x)[30:])
    assert not sequences.cache.data[0].any()

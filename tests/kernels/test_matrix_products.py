"""All ways of computing experts give the same sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edgemoe.encodings.codec import pack
from edgemoe.kernels.cpu import expert_math as products
from edgemoe.kernels.cpu import experts_decode, experts_prefill
from edgemoe.kernels.cpu.expert_math import ExpertMath, ExpertSlab, WayLimits, one_by_one
from edgemoe.kernels.cpu.experts_decode import ExpertLayout
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.types.encoding import BFLOAT16, ENCODINGS, FLOAT32, FP8, INT4, INT8, MXFP4, Encoding
from edgemoe.types.experts import SILU, Activation, ExpertGeometry

HIDDEN, WIDTH, SLOTS = 64, 96, 7
RELU2 = Activation("relu2")  # takes no gate


def _slab(
    bf16: bool, activation: Activation = SILU, biases: bool = False, *, of_bf16: bool | None = None
) -> ExpertSlab:
    """Makes experts in bfloat16 or float32; of a model of the other type, if `of_bf16` says so."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if bf16 else torch.float32
    inputs = activation.inputs
    weights = (torch.randn(SLOTS, (inputs + 1) * HIDDEN * WIDTH) * 0.1).to(dtype).view(torch.uint8)
    if biases:
        weights = torch.cat([weights, torch.randn(SLOTS, inputs * WIDTH + HIDDEN).view(torch.uint8)], 1)
    geometry = ExpertGeometry(1, SLOTS, 1, HIDDEN, WIDTH, str(dtype)[6:], activation, biases)
    assert weights.shape[1] == geometry.expert_bytes(0)
    slab = torch.full((SLOTS, geometry.stride_bytes(0)), 255, dtype=torch.uint8)  # NaN
    slab[:, : weights.shape[1]] = weights
    layout = ExpertLayout(HIDDEN, WIDTH, BFLOAT16 if bf16 else FLOAT32, activation, biases)
    return ExpertSlab(slab, layout, bf16 if of_bf16 is None else of_bf16)


def _calls(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Draws calls of slots 5, 0 and 3 for random tokens."""
    random = np.random.default_rng(tokens)
    counts = random.integers(1, tokens + 1, 3)
    index = np.concatenate([np.sort(random.permutation(tokens)[:count]) for count in counts])
    weights = random.random(len(index), np.float32)
    return np.array([5, 0, 3]), np.concatenate(([0], np.cumsum(counts))), index, weights


def _expected(slab: ExpertSlab, tokens: int, x: torch.Tensor) -> torch.Tensor:
    slots, offsets, index, weights = _calls(tokens)
    out = torch.ones(tokens, HIDDEN, dtype=torch.float64)
    for i, slot in enumerate(slots):
        for pair in range(offsets[i], offsets[i + 1]):
            both = slab.gate_up[slot].double() @ x[index[pair]].double()
            if slab.gate_up_bias is not None:
                both += slab.gate_up_bias[slot]
            output = slab.down[slot].double() @ _activated(slab.activation, *both.chunk(slab.activation.inputs))
            if slab.down_bias is not None:
                output += slab.down_bias[slot]
            out[index[pair]] += float(weights[pair]) * output
    return out


def _activated(activation: Activation, *products: torch.Tensor) -> torch.Tensor:
    """Computes the activation by its definition."""
    if activation.kind == "relu2":
        return products[0].clamp(min=0) ** 2
    gate, up = products
    if activation.kind == "gelu_tanh":
        return gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if activation.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate / (1 + torch.exp(-activation.alpha * gate))
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", [SILU, Activation("gelu_tanh"), Activation("clamped_swiglu", 1.702, 2.0), RELU2])
def test_other_activations_and_biases_equal_the_definition(
    kernels: Kernels, activation: Activation, biases: bool
) -> None:
    slab = _slab(kernels.bf16, activation, biases)
    x = (torch.randn(40, HIDDEN) * 3).to(slab.down.dtype)
    out = torch.ones(40, HIDDEN)
    ExpertMath(kernels).add(slab, *_calls(40), x, out)
    rounding = 0.15 if kernels.bf16 else 1e-4
    torch.testing.assert_close(out.double(), _expected(slab, 40, x), atol=rounding, rtol=rounding)


@pytest.mark.parametrize("tokens", [1, 5, 40, 70])
def test_all_ways_equal_the_definition(kernels: Kernels, tokens: int) -> None:
    slab = _slab(kernels.bf16)
    x = torch.randn(tokens, HIDDEN).to(slab.down.dtype)
    expected = _expected(slab, tokens, x)
    never = float("inf")
    for way in (ExpertMath(kernels, limits) for limits in (WayLimits(never), WayLimits(0.0), WayLimits(never, 0.0))):
        out = torch.ones(tokens, HIDDEN)
        way.add(slab, *_calls(tokens), x, out)
        rounding = 0.05 if kernels.bf16 else 1e-4
        torch.testing.assert_close(out.double(), expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_numbers_of_another_type_than_the_model_s_are_read_in_all_ways(kernels: Kernels, tokens: int) -> None:
    """As where a bfloat16 model is packed with dense weights in float32."""
    slab, never = _slab(not kernels.bf16, of_bf16=kernels.bf16), float("inf")
    x = torch.randn(tokens, HIDDEN).to(torch.bfloat16 if kernels.bf16 else torch.float32)
    expected = _expected(_slab(not kernels.bf16), tokens, x)
    measured = ExpertMath(kernels)
    measured.calibrate([slab.layout], kernels.bf16)
    assert measured.measured[slab.layout].tiles == never
    for way in (measured, *(ExpertMath(kernels, limits) for limits in (WayLimits(0.0), WayLimits(never, 0.0)))):
        out = torch.ones(tokens, HIDDEN)
        way.add(slab, *_calls(tokens), x, out)
        rounding = 0.05 if kernels.bf16 else 1e-4
        torch.testing.assert_close(out.double(), expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("tiles_from", [0.0, float("inf")], ids=["tiles", "dots"])
def test_calls_whose_scratch_memory_would_be_too_large_are_cut(
    kernels: Kernels, tiles_from: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = _slab(kernels.bf16)
    x = torch.randn(40, HIDDEN).to(slab.down.dtype)
    whole, cut = torch.zeros(40, HIDDEN), torch.zeros(40, HIDDEN)
    ExpertMath(kernels, WayLimits(tiles_from)).add(slab, *_calls(40), x, whole)
    monkeypatch.setattr(products, "SCRATCH_BYTES", 1)
    ExpertMath(kernels, WayLimits(tiles_from)).add(slab, *_calls(40), x, cut)
    torch.testing.assert_close(cut, whole, atol=0, rtol=0)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_torch_s_products_give_the_same_sums(bf16: bool) -> None:
    slab = _slab(bf16)
    x = torch.randn(5, HIDDEN).to(slab.down.dtype)
    out = torch.ones(5, HIDDEN)
    one_by_one(slab, *_calls(5), x, out)
    rounding = 0.05 if bf16 else 1e-4
    torch.testing.assert_close(out.double(), _expected(slab, 5, x), atol=rounding, rtol=rounding)


class Timed:
    """Ways of computing with a stated time for each expert and token."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def _spend(self, slots: Any, index: Any, fixed_s: float, token_s: float) -> None:
        self.now_s += fixed_s + token_s * len(index) / len(slots)

    def few_tokens(
        self, _layout: Any, _address: int, _stride: int, slots: Any, _offsets: Any, index: Any, *_rest: Any
    ) -> None:
        self._spend(slots, index, 0.0, 1.0)

    def many_tokens(
        self, _layout: Any, _address: int, _stride: int, slots: Any, _offsets: Any, index: Any, *_rest: Any
    ) -> None:
        self._spend(slots, index, 3.0, 0.5)  # sooner from 6 tokens on

    def products(self, _slab: Any, slots: Any, _offsets: Any, index: Any, *_rest: Any) -> None:
        self._spend(slots, index, 10.0, 0.1)  # sooner from 17.5 tokens on


def test_which_way_is_the_fastest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed()
    monkeypatch.setattr(products, "time", timed)
    monkeypatch.setattr(products, "ExpertKernels", lambda context: context)
    monkeypatch.setattr(products, "one_by_one", timed.products)
    math = ExpertMath(timed, WayLimits(0.0, 0.0))  # type: ignore[arg-type]
    plain, encoded = ExpertLayout(256, 128, FLOAT32), ExpertLayout(256, 128, INT8)
    math.calibrate([plain, encoded], False)
    tiles = min(n for n in products.TRIED_TOKENS if n > 6)
    assert math.measured[plain] == WayLimits(tiles, min(n for n in products.TRIED_TOKENS if n > 17.5))
    assert math.measured[encoded] == WayLimits(tiles, float("inf"))


class Slipping(Timed):
    """Another process takes the processor while two tokens for each expert are timed."""

    def few_tokens(
        self, _layout: Any, _address: int, _stride: int, slots: Any, _offsets: Any, index: Any, *_rest: Any
    ) -> None:
        self._spend(slots, index, 50.0 * (len(index) == 2 * len(slots)), 1.0)


def test_one_slip_of_the_clock_chooses_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, layout = Slipping(), ExpertLayout(256, 128, INT8)
    monkeypatch.setattr(products, "time", timed)
    monkeypatch.setattr(products, "ExpertKernels", lambda context: context)
    math = ExpertMath(timed, WayLimits(0.0, 0.0))  # type: ignore[arg-type]
    math.calibrate([layout], False)
    assert math.measured[layout].tiles == min(n for n in products.TRIED_TOKENS if n > 6)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_the_largest_experts_are_tried_on_as_few_bytes_as_small_ones(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[ExpertLayout]()

    class Noting(Timed):
        def many_tokens(self, layout: Any, *rest: Any) -> None:
            tried.append(layout)
            super().many_tokens(layout, *rest)

    timed, large = Noting(), ExpertLayout(4096, 14336, encoding)
    monkeypatch.setattr(products, "time", timed)
    monkeypatch.setattr(products, "ExpertKernels", lambda context: context)
    monkeypatch.setattr(products, "one_by_one", timed.products)
    math = ExpertMath(timed, WayLimits(0.0, 0.0))  # type: ignore[arg-type]
    math.calibrate([large], encoding.name == "bfloat16")
    assert set(math.measured) == {large}
    (layout,) = set(tried)
    assert products.TRIAL_BYTES * 0.3 < 2 * 3 * layout.width * encoding.row_bytes(4096) <= products.TRIAL_BYTES
    assert encoding.fits(layout.width)


@pytest.mark.parametrize("tiles", [False, True])
def test_pieces_of_many_experts_with_few_tokens_each_fit_their_scratch_memory(
    tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab, count = _slab(False), 512
    slots, offsets = np.arange(count), np.arange(count + 1) * 3
    monkeypatch.setattr(products, "SCRATCH_BYTES", 1 << 22)
    parts = products._pieces(slab, slots, offsets, np.zeros(3 * count, int), np.zeros(3 * count, np.float32), tiles)
    assert np.concatenate([part[0] for part in parts]).tolist() == slots.tolist()
    for part in parts:
        some, pairs = len(part[0]), len(part[2])
        sizes = experts_decode.scratch_floats(HIDDEN, WIDTH, 0, pairs, some)
        if tiles:
            sizes = experts_prefill.scratch_floats(HIDDEN, WIDTH, some, some)
        sizes.pop("part")  # of a thread
        rounded = -(-WIDTH // 128) * 128 / WIDTH
        assert 4 * sum(sizes.values()) <= rounded * (1 << 22)


ENCODED = [INT8, INT4, MXFP4, FP8]
GPT_OSS = Activation("clamped_swiglu", 1.702, 7.0)
KINDS = [(SILU, False), (GPT_OSS, True), (Activation("gelu_tanh"), False), (RELU2, False), (RELU2, True)]


def _encoded_slab(bf16: bool, encoding: Encoding, activation: Activation, biases: bool) -> ExpertSlab:
    random = np.random.default_rng(1)
    sizes = ((SLOTS * activation.inputs * WIDTH, HIDDEN), (SLOTS * HIDDEN, WIDTH))
    rows = [pack(random.normal(0, 0.1, size).astype(np.float32), encoding).reshape(SLOTS, -1) for size in sizes]
    if biases:
        rows.append(random.normal(size=(SLOTS, activation.inputs * WIDTH + HIDDEN)).astype(np.float32).view(np.uint8))
    size = sum(part.shape[1] for part in rows)
    slab = np.full((SLOTS, -(-size // 4096) * 4096), 255, np.uint8)
    slab[:, :size] = np.concatenate(rows, axis=1)
    layout = ExpertLayout(HIDDEN, WIDTH, encoding, activation, biases)
    return ExpertSlab(torch.from_numpy(slab), layout, bf16)


@pytest.mark.parametrize("tokens", [1, 3, 17, 70])
@pytest.mark.parametrize(("activation", "biases"), KINDS)
@pytest.mark.parametrize("encoding", ENCODED, ids=lambda each: each.name)
def test_kernels_compute_encoded_experts_where_they_lie(
    kernels: Kernels,
    float_kernels: Kernels,
    encoding: Encoding,
    activation: Activation,
    biases: bool,
    tokens: int,
) -> None:
    slab = _encoded_slab(kernels.bf16, encoding, activation, biases)
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN).to(torch.bfloat16 if kernels.bf16 else torch.float32)
    expected = torch.ones(tokens, HIDDEN)
    one_by_one(slab, *_calls(tokens), x, expected)
    for tiles in (0.0, float("inf")):
        out = torch.ones(tokens, HIDDEN)
        ExpertMath(float_kernels, WayLimits(tiles)).add(slab, *_calls(tokens), x, out)
        rounding = (5e-4 if tiles else 0.03) if kernels.bf16 else 1e-4
        torch.testing.assert_close(out, expected, atol=rounding, rtol=rounding)
    out = torch.ones(tokens, HIDDEN)
    ExpertMath(kernels, WayLimits(0.0)).add(slab, *_calls(tokens), x, out)
    assert (out - expected).norm() < (0.02 if kernels.bf16 else 1e-4) * (expected - 1).norm()  # activations of 8 bits


@pytest.mark.parametrize("encoding", ENCODED, ids=lambda each: each.name)
def test_memory_that_a_few_tokens_kept_is_not_freed_by_many(kernels: Kernels, encoding: Encoding) -> None:
    """A prompt between two steps of the same size needs more of their common memory."""
    kernels._scratch.clear()  # other tests' is large
    slab = _encoded_slab(kernels.bf16, encoding, SILU, False)
    x = torch.randn(300, HIDDEN).to(torch.bfloat16 if kernels.bf16 else torch.float32)
    few, many = ExpertMath(kernels, WayLimits(float("inf"))), ExpertMath(kernels, WayLimits(0.0))
    for way, tokens in ((few, 2), (many, 300), (few, 2)):
        way.add(slab, *_calls(tokens), x[:tokens], torch.zeros(tokens, HIDDEN))
    scratch = {address for address, _ in kernels._scratch.values()}
    names = experts_decode.scratch_floats(HIDDEN, WIDTH, 2, 2, 2)
    assert few._expert_kernels is not None
    assert {int(few._expert_kernels._job[name][0]) for name in names} <= scratch


@pytest.mark.parametrize(("activation", "biases"), [(GPT_OSS, True), (Activation("gelu_tanh"), False), (RELU2, False)])
def test_kernels_compute_other_activations(kernels: Kernels, activation: Activation, biases: bool) -> None:
    slab = _slab(kernels.bf16, activation, biases)
    torch.manual_seed(4)
    x = torch.randn(40, HIDDEN).to(slab.down.dtype)
    for tiles in (0.0, float("inf")):
        out = torch.ones(40, HIDDEN)
        ExpertMath(kernels, WayLimits(tiles)).add(slab, *_calls(40), x, out)
        rounding = 0.05 if kernels.bf16 and not tiles else 1e-4
        torch.testing.assert_close(out.double(), _expected(slab, 40, x), atol=rounding, rtol=rounding)

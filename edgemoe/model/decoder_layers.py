"""Computes a layer's attention by the mechanism that its record names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from edgemoe.errors import StoreError
from edgemoe.families.spec import NORMS, BlockSpec, ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import StepContext
from edgemoe.model.convolution import ShortConvolution
from edgemoe.model.delta_net import DeltaNet
from edgemoe.model.dense_attention import DenseAttention
from edgemoe.model.dense_weights import DenseMatrix, LayerReader, Norm, WeightReader
from edgemoe.model.feed_forward import ExpertLayer, Gate, Mlp
from edgemoe.model.kv import DTYPES
from edgemoe.model.latent_attention import LatentAttention, SparseLatentAttention
from edgemoe.model.layer_inputs import InputGate, TokenInputs
from edgemoe.model.mamba import Mamba
from edgemoe.types.step import ExpertExecutor, RowSource


class AttentionMechanism(Protocol):
    """Computes one layer's attention, or its replacement (a delta net)."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype; fills the cache."""


ATTENTION_MECHANISMS: dict[str, Callable[[LayerReader], AttentionMechanism]] = {
    "conv": ShortConvolution,
    "delta": DeltaNet,
    "dense": DenseAttention,
    "latent": LatentAttention,
    "mamba": Mamba,
    "sparse latent": SparseLatentAttention,
}


class MoeRunner:
    """Calls the experts of a step, layer after layer, with the forecasts of the next layers' gates."""

    def __init__(self, experts: ExpertExecutor, gates: Sequence[Gate], forecast: bool, first: int = 0) -> None:
        """Takes the gates of consecutive layers; `first` is the number of the first one among layers with experts."""
        self._experts, self._gates, self._number, self._first = experts, gates, 0, first
        self._lookahead = experts.lookahead if forecast else range(0)

    def __call__(self, chosen_by: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the next layer's output [T, H] for `hidden` [T, H]; its gate is given `chosen_by` [T, H]."""
        number, gates = self._number, self._gates
        self._number += 1
        ids, weights = gates[number].route(chosen_by)
        for ahead in range(number + self._lookahead.start, min(number + self._lookahead.stop, len(gates))):
            self._experts.hint(self._first + ahead, gates[ahead].chances(chosen_by))
        return self._experts.forward(self._first + number, hidden, ids, weights)


class DecoderLayer(Protocol):
    """One layer of the decoder."""

    @property
    def gate(self) -> Gate | None:
        """Returns the gate of its experts, where it has some."""

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: MoeRunner) -> None:
        """Adds the layer's output to `residual` [T, H] float32."""


@dataclass(frozen=True, slots=True)
class SerialLayer:
    """A layer of two parts, each with a norm before it, or of one. Matrices are in the model's dtype, norms float32."""

    norm: Norm
    attention: AttentionMechanism | None
    post_norm: Norm
    feed_forward: ExpertLayer | Mlp | None
    factor: float  # of both parts' outputs
    dtype: torch.dtype

    @property
    def gate(self) -> Gate | None:
        return self.feed_forward.gate if isinstance(self.feed_forward, ExpertLayer) else None

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: MoeRunner) -> None:
        if self.attention is not None:
            residual.add_(self.attention(self.norm(residual).to(self.dtype), step), alpha=self.factor)
        self.feed_in(residual, experts)

    def feed_in(self, residual: torch.Tensor, experts: MoeRunner) -> None:
        """Adds the output of the layer's second part to `residual`, if it has one."""
        if self.feed_forward is None:
            return
        hidden = self.post_norm(residual).to(self.dtype)
        residual.add_(_fed_forward(self.feed_forward, hidden, experts), alpha=self.factor)


def _fed_forward(part: ExpertLayer | Mlp, hidden: torch.Tensor, experts: MoeRunner) -> torch.Tensor:
    """Returns the output of a layer's second part for its normalised input, both [T, H]."""
    if not isinstance(part, ExpertLayer):
        return part(hidden)
    output = part.widened(experts(hidden, part.narrowed(hidden)), hidden.dtype)
    shared = part.shared(hidden)
    return output if shared is None else output + shared


class NormedLayer:
    """A layer of two parts with norms after them, and before them if the block says so."""

    def __init__(self, reader: LayerReader) -> None:
        self._dtype, self.factor = DTYPES[reader.spec.dtype], reader.spec.block.residual
        norms = [reader.norm(f"{name}.weight") for name in NORMS[reader.spec.block.norms]]
        self.before = norms[::2] if len(norms) > 2 else (None, None)
        self.after = norms[1::2] if len(norms) > 2 else norms
        self.attention, self.feed_forward = _parts(reader)
        self.gate = self.feed_forward.gate if isinstance(self.feed_forward, ExpertLayer) else None

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: MoeRunner) -> None:
        attended = self.attention(self._normed(self.before[0], residual), step)
        residual.add_(self.after[0](attended.float()), alpha=self.factor)
        output = _fed_forward(self.feed_forward, self._normed(self.before[1], residual), experts)
        residual.add_(self.after[1](output.float()), alpha=self.factor)

    def _normed(self, norm: Norm | None, residual: torch.Tensor) -> torch.Tensor:
        return (residual if norm is None else norm(residual)).to(self._dtype)


class OnceNormedLayer:
    """A layer whose two parts read the same normalised residual."""

    def __init__(self, reader: LayerReader) -> None:
        self._dtype, self.factor = DTYPES[reader.spec.dtype], reader.spec.block.residual
        self.norm = reader.norm("input_layernorm.weight")
        self.attention, self.feed_forward = _parts(reader)
        self.gate = self.feed_forward.gate if isinstance(self.feed_forward, ExpertLayer) else None

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: MoeRunner) -> None:
        hidden = self.norm(residual).to(self._dtype)
        both = self.attention(hidden, step) + _fed_forward(self.feed_forward, hidden, experts)
        residual.add_(both, alpha=self.factor)


class ParallelLayer:
    """A layer whose dense network and experts read the same residual, with norms before and after each part."""

    def __init__(self, reader: LayerReader) -> None:
        self.attention = ATTENTION_MECHANISMS[reader.attention.heads.mechanism](reader)
        self.dense = Mlp(reader, "mlp.shared_experts")
        self.gate, self._dtype = Gate(reader), DTYPES[reader.spec.dtype]
        self.scalar = reader.read("layer_scalar", dtype=torch.float32)
        self.input_gate = InputGate(reader) if reader.spec.layer_inputs is not None else None

        def norm(name: str) -> Norm:
            return reader.norm(f"{name}.weight")

        self.before_attention, self.after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self.before_dense = norm("pre_feedforward_layernorm")
        self.after_dense = norm("post_feedforward_layernorm_1")
        self.before_experts = norm("pre_feedforward_layernorm_2")
        self.after_experts = norm("post_feedforward_layernorm_2")
        self.after_both = norm("post_feedforward_layernorm")

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: MoeRunner) -> None:
        attended = self.attention(self.before_attention(residual).to(self._dtype), step)
        residual += self.after_attention(attended.float())
        dense = self.dense(self.before_dense(residual).to(self._dtype))
        mixed = experts(residual, self.before_experts(residual).to(self._dtype))
        both = self.after_dense(dense.float()) + self.after_experts(mixed.float())
        residual += self.after_both(both)
        if self.input_gate is not None:
            assert step.layer_inputs is not None
            residual += self.input_gate(residual, step.layer_inputs)
        residual *= self.scalar


def make_layer(reader: LayerReader) -> DecoderLayer:
    """Reads a layer's weights."""
    block = reader.spec.block
    if block.parallel:
        return ParallelLayer(reader)
    if block.norms in LAYERS_BY_NORMS:
        return LAYERS_BY_NORMS[block.norms](reader)
    norms = [reader.norm(f"{name}.weight") for name in NORMS[block.norms]]
    name, bare = reader.attention.heads.mechanism, reader.number in reader.spec.feed_forward.bare_layers
    attention = None if name == "none" else ATTENTION_MECHANISMS[name](reader)
    feed_forward = None if bare else _feed_forward(reader)
    return SerialLayer(norms[0], attention, norms[-1], feed_forward, block.residual, DTYPES[reader.spec.dtype])


def _parts(reader: LayerReader) -> tuple[AttentionMechanism, ExpertLayer | Mlp]:
    """Reads the two parts of a layer."""
    return ATTENTION_MECHANISMS[reader.attention.heads.mechanism](reader), _feed_forward(reader)


def _feed_forward(reader: LayerReader) -> ExpertLayer | Mlp:
    dense = reader.number in reader.spec.feed_forward.dense_layers
    return Mlp(reader, "mlp") if dense else ExpertLayer(reader)


LAYERS_BY_NORMS: dict[str, Callable[[LayerReader], DecoderLayer]] = {
    "after": NormedLayer,
    "both": NormedLayer,
    "once": OnceNormedLayer,
}


def gates_of(layers: Sequence[DecoderLayer]) -> tuple[Gate, ...]:
    """Returns the gates of the layers that have experts."""
    return tuple(layer.gate for layer in layers if layer.gate is not None)


@dataclass(frozen=True, slots=True)
class DenseWeights:
    embed: DenseMatrix  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: DenseMatrix  # [V, H], the embedding itself where they are tied
    inputs: TokenInputs | None = None

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Returns the gates of the layers that have experts."""
        return gates_of(self.layers)

    def logits(self, last: torch.Tensor, block: BlockSpec) -> torch.Tensor:
        """Returns the logits [R, V] of normalised hidden states [R, H], float32."""
        return self.bounded(self.head(last).float(), block)

    def bounded(self, logits: torch.Tensor, block: BlockSpec) -> torch.Tensor:
        """Returns the head's products [R, V] scaled and bounded, as the block's record says."""
        if block.logits != 1.0:
            logits = logits * block.logits
        return torch.tanh(logits / block.soft_cap) * block.soft_cap if block.soft_cap else logits


def load_weights(
    spec: ModelSpec,
    path: Path,
    device: torch.device,
    kernels: Kernels | None,
    progress: Callable[[float], object] = lambda _: None,
    table: RowSource | None = None,
) -> DenseWeights:
    """Copies the weights from the file at `path` to `device`; `kernels` multiply single tokens. Raises StoreError.

    `progress` is called with the share of layers that are loaded. `table` has the rows of a model that has some.
    """
    with _reader(spec, path, device, kernels) as read:
        embed = read.matrix("model.embed_tokens.weight")
        layers = _layers(spec, read, progress)
        head = embed if spec.block.tied else read.matrix("lm_head.weight")
        norm, inputs = read.norm("model.norm.weight"), None
        if spec.layer_inputs is not None:
            assert table is not None, "this model has a table of rows"
            inputs = TokenInputs(spec, spec.layer_inputs, read, table)
        return DenseWeights(embed=embed, layers=layers, norm=norm, head=head, inputs=inputs)


def load_layers(
    spec: ModelSpec,
    path: Path,
    device: torch.device,
    kernels: Kernels | None,
    progress: Callable[[float], object] = lambda _: None,
) -> tuple[DecoderLayer, ...]:
    """Copies the layers that this box holds as `load_weights` does, without embedding and head. Raises StoreError."""
    with _reader(spec, path, device, kernels) as read:
        return _layers(spec, read, progress)


@contextmanager
def _reader(spec: ModelSpec, path: Path, device: torch.device, kernels: Kernels | None) -> Iterator[WeightReader]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield WeightReader(spec, path, file, device, kernels)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: the dense weights cannot be read ({error}); pack the checkpoint again") from error


def _layers(spec: ModelSpec, read: WeightReader, progress: Callable[[float], object]) -> tuple[DecoderLayer, ...]:
    layers = []
    for done, layer in enumerate(spec.held_layers):
        progress(done / len(spec.held_layers))
        layers.append(make_layer(LayerReader(spec, layer, read)))
    return tuple(layers)

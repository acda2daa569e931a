"""Measures the loss of a store's encodings against its checkpoint on a text.

Both compute in float32, a window of the text at a time and layer by layer, so that memory holds dense weights and one
expert. The next token's distributions p of the checkpoint and q of the store are compared by KL(p || q).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from edgemoe.api.text.tokenizer import TextModel
from edgemoe.engine.driver import SequenceDriver
from edgemoe.errors import ConfigError
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.expert_math import ExpertMath, ExpertSlab
from edgemoe.kernels.cpu.experts_decode import ExpertLayout
from edgemoe.model.decoder import Decoder
from edgemoe.store.files import page_memory
from edgemoe.store.gguf.checkpoint_of_gguf import GgufCheckpoint, open_checkpoint
from edgemoe.store.layout import StoreLayout, WantedEncodings, plan
from edgemoe.store.manifest import DENSE, Manifest, spec_of
from edgemoe.store.packer import AS_IT_IS, Progress
from edgemoe.store.reader import ExpertStore
from edgemoe.store.row_table import RowTable, open_row_table
from edgemoe.store.writer import CheckpointReader, write_file
from edgemoe.types.step import TokenGroups

WINDOW_TOKENS = 512  # of text in a window, which sees nothing before it
MOST_TOKENS = 8192  # of a text that are read
IN_BFLOAT16 = WantedEncodings("bfloat16", "bfloat16")  # of a GGUF, which few encodings keep as it is
ReadExpert = Callable[[int, int, memoryview], None]


@dataclass(frozen=True, slots=True)
class StoreQuality:
    """The differences between a store's predictions and its checkpoint's."""

    tokens: int  # that were predicted
    divergence: float  # mean KL divergence of a token, in nats
    same_top: float  # share of tokens with the same most probable one
    perplexity: float
    reference_perplexity: float  # the checkpoint's

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: KL divergence {self.divergence:.6f}, same top token {self.same_top:.2%}, "
            f"perplexity {self.perplexity:.4f} (checkpoint: {self.reference_perplexity:.4f})"
        )


def compare(store: Path, checkpoint: Path, text: str, progress: Progress) -> StoreQuality:
    """Returns how a store differs from its checkpoint. Raises StoreError, CheckpointError, ConfigError."""
    manifest, source = Manifest.load(store), open_checkpoint(checkpoint)
    if manifest.source != source.fingerprint:
        raise ConfigError(f"{store} was packed from another checkpoint than {checkpoint}, or that has changed since")
    ids = TextModel(store).encode(text, add_special_tokens=False)[:MOST_TOKENS]
    if len(ids) < 2:
        raise ConfigError("the text to check with is empty; name a file with a few thousand words")
    with ExitStack() as opened, torch.inference_mode():
        ours = opened.enter_context(stored(store, manifest))
        theirs = opened.enter_context(
            original(plan(source, IN_BFLOAT16 if isinstance(source, GgufCheckpoint) else AS_IT_IS))
        )
        return summary(ids, theirs, ours, progress)


class StreamedExperts:
    """Implements `ExpertExecutor` with memory for one expert, read whenever it is needed."""

    lookahead, places, slots = range(0), None, None

    def __init__(self, spec: ModelSpec, read: ReadExpert) -> None:
        geometry = spec.geometry
        self._read, self._math, self._top_k = read, ExpertMath(), geometry.top_k
        self._room = page_memory(geometry.largest_bytes)
        slab, layers = torch.frombuffer(self._room, dtype=torch.uint8)[None], range(geometry.layers)
        self._slabs = [ExpertSlab(slab, ExpertLayout.of(geometry, layer), geometry.bf16) for layer in layers]

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        group, out = TokenGroups.of(ids.numpy(), weights.numpy()), torch.zeros(hidden.shape)
        slot, bounds = np.zeros(1, np.int64), group.offsets.tolist()
        for place, expert in enumerate(group.experts.tolist()):
            self._read(layer, expert, self._room)
            calls = slice(bounds[place], bounds[place + 1])
            offsets = np.array([0, calls.stop - calls.start])
            tokens, shares = group.tokens[calls], group.weights[calls]
            self._math.add(self._slabs[layer], slot, offsets, tokens, shares, hidden, out)
        return out

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        raise AssertionError("experts of a comparison have no places")

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        raise AssertionError("nobody asked for hints")


@dataclass(frozen=True, slots=True)
class TextReader:
    """A model that reads whole windows of text."""

    decoder: Decoder
    experts: StreamedExperts

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Returns the logits after each token, float32 [T, V]."""
        sequence = SequenceDriver(self.decoder.spec, 1, len(ids))
        _, batch = sequence.step([ids], every_row=True)
        return self.decoder.forward(batch, sequence.cache, self.experts)


@contextmanager
def stored(store: Path, manifest: Manifest) -> Iterator[TextReader]:
    """Opens a store. Raises StoreError."""
    spec = _in_float32(spec_of(manifest))
    with ExpertStore(store, manifest) as opened, _row_table(spec, store) as table:
        decoder = Decoder.load(spec, store / DENSE, table=table)
        yield TextReader(decoder, StreamedExperts(spec, opened.read_into))


@contextmanager
def original(layout: StoreLayout) -> Iterator[TextReader]:
    """Opens a checkpoint; its dense weights go through a temporary file. Raises CheckpointError."""
    spec = _in_float32(layout.spec)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as opened:
        reader = opened.enter_context(CheckpointReader())
        for file in (layout.dense, *layout.tables):
            write_file(file, Path(scratch), lambda _: None)
        table = opened.enter_context(_row_table(spec, Path(scratch)))
        decoder = Decoder.load(spec, Path(scratch) / DENSE, table=table)

        def read(layer: int, expert: int, into: memoryview) -> None:
            at = 0
            for _, block in reader.read([layout.layers[layer].runs[expert]]):
                into[at : at + len(block)] = block
                at += len(block)

        yield TextReader(decoder, StreamedExperts(spec, read))


@contextmanager
def _row_table(spec: ModelSpec, directory: Path) -> Iterator[RowTable | None]:
    """Opens the table of rows in a folder, if the model has one. Raises StoreError."""
    table = open_row_table(spec, directory)
    try:
        yield table
    finally:
        if table is not None:
            table.close()


def _in_float32(spec: ModelSpec) -> ModelSpec:
    """Returns the same model with hidden states in float32; its experts stay as they are stored."""
    encodings = tuple(spec.geometry.encoding_name(layer) for layer in range(spec.geometry.layers))
    return replace(spec, dtype="float32", encodings=encodings)


class Predictor(Protocol):
    """Reads windows of text, and may remember them."""

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Returns the logits after each token, float32 [T, V]."""


def summary(ids: list[int], theirs: Predictor, ours: Predictor, progress: Progress) -> StoreQuality:
    """Compares the predictions of two models; `theirs` is the reference."""
    tokens = same = 0
    divergence = surprise = reference = 0.0
    for start in range(0, len(ids) - 1, WINDOW_TOKENS):
        window = ids[start : start + WINDOW_TOKENS + 1]
        p, q = (model.logits(window[:-1]).log_softmax(-1) for model in (theirs, ours))
        following = torch.tensor(window[1:])[:, None]
        tokens += len(following)
        divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        surprise -= float(q.gather(1, following).sum(dtype=torch.float64))
        reference -= float(p.gather(1, following).sum(dtype=torch.float64))
        progress(min(start + WINDOW_TOKENS, len(ids)), len(ids))
    mean = (float(np.exp(total / tokens)) for total in (surprise, reference))
    return StoreQuality(tokens, divergence / tokens, same / tokens, *mean)

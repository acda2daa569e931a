"""A checkpoint's tensors under any of the family's spellings; knows which have been asked for."""

from __future__ import annotations

import re
from dataclasses import replace

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.recipe import SourceRows
from edgemoe.families.spec import ModelSpec, Shape
from edgemoe.store.checkpoint import Checkpoint
from edgemoe.store.quantized import UNUSED, find_source, has_source
from edgemoe.store.sources import Source

IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry and that follow from the configuration


class SourceTensors:
    """Finds tensors, each once; `rounded` counts those that are float16 and become bfloat16."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self.rounded = 0
        self._spec, self._checkpoint = spec, checkpoint
        self._left = dict(checkpoint.tensors)
        self._stacks: dict[str, Source] = {}

    def has(self, name: str) -> bool:
        """Returns whether a tensor is there that has not been taken."""
        return any(has_source(self._left, spelling) for spelling in self._spec.names.spellings(name))

    def take(self, name: str, shape: Shape) -> Source:
        """Returns a tensor. Raises CheckpointError and UnsupportedModel where it is not as it should be."""
        found = [each for each in self._spec.names.spellings(name) if has_source(self._left, each)]
        where = self._checkpoint.directory
        if not found:
            raise CheckpointError(f"{where}: tensor {name} is missing; its shape should be {list(shape)}")
        if len(found) > 1:
            raise CheckpointError(f"{where}: {' and '.join(found)} are the same tensor")
        source = find_source(self._left, found[0], shape, self._checkpoint.config)
        for tensor in (source.codes, source.scales):
            if tensor is not None:
                del self._left[tensor.name]
        self.rounded += source.kind == "F16"
        return source

    def rows(self, take: SourceRows) -> tuple[Source, SourceRows]:
        """Returns where some rows lie; of MXFP4 a stack's matrices are [rows, columns], however others spell them."""
        stored = take
        if take.transposed and any(f"{each}_blocks" in self._left for each in self._spec.names.spellings(take.source)):
            *lead, columns, rows = take.shape
            stored = replace(take, shape=(*lead, rows, columns), transposed=False)
        if not take.index:
            return self.take(take.source, stored.shape), stored
        if take.source not in self._stacks:
            self._stacks[take.source] = self.take(take.source, stored.shape)
        source = self._stacks[take.source]
        return source, replace(take, shape=source.shape, transposed=take.transposed and source.kind != "mxfp4")

    def refuse_leftovers(self) -> None:
        """Raises UnsupportedModel where tensors are left that the configuration does not ask for."""
        ignored = (*IGNORED, "lm_head.weight") if self._spec.block.tied else IGNORED
        if self._checkpoint.config.get("quantization_config"):
            ignored = (*ignored, *UNUSED)
        skipped = [pattern.replace("{layers}", str(self._spec.layers)) for pattern in self._spec.names.skipped]
        left = [name for name in self._left if not name.endswith(ignored)]
        if left := [name for name in left if not any(re.match(pattern, name) for pattern in skipped)]:
            raise UnsupportedModel(
                f"{self._checkpoint.directory}: {len(left)} tensors have no place in a {self._spec.architecture} "
                f"of this configuration, such as {left[0]!r}"
            )

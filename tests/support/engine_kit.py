"""Shared parts of the engine's tests: a small plain model, and an engine to drive step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.config.settings import EngineSettings
from edgemoe.engine.engine import Engine, ServingBudget
from edgemoe.engine.grammar import GrammarCompiler
from edgemoe.engine.scheduler import OUTPUT_RESERVE
from edgemoe.engine.steps import LoadedModel, StepObservers
from edgemoe.errors import MissingExpert
from edgemoe.families.spec import (
    AttentionHeads,
    BlockSpec,
    FeedForwardSpec,
    LayerAttention,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    TensorNames,
)
from edgemoe.types.request import Emission, GrammarTrial, Request, Sampling, digest_of
from edgemoe.types.step import BLOCK_TOKENS, Batch, StepMeta, StepRouting

torch.set_num_threads(1)  # the matrices are tiny

SPEC = ModelSpec(
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    vocab=264,
    hidden=32,
    dtype="float32",
    context_tokens=512,
    names=TensorNames(),
    attention=(LayerAttention(AttentionHeads(2, 2, 16), RopeSpec(1e4, 16)),) * 2,
    router=RouterSpec(6, 2, renormalise=True),
    feed_forward=FeedForwardSpec(16),
    block=BlockSpec(1e-6, tied=True),
)
HEADS, ROUTER = SPEC.attention[0].heads, SPEC.router


class PlainCache:
    """Keys and values of all layers in blocks."""

    states: Any = None
    windows: Any = None

    def __init__(self, blocks: int) -> None:
        shape = (blocks, SPEC.layers, 2, BLOCK_TOKENS, HEADS.kv_count, HEADS.dim)
        self.data = torch.full(shape, torch.nan)

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        return self.data[list(blocks)].clone()

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        self.data[list(blocks)] = rows


class PlainExperts:
    """All experts in memory, except the `missing` ones, which are nowhere."""

    lookahead, places, slots = range(0), None, None

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights  # [L, E, H, H]
        self.missing: set[tuple[int, int]] = set()
        self.away: tuple[str, ...] = ()  # boxes that have these
        self._ids: list[torch.Tensor] = []
        self._shares: list[torch.Tensor] = []

    def begin_step(self, meta: StepMeta) -> npt.NDArray[np.int16]:
        self._meta, self._ids, self._shares = meta, [], []
        return np.empty((0, 1, 1), np.int16)

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for expert in ids.unique().tolist():
            if (layer, expert) in self.missing:
                raise MissingExpert(layer, expert, "the test says so", away=self.away)
        self._ids.append(ids)
        self._shares.append(weights)
        out = torch.einsum("tkoh,th->tko", self.weights[layer, ids], hidden)
        return (torch.tanh(out) * weights[..., None]).sum(1)

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        raise AssertionError("these experts have no slots")

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        raise AssertionError("nobody asked")

    def end_step(self) -> StepRouting:
        return StepRouting(
            meta=self._meta,
            ids=np.stack([ids.numpy() for ids in self._ids]).astype(np.int16),
            weights=np.stack([shares.numpy() for shares in self._shares]),
            hints={},
            step_s=0.0,
            stall_s=0.0,
        )


class PlainDecoder:
    """A small Mixture-of-Experts transformer, a sequence at a time."""

    lost: Sequence[int] = ()  # steps in which no number comes out as one

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float) -> torch.Tensor:
            return scale * torch.randn(*shape, generator=generator)

        hidden, layers = SPEC.hidden, SPEC.layers
        self.embed = random(SPEC.vocab, hidden, scale=1.0)
        self.places = random(SPEC.context_tokens, hidden, scale=0.5)
        self.qkv = random(layers, hidden, 3 * hidden, scale=0.25)
        self.gates = random(layers, hidden, ROUTER.experts, scale=0.5)
        self.experts = PlainExperts(random(layers, ROUTER.experts, hidden, hidden, scale=0.4))
        self.steps: list[Batch] = []

    def forward(self, batch: Batch, kv: PlainCache, experts: PlainExperts) -> torch.Tensor:
        self.steps.append(batch)
        x = self.embedded(batch, kv)
        for layer in range(SPEC.layers):
            x = x + self._attend(layer, _norm(x), batch, kv)
            probs = torch.softmax(_norm(x) @ self.gates[layer], -1)
            shares, ids = probs.topk(ROUTER.top_k)
            x = x + experts.forward(layer, _norm(x), ids, shares)
        return _norm(x[batch.logit_rows]) @ self.embed.T

    def embedded(self, batch: Batch, kv: PlainCache) -> torch.Tensor:
        x = self.embed[batch.tokens] + self.places[batch.positions]
        return x * torch.nan if len(self.steps) in self.lost else x

    def _attend(self, layer: int, x: torch.Tensor, batch: Batch, kv: PlainCache) -> torch.Tensor:
        heads = (-1, HEADS.count, HEADS.dim)
        q, k, v = (part.reshape(heads) for part in (x @ self.qkv[layer]).chunk(3, -1))
        out, start = [], 0
        for count, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
            rows = slice(start, start + count)
            at = batch.positions[rows]
            blocks = torch.tensor(table)[at // BLOCK_TOKENS]
            kv.data[blocks, layer, 0, at % BLOCK_TOKENS] = k[rows]
            kv.data[blocks, layer, 1, at % BLOCK_TOKENS] = v[rows]
            used = torch.tensor(table[: -(-context // BLOCK_TOKENS)])
            keys, values = (kv.data[used, layer, part].flatten(0, 1)[:context] for part in (0, 1))
            scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / HEADS.dim**0.5
            scores = scores.masked_fill(torch.arange(context) > at[:, None], -torch.inf)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1))
            start += count
        return torch.cat(out)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Model(NamedTuple):
    """The parts with which an engine computes."""

    decoder: Any
    experts: Any
    spec: ModelSpec
    cache: Callable[[int], Any]  # makes a KV cache with a number of blocks
    table: Any = None  # of rows


def plain_model() -> Model:
    decoder = PlainDecoder()
    return Model(decoder, decoder.experts, SPEC, PlainCache)


def tried(grammar: str) -> GrammarTrial:
    """Returns a front's successful trial of a grammar."""
    return GrammarTrial(digest_of(grammar), 0.01, 1 << 20)


class Drive:
    """An engine that the test steps, with a clock that the test moves.

    With `keep_all`, layers with windows keep all tokens, too.
    """

    def __init__(
        self,
        blocks: int = 64,
        grammars: GrammarCompiler | None = None,
        model: Model | None = None,
        missing_expert_timeout_s: float = 0.0,
        observe: Callable[[StepRouting], None] | None = None,
        expect: Callable[[StepMeta, npt.NDArray[np.int16]], None] | None = None,
        output_reserve: float = OUTPUT_RESERVE,
        window_blocks: int = 0,
        keep_all: bool = False,
        **settings: Any,
    ) -> None:
        self.now_s = 0.0
        self.emitted: list[Emission] = []
        self.model = model = model or plain_model()
        chosen = {"mixed_step_s": 0.0, "step_tokens": 48, "max_sequences": 8, "drafts": "off", **settings}
        cache = model.cache(blocks, window_blocks=window_blocks) if window_blocks else model.cache(blocks)
        in_windows = cache.windows.blocks if cache.windows is not None and not keep_all else 0
        slots = 0 if cache.states is None else len(cache.states.data)
        self.engine = Engine(
            LoadedModel(model.spec, model.decoder, model.experts, cache, torch.device("cpu"), grammars, model.table),
            EngineSettings(**chosen),
            ServingBudget(blocks, model.spec.context_tokens, 1 << 20, slots, missing_expert_timeout_s, in_windows),
            self.emitted.extend,
            clock=lambda: self.now_s,
            watchers=StepObservers(observe, expect),
        )
        self.engine.scheduler.output_reserve = output_reserve

    def submit(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        name: str = "r",
        *,
        emitted: Sequence[int] = (),
        attempt: int = 1,
        seed: int = 7,
        choice: int = 0,
        user: str = "",
        principal: str = "",
        salt: bytes = b"",
        private_salt: bytes = b"",
        expected: Sequence[int] = (),
        remaining_s: float = 1e6,
        waited_s: float = 0.0,
        **sampling: Any,
    ) -> None:
        if isinstance(grammar := sampling.get("grammar"), str):
            sampling.setdefault("grammar_trial", tried(grammar))
        chosen = Sampling(**{"temperature": 0.0, "max_tokens": 12, **sampling})
        request = Request(
            id=name,
            prompt=tuple(prompt),
            sampling=chosen,
            seed=seed,
            choice=choice,
            user=user,
            principal=principal,
            salt=salt,
            private_salt=private_salt,
            expected=tuple(expected),
        )
        self.engine.loop.submit(request, tuple(emitted), attempt, remaining_s, waited_s)

    def step(self) -> bool:
        worked = self.engine.loop.step()
        self.now_s += 0.1
        self.engine.check_integrity()
        return worked

    def run(self) -> None:
        while self.step():
            assert self.now_s < 1000, "it does not end"

    def tokens(self, name: str = "r") -> list[int]:
        """Returns a request's emitted tokens; checks that the indices have no gap."""
        mine = [one for one in self.emitted if one.request == name and one.token is not None]
        assert [one.index for one in mine] == list(range(mine[0].index, mine[0].index + len(mine)))
        return [one.token for one in mine if one.token is not None]

    def end(self, name: str = "r") -> Emission:
        """Returns a request's last emission."""
        (last,) = [one for one in self.emitted if one.request == name and one.finish]
        return last


def prompt(length: int, seed: int = 0, vocab: int = SPEC.vocab) -> list[int]:
    """Returns random tokens below `vocab`, by `seed`."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()  # type: ignore[no-any-return]

"""Trains the next-use network from routing traces, with Lightning, and exports it.

    python -m tools.research.cache.next_use.next_use_train FILE... --share 0.5 --out DIR --to DIR [--max-minutes N]
    python -m tools.research.cache.replay FILE... --score-from 0.5 --policies learned,nextuse --next-use DIR

The last 12 % of the `--share` choose the best weights. A killed run continues from its last short epoch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from edgemoe.durable import make_folder
from edgemoe.errors import EdgemoeError
from edgemoe.replay.trace import Trace, first, in_turn, load
from edgemoe.rights import become_owner
from scoutgate.module import KeepBest, Recipe, Scheduled
from scoutgate.train import quiet, trainer_arguments, trainer_for
from tools.research.cache.next_use.model import (
    AFTER,
    FROM_HERE,
    PAST,
    RECORD,
    WEIGHTS,
    NextUseNet,
    NextUseShape,
    write_export,
)
from tools.research.cache.next_use.next_use_data import Glances, NextUseBatch, Routing

EPOCH_BATCHES = 60  # a short epoch: this many batches, then a validation and a checkpoint
VALIDATION_BATCHES = 10


class NextUseModule(Scheduled):
    def __init__(self, shape: NextUseShape, recipe: Recipe, dropout: float, max_steps: int, max_s: float) -> None:
        super().__init__()
        self.network, self.recipe = NextUseNet(shape, dropout), recipe
        self.max_steps, self.max_s = max_steps, max_s

    def loss(self, batch: NextUseBatch) -> Tensor:
        """Computes cross entropy (nats) of the discounted time to next use, for every expert in the forecast that
        applies.
        """
        network, shape = self.network, self.network.shape
        rows = torch.cat([batch.asking, batch.memory])
        past = before(network.tokens(batch.hot), batch.place, rows)
        context = network.context(network.history(past), batch.hot[rows], batch.look)
        asking, memory = context[: len(batch.asking)], context[len(batch.asking) :]
        likeness = (network.asked(asking) @ network.key(memory).T).masked_fill(batch.hidden, -1e4)
        weights = likeness.softmax(1)
        parametric = network.parametric(asking).view(len(asking), 2, -1)
        done = shape.places[batch.look] * shape.experts
        soon_done = min(done + -(-shape.layers // shape.looks) * shape.experts, shape.total)
        losses = []
        for plane, part in ((FROM_HERE, slice(done, None)), (AFTER, slice(0, soon_done))):
            odds = network.weigh(
                parametric[:, plane, part], weights @ batch.soon[plane][:, part], batch.own[plane][:, part], plane
            )
            target = batch.target[plane][:, part]
            losses.append(functional.binary_cross_entropy_with_logits(odds, target, reduction="none").flatten())
        return torch.cat(losses).mean()

    def training_step(self, batch: NextUseBatch, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_log_loss", loss, prog_bar=True, batch_size=len(batch.asking))
        return loss

    def validation_step(self, batch: NextUseBatch, _: int) -> None:
        self.log("log_loss", self.loss(batch), prog_bar=True, batch_size=len(batch.asking))


def before(tokens: Tensor, place: Tensor, rows: Tensor) -> Tensor:
    """Returns vectors of the PAST tokens before each row in its request, [n, PAST, token], the latest first."""
    padded = functional.pad(tokens, (0, 0, 1, 0))  # row 0: none
    back = torch.arange(1, PAST + 1, device=rows.device)
    at = rows[:, None] - back
    known = (back <= place[rows][:, None]) & (at >= 0)
    return padded[torch.where(known, at + 1, 0)]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools.research.cache.next_use.next_use_train", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="routing tables or recordings")
    parser.add_argument("--share", type=float, default=1.0, help="of the tokens to learn from, the first ones")
    parser.add_argument("--each", action="store_true", help="the first ones of each file, not of all files in turn")
    parser.add_argument("--out", type=Path, required=True, help="training folder; made, or continued")
    parser.add_argument("--to", type=Path, required=True, help="folder of the export")
    parser.add_argument("--model", default="", help="digest of the model, where the network is for a server")
    parser.add_argument("--experts", type=int, default=0, help="per layer (default: from the traces)")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--max-minutes", type=float, default=15.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=8, help="short epochs without improvement before stopping")
    trainer_arguments(parser)
    return parser.parse_args(argv)


def first_part(options: argparse.Namespace) -> Trace:
    """Returns the training part. Raises ConfigError, StoreError."""
    whole = load(options.files, experts=options.experts)
    if not options.each:
        return load(options.files, experts=whole.experts, limit=int(options.share * whole.tokens))
    alone = [load([file], experts=whole.experts) for file in options.files]
    parts = [first(trace.requests, int(options.share * trace.tokens)) for trace in alone]
    return Trace(in_turn(parts), whole.experts)


def train(options: argparse.Namespace) -> NextUseNet:
    """Runs or continues a training and writes the export. Raises ValueError, ConfigError, StoreError."""
    L.seed_everything(options.seed, verbose=False)
    if options.threads:
        torch.set_num_threads(options.threads)
    trace = first_part(options)
    shape = NextUseShape(trace.layers, trace.experts, trace.top_k, looks=min(4, trace.layers))
    routing = Routing(trace.requests, shape)
    training = Glances(routing, seed=options.seed, batches=EPOCH_BATCHES)
    validation = Glances(routing, seed=None, batches=VALIDATION_BATCHES)
    recipe = Recipe(lr=options.lr, weight_decay=options.weight_decay, warmup_steps=50)
    module = NextUseModule(shape, recipe, options.dropout, options.steps, options.max_minutes * 60)
    make_folder(options.out)
    described: dict[str, object] = {"seed": options.seed, "tokens": routing.count}
    keep = KeepBest(options.out, module.network, lambda: described)
    last = options.out / "last.ckpt"
    with quiet():
        trainer = trainer_for(options, -(-options.steps // EPOCH_BATCHES), keep)
        batches, held_out = DataLoader(training, batch_size=None), DataLoader(validation, batch_size=None)
        trainer.fit(module, batches, held_out, ckpt_path=str(last) if last.exists() else None)
    network = NextUseNet(shape)
    network.load_state_dict(load_file(options.out / "best.safetensors"))
    metrics = {"log_loss": keep.best, "tokens": routing.count}
    write_export(options.to, network, {"digest": options.model}, metrics)
    return network


def main() -> None:
    options = arguments()
    try:
        become_owner(options.out, options.to)
        train(options)
    except (ValueError, EdgemoeError) as error:
        raise SystemExit(str(error)) from error
    print(f"wrote {options.to / WEIGHTS} and {options.to / RECORD}")


if __name__ == "__main__":
    main()

"""Trains ScoutGate: `python -m scoutgate.train --data DIR --model DIR --out DIR [--max-minutes N]`.

The folder `--out` holds Lightning's checkpoints (for resuming only), CSV logs, and `best.safetensors` + `best.json`,
which `scoutgate.evaluate` and `scoutgate.export` read. A killed run goes on where its last short epoch ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader

from edgemoe.durable import make_folder, remove_file, replace_file
from edgemoe.errors import EdgemoeError
from edgemoe.experts.predict.scoutgate_model import VARIANTS, ScoutGateShape
from edgemoe.rights import become_owner
from scoutgate.data import Batches, Recording
from scoutgate.embedding import embedding_for
from scoutgate.module import KeepBest, Recipe, ScoutGateModule

EPOCH_BATCHES = 200  # a short epoch: this many batches, then a validation and a checkpoint


def trainer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trainer_for` and both trainings."""
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto")
    parser.add_argument("--precision", choices=("32", "bf16"), default="32")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch decides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-progress", action="store_true")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scoutgate.train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data set (see scoutgate.convert)")
    parser.add_argument("--model", type=Path, help="checkpoint or store of the recorded model, for its embedding")
    parser.add_argument("--out", type=Path, required=True, help="training folder; made, or continued")
    parser.add_argument("--variant", choices=VARIANTS, default="source")
    parser.add_argument("--no-hidden", action="store_true", help="leave recorded hidden states out of variant context")
    parser.add_argument("--passes", type=float, default=12.0, help="passes over the training split, at most")
    parser.add_argument("--max-minutes", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=512, help="tokens per step")
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--patience", type=int, default=6, help="short epochs without improvement before stopping")
    trainer_arguments(parser)
    return parser.parse_args(argv)


def splits(recording: Recording, shape: ScoutGateShape, options: argparse.Namespace) -> tuple[Batches, Batches]:
    """Returns training batches in an order that changes every short epoch, and the validation split in order."""
    most = EPOCH_BATCHES * options.batch
    train = Batches(recording, "train", shape, options.batch, options.seed, most)
    validation = Batches(recording, "validation", shape, 2048, None, most)
    if not train.count or not validation.count:
        raise SystemExit(f"{options.data} has too few requests to split; record more")
    return train, validation


class WholeCheckpoints(TorchCheckpointIO):
    """Writes Lightning's checkpoints by way of `edgemoe.durable`, whole or not at all, and reads plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with tempfile.TemporaryDirectory() as folder:  # that this user alone enters
            file = Path(folder) / "whole"
            super().save_checkpoint(checkpoint, file, storage_options)
            replace_file(Path(path), file.read_bytes(), 0o644)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        remove_file(Path(path), missing_ok=True)


def trainer_for(options: argparse.Namespace, max_epochs: int, keep: KeepBest) -> L.Trainer:
    checkpoints = ModelCheckpoint(options.out, filename="epoch-{epoch}", save_last=True, save_top_k=0)
    callbacks: list[L.Callback] = [
        checkpoints,
        keep,
        EarlyStopping("log_loss", patience=options.patience, min_delta=1e-5),
    ]
    if not options.no_progress:
        callbacks.append(TQDMProgressBar(refresh_rate=20))
    return L.Trainer(
        accelerator={"cuda": "gpu"}.get(options.device, options.device),
        devices=1,
        precision="bf16-mixed" if options.precision == "bf16" else "32-true",
        max_epochs=max_epochs,
        max_time=timedelta(minutes=options.max_minutes),
        callbacks=callbacks,
        logger=CSVLogger(options.out, name="", version="log"),
        plugins=[WholeCheckpoints()],
        gradient_clip_val=1.0,
        enable_progress_bar=not options.no_progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silences Lightning's advertising, and its warnings about deliberate choices."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        yield


def _check_continues(out: Path, described: Mapping[str, object]) -> None:
    """Raises ValueError where the folder holds a training from other data, which would go on, or have ended."""
    best = out / "best.json"
    if not best.exists():
        return
    held = json.loads(best.read_text(encoding="utf-8"))
    for what in ("meta", "tokens"):
        if held.get(what) != json.loads(json.dumps(described[what])):
            raise ValueError(f"{out} holds a training from other data ({what} differ): delete it, or give another")


def train(options: argparse.Namespace) -> Path:
    """Runs or continues a training; returns the folder with the best weights."""
    L.seed_everything(options.seed, verbose=False)
    if options.threads:
        torch.set_num_threads(options.threads)
    recording = Recording(options.data)
    embedding = embedding_for(recording, options.model)
    meta = recording.meta
    hidden = meta.hidden if options.variant == "context" and not options.no_hidden else 0
    shape = ScoutGateShape(meta.experts, meta.top_k, embedding.shape[1], hidden, variant=options.variant)
    make_folder(options.out)
    training, validation = splits(recording, shape, options)
    steps = int(options.passes * -(-len(recording.positions("train")) // options.batch))
    module = ScoutGateModule(shape, Recipe(lr=options.lr), embedding, steps, options.max_minutes * 60)
    described = {"meta": asdict(meta), "recipe": asdict(module.recipe), "seed": options.seed, "data": str(options.data)}
    described["tokens"] = recording.count
    _check_continues(options.out, described)
    keep = KeepBest(options.out, module.gate, lambda: described)
    with quiet():
        trainer = trainer_for(options, -(-steps // training.count), keep)
    last = options.out / "last.ckpt"
    with quiet():
        train, held = DataLoader(training, batch_size=None), DataLoader(validation, batch_size=None)
        trainer.fit(module, train, held, ckpt_path=str(last) if last.exists() else None)
    return Path(options.out)


def main() -> None:
    options = arguments()
    try:
        become_owner(options.out)
        folder = train(options)
    except (ValueError, EdgemoeError) as error:
        raise SystemExit(str(error)) from error
    print(f"best weights: {folder / 'best.safetensors'}; next: python -m scoutgate.evaluate --run {folder}")


if __name__ == "__main__":
    main()

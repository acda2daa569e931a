"""Resolves `--experts auto`: asks the planner for an encoding that suits this box; a store that is here stays."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from edgemoe import demo
from edgemoe.config.settings import ModelSettings
from edgemoe.errors import CapacityError
from edgemoe.store.catalog import is_store
from edgemoe.store.gguf.checkpoint_of_gguf import open_checkpoint
from edgemoe.store.layout import KEEP, WantedEncodings
from edgemoe.store.manifest import MANIFEST
from edgemoe.store.packer import place_of

AUTO = "auto"
ASK_S = 120.0  # that torch may take to load
# KL divergence of the demo model's predictions, in nats a token (tools/bench/results/encoding_quality.md). `auto`
# chooses among these, and the model as it is.
DIVERGENCE = {
    "int8": 3.0e-5,
    "q6_k": 2.2e-4,
    "q5_k": 5.9e-4,
    "q4_k+q6_k": 7.5e-4,
    "q4_k": 1.5e-3,
    "iq4_nl": 2.1e-3,
}


def resolve_experts(experts: str, model: Path, args: argparse.Namespace, store_dir: str, dense: str = KEEP) -> str:
    """Returns the encoding of experts that `auto` means for a checkpoint; another one as it is.

    A store of the checkpoint that is here decides, so that no start packs the model again. Prints the choice and its
    reason on standard error. Raises CapacityError where no encoding fits, CheckpointError.
    """
    if experts != AUTO:
        return experts
    if is_store(model):
        return KEEP
    if (name := _packed_as(model, Path(store_dir).expanduser(), dense)) is not None:
        print(f"--experts auto: {name}, for its store is here", file=sys.stderr)
        return name
    return ask(model, args)


def with_encoding(model: ModelSettings, args: argparse.Namespace) -> ModelSettings:
    """Returns the settings of a model with `auto` resolved."""
    path = Path(model.path).expanduser() if model.path else demo.model_path()
    if not path.exists():  # the name of a store
        return msgspec.structs.replace(model, experts=KEEP)
    return msgspec.structs.replace(model, experts=resolve_experts(model.experts, path, args, model.store_dir))


def _packed_as(model: Path, store_dir: Path, dense: str) -> str | None:
    """Returns the encoding of a finished store of this checkpoint, if `auto` may choose it; None without one."""
    checkpoint = open_checkpoint(model)
    places = (
        (name, place_of(store_dir, checkpoint, WantedEncodings.parse(name, dense))) for name in (KEEP, *DIVERGENCE)
    )
    return next((name for name, place in places if (place / MANIFEST).is_file()), None)


def ask(model: Path, args: argparse.Namespace) -> str:
    """Returns the planner's choice for a checkpoint or a config.json, in a process of its own, which loads torch.

    Prints the reason. Raises CapacityError where no encoding fits.
    """
    command = [sys.executable, "-m", "edgemoe.cli.plan.choice_process", str(model)]
    command += ["--config", args.config] if args.config else []
    command += [word for given in args.set for word in ("--set", given)]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=ASK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CapacityError(f"--experts auto: no answer within {ASK_S:g} s; name an encoding instead") from error
    if done.returncode:
        raise CapacityError(f"--experts auto: {(done.stderr.strip().splitlines() or ['the planner ended'])[-1]}")
    found = json.loads(done.stdout)
    if "error" in found:
        raise CapacityError(f"--experts auto: no encoding fits; {found['error']}")
    print(f"--experts auto: {found['why']}", file=sys.stderr)
    return str(found["experts"])


def ask_for_repository(repository: str, revision: str, args: argparse.Namespace) -> str:
    """Returns the planner's choice for a repository of the hub; `keep` for one of GGUF files. Raises HubError."""
    from edgemoe.store.download import fetch_config

    with tempfile.TemporaryDirectory() as folder:
        if not fetch_config(repository, revision, Path(folder)):
            print("--experts auto: as the GGUF has them", file=sys.stderr)
            return KEEP
        return ask(Path(folder), args)

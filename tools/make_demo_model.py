"""Makes the demo model: reads the text of this machine, trains a small Qwen3-MoE, writes a checkpoint.

    python -m tools.make_demo_model --minutes 45            # time-boxed; prints how many steps it took
    python -m tools.make_demo_model --steps 1100            # the same number again
    python -m tools.make_demo_model --export-only           # writes the last checkpoint of a running training

A killed run continues where its last checkpoint was.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.demo_model import corpus, demo_export, tokens
from tools.demo_model.demo_network import Network, Shape
from tools.demo_model.training import Recipe, Trainer

DEFAULT_OUT = Path(__file__).parent.parent / "edgemoe" / "demo" / "model"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="checkpoint directory to write")
    parser.add_argument("--work", type=Path, default=Path(".cache/demo_model"), help="training state")
    parser.add_argument("--steps", type=int, default=0, help="train exactly so many steps of 4,096 tokens")
    parser.add_argument("--minutes", type=float, default=45.0, help="time to use where --steps is not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-only", action="store_true")
    return parser.parse_args()


def keep_freed_memory() -> None:
    """Reuses large buffers, which are mapped and zeroed at every step otherwise (a third of the time)."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def prepare(work: Path, shape: Shape, recipe: Recipe) -> tuple[corpus.Corpus, Tokenizer, dict[str, tokens.Domain]]:
    """Returns text, tokenizer and token arrays; a kept tokenizer and manifest must match the text of this machine."""
    work.mkdir(parents=True, exist_ok=True)
    text = corpus.gather(recipe.seed, max_chars=6_000_000, generated=30_000)
    manifest, kept = work / "manifest.json", work / "tokenizer.json"
    if kept.exists():
        if json.loads(manifest.read_text()) != text.files:
            raise SystemExit(f"the text has changed since {work} was begun; remove that folder to start again")
        tokenizer = Tokenizer.from_file(str(kept))
    else:
        tokenizer = tokens.train_tokenizer(text, shape.vocab, recipe.seed)
        manifest.write_text(json.dumps(text.files, indent=1))
        tokenizer.save(str(kept))
    return text, tokenizer, tokens.encode(text, tokenizer)


def main() -> None:
    options, shape, recipe = arguments(), Shape(), Recipe()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(recipe.seed)
    began = time.monotonic()
    text, tokenizer, domains = prepare(options.work, shape, recipe)
    sizes = {name: len(domain.tokens) for name, domain in domains.items()}
    print(f"text ready in {time.monotonic() - began:.0f} s; tokens per domain: {sizes}", flush=True)
    network = Network(shape)
    trainer = Trainer(network, domains, recipe, options.work)
    trainer.resume()
    if not options.export_only:
        trainer.run(options.steps, options.minutes)
    report = {
        "shape": shape.as_dict(), "parameters": sum(p.numel() for p in network.parameters()),
        "recipe": asdict(recipe), "steps": trainer.steps, "tokens": trainer.step * 4096,
        "seconds": round(trainer.seconds), "threads": options.threads, "torch": torch.__version__,
        "tokens_per_domain": sizes, **demo_export.judge(network, domains, tokenizer),
        "history": trainer.history, "files": text.files,
    }  # fmt: skip
    demo_export.write(network, tokenizer, options.out, report)
    print(
        json.dumps(
            {k: report[k] for k in ("steps", "loss", "divergence_bits", "samples")}, indent=1, ensure_ascii=False
        )
    )


if __name__ == "__main__":
    main()

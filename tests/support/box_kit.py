"""Shared parts of tests of whole boxes: a tiny model with a tokenizer, and its expected answers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from edgemoe.api.text.tokenizer import Vocabulary
from support.checkpoints import tiny_checkpoint
from support.front_kit import byte_level_tokenizer, write_model


class Oracle:
    """Computes the answers of one box that holds everything."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.complete = cache(self._complete)

    @torch.inference_mode()
    def _complete(self, prompt: str, max_tokens: int) -> str:
        ids = torch.tensor([self._tokenizer.encode(prompt).ids])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
            eos_token_id=[],
        )
        return Vocabulary(self._tokenizer).text(out[0, ids.shape[1] :].tolist(), skip_special=True)


def talking_checkpoint(family: str, folder: Path, *, stacked: bool = False, positions: int = 1024) -> Path:
    """Saves a random model that has the tests' tokenizer."""
    vocab = byte_level_tokenizer().get_vocab_size()
    tiny_checkpoint(family, folder, stacked=stacked, vocab_size=vocab, max_position_embeddings=positions)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = (folder / "config.json").read_text()
    write_model(folder)
    (folder / "config.json").write_text(config)
    return folder

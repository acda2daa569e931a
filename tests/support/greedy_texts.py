"""transformers' greedy answers as text, which a daemon's answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer


def greedy_texts(checkpoint: Path, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int) -> list[str]:
    """Returns transformers' greedy text of `tokens` tokens after each prompt, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        found = model.generate(torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        texts.append(tokenizer.decode(found[0, len(ids) :].tolist()))
    return texts

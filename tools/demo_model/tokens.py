"""The demo model's own tokenizer and chat template, and the corpus as token arrays."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.corpus import GENERATED, Corpus

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
END_OF_TEXT, IM_START, IM_END = range(3)
# Qwen's pre-tokenizer: words with their leading space, single digits, punctuation, line ends.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HELD_OUT = 0.03  # of each domain's tokens
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@dataclass(frozen=True)
class Domain:
    tokens: npt.NDArray[np.uint16]  # documents one after the other, each closed by <|endoftext|>
    starts: npt.NDArray[np.int64]  # position of each document's first token
    split: int  # tokens before it are for training
    whole: bool  # rows begin with a document

    def row(self, rng: np.random.Generator, length: int, held_out: bool = False) -> npt.NDArray[np.int64]:
        """Returns length + 1 tokens from a random position."""
        low, high = (self.split, len(self.tokens)) if held_out else (0, self.split)
        high -= length + 1
        if self.whole:
            starts = self.starts[(self.starts >= low) & (self.starts < high)]
            start = int(rng.choice(starts))
        else:
            start = int(rng.integers(low, high))
        return self.tokens[start : start + length + 1].astype(np.int64)


def train_tokenizer(corpus: Corpus, vocab: int, seed: int, sample_chars: int = 700_000) -> Tokenizer:
    """Trains byte-level BPE on an equal sample of every domain (half as much for each of the languages)."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng, sample = random.Random(seed), []
    for domain, texts in corpus.documents.items():
        if domain == "drill":  # only questions of the domain "chat"
            continue
        left = sample_chars if len(domain) > 2 else sample_chars // 2
        for text in rng.sample(texts, len(texts)):
            sample.append(text[: min(left, 20_000)])
            left -= len(sample[-1])
            if left <= 0:
                break
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Domain]:
    """Encodes every domain as one token array."""
    return {name: _domain(name, texts, tokenizer) for name, texts in corpus.documents.items()}


def _domain(name: str, texts: list[str], tokenizer: Tokenizer) -> Domain:
    encoded = [[*e.ids, END_OF_TEXT] for e in tokenizer.encode_batch(texts)]
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    tokens = np.fromiter((t for ids in encoded for t in ids), dtype=np.uint16, count=int(lengths.sum()))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Domain(tokens, starts, int(len(tokens) * (1 - HELD_OUT)), name in GENERATED)


def save(tokenizer: Tokenizer, directory: Path, context_tokens: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as transformers and the daemon read them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "chat_template": TEMPLATE.read_text(),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n")

"""Makes tokenizer.json and its companions from the metadata of a GGUF file.

Vocabulary, merges, kinds of tokens and chat template are the file's own. How text is cut into words before merging is
named there only, so the expressions of each name stand here; source: llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.store.gguf.gguf_file import GgufModel

Json = dict[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens
BPE, UNIGRAM, GEMMA = "gpt2", "llama", "gemma4"  # tokenizer.ggml.model; `llama` is SentencePiece with scores
SPACE = "\u2581"  # how a space is written there
MAX_TOKENS = 1 << 22
MOST_TOKEN_LETTERS = 1 << 12
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDINGS = ("eos", "eot", "eom")

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|""" + SPACES
)
KIMI_K2 = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+%s|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*%s|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
) % (f"{CONTRACTION}?", f"{CONTRACTION}?")
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DIGITS_THEN_GPT2 = (r"\p{N}", GPT2)
CUTS: dict[str, tuple[str, ...]] = {  # tokenizer.ggml.pre -> expressions that cut text, one after the other
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), (LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "exaone4", "a.x-4.0", "gigachat"), (GPT2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"), (QWEN2,)),
    "qwen35": (CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES,),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), DIGITS_THEN_GPT2),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        HAN,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", CJK, DEEPSEEK3_WORDS)),
    "tekken": (CASED % ("", "", ""),),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (CASED % (f"{CONTRACTION}?", f"{CONTRACTION}?", "{1,3}"),)),
    "kimi-k2": (KIMI_K2,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"),
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
WHOLE_WORDS = frozenset(  # words that are tokens themselves are not merged
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "glm4", "glm5", "tekken")
)
BEGUN = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"))  # with BOS


def tokenizer_files(model: GgufModel) -> dict[str, bytes]:
    """Returns a tokenizer's files by name. Raises UnsupportedModel and CheckpointError."""
    vocabulary = _Vocabulary(model)
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in SPECIAL.items():
        token = vocabulary.special(key)
        if token is not None:
            config[name] = vocabulary.tokens[token]
    if template := vocabulary.text("tokenizer.chat_template"):
        config["chat_template"] = template
    ends = [token for key in ENDINGS if (token := vocabulary.special(key)) is not None]
    generation: Json = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    bos = vocabulary.special("bos")
    if bos is not None:
        generation["bos_token_id"] = bos
    return {
        name: json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
        for name, content in (
            ("tokenizer.json", vocabulary.tokenizer()),
            ("tokenizer_config.json", config),
            ("generation_config.json", generation),
        )
    }


class _Vocabulary:
    """The vocabulary of one file, checked."""

    def __init__(self, model: GgufModel) -> None:
        self._model, self._where = model, model.files[0]
        self.model = self.text("tokenizer.ggml.model")
        if self.model not in (BPE, UNIGRAM, GEMMA):
            called = repr(self.model[:80]) if self.model else "none at all"
            raise UnsupportedModel(
                f"{self._where} has a tokenizer of the kind {called}; gpt2, llama, gemma4 can be read"
            )
        self.tokens = self._texts("tokenizer.ggml.tokens")
        if not 0 < len(self.tokens) <= MAX_TOKENS:
            raise CheckpointError(f"{self._where}: a vocabulary of {len(self.tokens)} tokens is impossible")
        rows = model.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in model.tensors else 0
        if rows and rows != len(self.tokens):
            raise CheckpointError(
                f"{self._where}: tokenizer.ggml.tokens has {len(self.tokens)} tokens, and token_embd.weight {rows} rows"
            )
        if any(len(token) > MOST_TOKEN_LETTERS for token in self.tokens):
            raise CheckpointError(f"{self._where}: a token has more than {MOST_TOKEN_LETTERS} letters")
        self.kinds = self._numbers("tokenizer.ggml.token_type", NORMAL)
        self.pre = self.text("tokenizer.ggml.pre") or "default"

    def special(self, key: str) -> int | None:
        """Returns the token of a purpose, such as "bos"; None where the file names none of its vocabulary."""
        found = self._model.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None

    def text(self, key: str) -> str:
        """Returns a text of the metadata, "" where there is none."""
        found = self._model.metadata.get(key, "")
        if not isinstance(found, str):
            raise CheckpointError(f"{self._where}: {key} must be a text, not {repr(found)[:80]}")
        return found

    def tokenizer(self) -> Json:
        """Returns tokenizer.json."""
        whole = {BPE: self._bpe, UNIGRAM: self._unigram, GEMMA: self._gemma}[self.model]()
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added(), **whole}

    def _bpe(self) -> Json:
        cuts = CUTS.get(self.pre)
        if cuts is None:
            known = ", ".join(sorted(CUTS))
            raise UnsupportedModel(
                f"{self._where} cuts text into words by {self.pre[:80]!r}, which is not known; known are {known}"
            )
        parts = [_split(cut) for cut in cuts]
        parts.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False})
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
            "post_processor": self._ends(self.pre in BEGUN),
            "decoder": level,
            "model": self._merging(self._texts("tokenizer.ggml.merges"), ignore_merges=self.pre in WHOLE_WORDS),
        }

    def _unigram(self) -> Json:
        """Returns SentencePiece's merging: the pair of neighbours with the best score joins first."""
        scores = self._numbers("tokenizer.ggml.scores", 0.0)
        if not np.isfinite(scores).all():
            raise CheckpointError(f"{self._where}: tokenizer.ggml.scores must be numbers, and one is not")
        ids = {token: number for number, token in enumerate(self.tokens)}
        merges = [
            (scores[number], number, token[:cut], token[cut:])
            for number, token in enumerate(self.tokens)
            if self.kinds[number] in (NORMAL, UNUSED)
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        merges.sort(key=lambda merge: (-merge[0], merge[1], len(merge[2])))
        prefixed = self._flag("tokenizer.ggml.add_space_prefix", True)
        return {
            **self._spaced(prefixed),
            "pre_tokenizer": None,
            "post_processor": self._ends(True),
            "model": self._merging([f"{left} {right}" for *_, left, right in merges], byte_fallback=True),
        }

    def _gemma(self) -> Json:
        return {
            **self._spaced(self._flag("tokenizer.ggml.add_space_prefix", False)),
            "pre_tokenizer": _split(r"[^\n]+|[\n]+"),
            "post_processor": self._ends(True),
            "model": self._merging(self._texts("tokenizer.ggml.merges"), ignore_merges=True, byte_fallback=True),
        }

    def _spaced(self, prefixed: bool) -> Json:
        """Returns normaliser and decoder of tokenizers that write spaces as `SPACE`."""
        steps: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
        back: list[Json] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefixed:
            steps.insert(0, {"type": "Prepend", "prepend": SPACE})
            back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "decoder": {"type": "Sequence", "decoders": back},
        }

    def _merging(self, merges: Sequence[str], **options: bool) -> Json:
        unknown = self.special("unknown")
        pairs = [merge.split(" ", 1) for merge in merges]
        vocab: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            vocab.setdefault(token, number)
        fitting = [pair for pair in pairs if len(pair) == 2 and all(each in vocab for each in (*pair, "".join(pair)))]
        if not fitting and any(
            kind == NORMAL and len(token) > 1 for token, kind in zip(self.tokens, self.kinds, strict=True)
        ):
            raise CheckpointError(
                f"{self._where}: no two of its tokens are merged: tokenizer.ggml.merges is missing, or of another "
                "vocabulary; fetch the file again"
            )
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None or self.model == BPE else self.tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": self.model != BPE,
            "byte_fallback": False,
            "ignore_merges": False,
            **options,
            "vocab": vocab,
            "merges": fitting,
        }

    def _added(self) -> list[Json]:
        """Returns the tokens that are found in text before anything is merged."""
        named = {self.special(key) for key in SPECIAL.values()} - {None}
        return [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if token and (kind in (CONTROL, USER_DEFINED, UNKNOWN) or number in named)
        ]

    def _ends(self, begun: bool) -> Json | None:
        """Returns the post-processor that adds BOS or EOS to each text, None if there is none."""
        pieces: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
        used: Json = {}
        for key, usual, place in (("bos", begun, 0), ("eos", False, 2)):
            token = self.special(key)
            if token is not None and self._flag(f"tokenizer.ggml.add_{key}_token", usual):
                text = self.tokens[token]
                pieces.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
                used[text] = {"id": text, "ids": [token], "tokens": [text]}
        if not used:
            return None
        pair = [*pieces, *({key: {**value, "type_id": 1} for key, value in piece.items()} for piece in pieces)]
        for piece in pair[len(pieces) :]:
            if "Sequence" in piece:
                piece["Sequence"]["id"] = "B"
        return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": used}

    def _flag(self, key: str, usual: bool) -> bool:
        found = self._model.metadata.get(key, usual)
        return found if isinstance(found, bool) else usual

    def _texts(self, key: str) -> list[str]:
        found = self._model.metadata.get(key, [])
        if not isinstance(found, list):
            raise CheckpointError(f"{self._where}: {key} must be a list of texts")
        return found

    def _numbers(self, key: str, usual: float) -> list[Any]:
        found = self._model.metadata.get(key)
        if found is None:
            return [usual] * len(self.tokens)
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise CheckpointError(f"{self._where}: {key} must have a number for each of {len(self.tokens)} tokens")
        return list(found.tolist())


def _split(expression: str) -> Json:
    """Returns a pre-tokenizer step: each match is a word, and so is the text between two matches."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}

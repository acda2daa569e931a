"""Loads a model's tokenizer, chat template, end-of-sequence tokens and sampling defaults.

Reads the files beside the weights: tokenizer.json, tokenizer_config.json, generation_config.json, config.json and the
chat template. Needs neither weights nor torch.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgemoe.api.dialects.dialect import dialect_of
from edgemoe.api.schema import RequestBody, convert
from edgemoe.api.text.chat_template import ChatTemplate, special_tokens
from edgemoe.api.text.detokenize import Vocabulary
from edgemoe.errors import CheckpointError, InvalidRequest
from edgemoe.types.arrays import Json

log = logging.getLogger(__name__)

LETTERS, MARGIN = 8, 1.25  # of a text that are looked at first, for each token allowed; what is clearly more
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class TextModel:
    """Converts text to token ids and back. May be used from several threads."""

    def __init__(self, directory: Path) -> None:
        """Reads the files in `directory`. Raises CheckpointError where one is missing or unreadable."""
        self.directory = directory
        tokenizer_config = read_json(directory / "tokenizer_config.json")
        generation = read_json(directory / "generation_config.json")
        self._tokenizer = _tokenizer(directory / "tokenizer.json")
        self.vocabulary = Vocabulary(self._tokenizer)
        self.template = ChatTemplate.load(directory, tokenizer_config)
        response = tokenizer_config.get("response_template")
        self.dialect = dialect_of(
            self.template.text if self.template else "",
            self.vocabulary.added,
            response if isinstance(response, dict) else None,
        )
        self._config = tokenizer_config
        self.eos = self._eos(tokenizer_config, generation, read_json(directory / "config.json"))
        self.defaults = _defaults(generation)

    @property
    def vocab_tokens(self) -> int:
        """Returns the size of the vocabulary, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def about(self) -> Json:
        """Returns the tokenizer's configuration, with chat template and dialect in use, for clients."""
        return {
            **self._config,
            "tokenizer_class": self._config.get("tokenizer_class", "PreTrainedTokenizerFast"),
            "vocab_size": self.vocab_tokens,
            "eos_token_ids": self.eos,
            "chat_template": self.template.source if self.template is not None else None,
            "dialect": self.dialect.name,
        }

    def encode(self, text: str, add_special_tokens: bool, most_tokens: int | None = None) -> list[int]:
        """Returns token ids; of a text that has clearly more than `most_tokens` only the first, more than these.

        A megabyte takes half a second and a hundred megabytes.
        """
        letters = len(text) if most_tokens is None else LETTERS * most_tokens
        while letters < len(text):
            ids = self._encode(text[:letters], add_special_tokens)
            if most_tokens is not None and len(ids) > MARGIN * most_tokens:  # the last may be others in the whole text
                return ids
            letters *= 2
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Releases the interpreter lock, which `Tokenizer.encode` does not."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _eos(self, tokenizer_config: Json, generation: Json, config: Json) -> tuple[int, ...]:
        """Returns all tokens that end a text: generation_config's, or else config's, the tokenizer's, the dialect's."""
        ids = generation.get("eos_token_id")
        ids = config.get("eos_token_id") if ids is None else ids
        listed = [ids] if isinstance(ids, int) else list(ids or ())
        own = special_tokens(tokenizer_config).get("eos_token")
        own_id = None if own is None else self._tokenizer.token_to_id(own)
        spoken = (self._tokenizer.token_to_id(name) for name in self.dialect.ends)
        return tuple(dict.fromkeys([*listed, *(one for one in (own_id, *spoken) if one is not None)]))


def _defaults(generation: Json) -> dict[str, float]:
    """Returns the sampling defaults of a model's files. Omits values that clients could not send either."""
    defaults: dict[str, float] = {}
    for key in SAMPLING_DEFAULTS:
        try:
            value = getattr(convert({key: generation.get(key)}, RequestBody), key)
        except InvalidRequest as error:
            log.warning(
                "generation_config.json has a value that cannot be honoured: left out", extra={"why": str(error)}
            )
        else:
            defaults |= {} if value is None else {key: value}
    return defaults


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in `file`; empty where there is no such file. Raises CheckpointError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not an object")
    return value


def _tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; a model is served with its tokenizer.json (of a fast tokenizer)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

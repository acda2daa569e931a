"""Converts text to tokens and back by the files beside a model's weights; matches stop strings.

Reads tokenizer.json, tokenizer_config.json, generation_config.json, config.json and the chat template, without weights
and torch. Detokenizing takes constant work per token and never splits a character.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgemoe.api.dialects.dialect import can_reason, dialect_of
from edgemoe.api.dialects.growing_text import held_back
from edgemoe.api.schema import RequestBody, convert
from edgemoe.api.text.chat_template import ChatTemplate, special_tokens
from edgemoe.api.text.infill import infill_marks
from edgemoe.errors import CheckpointError, InvalidRequest
from edgemoe.types.json_object import Json

log = logging.getLogger(__name__)

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each printable character of GPT-2's alphabet (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(shifted)}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Returns whether the decoder reads GPT-2's alphabet; tokens of other tokenizers may have its letters, too."""
    if tokenizer.decoder is None:
        return tokenizer.token_to_id("\u0120") is not None
    return b'"ByteLevel"' in tokenizer.decoder.__getstate__()  # its JSON


class Vocabulary:
    """Maps tokens to bytes. `added` has the ids of added tokens by name, `special` the ids of special ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.added = {name: i for i, name in self._added.items()}
        self._special_ids = frozenset(self.special.values())
        self._alphabet = byte_alphabet() if _is_byte_level(tokenizer) else None
        self._ids = {name: i for i, name in self._added.items()}
        self.bytes_of = lru_cache(maxsize=1 << 14)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token: an added token's name, and none for an unknown id.

        Tokenizers of SentencePiece's kind have added tokens for runs of spaces, which are written as `SPACE`, too.
        """
        if (name := self._added.get(token)) is not None:
            is_text = self._alphabet is None and token not in self._special_ids
            return (name.replace(SPACE, " ") if is_text else name).encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._alphabet is not None:
            return bytes(self._alphabet[letter] for letter in piece if letter in self._alphabet)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(SPACE, " ").encode()

    def id_of(self, name: str) -> int | None:
        """Returns the id of an added token."""
        return self._ids.get(name)

    def name(self, token: int) -> str:
        """Returns a token's text, or "bytes:\\xe2\\x80" where its bytes are not UTF-8, as OpenAI does."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_special(self, token: int) -> bool:
        """Returns whether the token is special, so that texts do not show it."""
        return token in self._special_ids

    def text(self, tokens: Iterable[int], skip_special: bool = False) -> str:
        """Returns the text of `tokens`; invalid UTF-8 becomes U+FFFD."""
        kept = (token for token in tokens if not (skip_special and token in self._special_ids))
        return b"".join(map(self.bytes_of, kept)).decode(errors="replace")


class Detokenizer:
    """Converts one growing text. Omits special tokens, except those named in `shown`."""

    def __init__(self, vocabulary: Vocabulary, shown: Iterable[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._shown = frozenset(vocabulary.special.get(name, -1) for name in shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Returns the characters that this token completes."""
        if self._vocabulary.is_special(token) and token not in self._shown:
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token))

    def flush(self) -> str:
        """Returns U+FFFD where the text ends within a character, else ""."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Passes text on up to the first complete stop string, and holds back a possible beginning of one."""

    def __init__(self, strings: tuple[str, ...] = (), unsearched: int = 0) -> None:
        """Looks for `strings` after the first `unsearched` texts, as vLLM does for `min_tokens`."""
        self.strings = strings
        self._unsearched = unsearched
        self.matched = ""  # the stop string that has ended the text
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string has ended the text."""
        return bool(self.matched)

    def feed(self, text: str) -> str:
        """Adds `text`. Returns the text, held back or new, that cannot belong to a stop string."""
        self._unsearched -= 1
        if not self.strings or self.stopped or self._unsearched >= 0:
            return "" if self.stopped else text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.strings if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = held_back(text, self.strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text held back, when no more comes."""
        text, self._held = self._held, ""
        return text


LETTERS, MARGIN = 8, 1.25  # characters encoded first, for each token allowed; by how much a text must exceed that
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
        self.template_text = self.template.text if self.template is not None else ""
        self.dialect = dialect_of(
            self.template_text,
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

    @property
    def can_call_tools(self) -> bool:
        """Returns whether the model can be given tools."""
        return self.template is not None and self.template.takes_tools and self.dialect.takes_tool_calls

    @property
    def can_think(self) -> bool:
        """Returns whether the model may reason."""
        return can_reason(self.dialect, self.template_text, self.vocabulary.added)

    @property
    def special_names(self) -> dict[str, str]:
        """Returns the texts of bos_token, eos_token and others."""
        return special_tokens(self._config)

    @property
    def capabilities(self) -> list[str]:
        """Returns the model's capabilities, by Ollama's names."""
        can = {
            "completion": True,
            "tools": self.can_call_tools,
            "thinking": self.can_think,
            "insert": infill_marks(self.vocabulary.added) is not None,
        }
        return [name for name, is_there in can.items() if is_there]

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

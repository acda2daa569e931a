"""Converts token ids to text, one token at a time, without splitting a character.

A token stands for bytes. Byte-level BPE writes them in GPT-2's printable alphabet; byte-fallback BPE writes spaces as
U+2581 and single bytes as <0xHH>. The tokens' bytes go through an incremental UTF-8 decoder, so that the work per token
is constant.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Tokenizer

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each printable character of GPT-2's alphabet (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(shifted)}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether tokens are written in GPT-2's alphabet, as their decoder says: others have tokens of its letters, too."""
    if tokenizer.decoder is None:
        return tokenizer.token_to_id("\u0120") is not None
    return b'"ByteLevel"' in tokenizer.decoder.__getstate__()  # its JSON


class Vocabulary:
    """Maps tokens to bytes. `added` are the names of added tokens, `special` the ids of special ones by name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.added = frozenset(self._added.values())
        self._special_ids = frozenset(self.special.values())
        self._alphabet = byte_alphabet() if _is_byte_level(tokenizer) else None
        self.bytes_of = lru_cache(maxsize=1 << 14)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token: an added token's name, and none for an unknown id."""
        if (name := self._added.get(token)) is not None:
            return name.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._alphabet is not None:
            return bytes(self._alphabet[letter] for letter in piece if letter in self._alphabet)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(SPACE, " ").encode()

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
